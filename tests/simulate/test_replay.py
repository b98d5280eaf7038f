"""A recorded job replayed: two ranks that trained a 4-layer MLP over links of 100 Mbit/s.

`support/record_mlp.py` recorded the trace, the costs, the plans and the measured steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.costs import ClusterSpec, Costs
from slipstream.plan import Plan, plan_step
from slipstream.simulate import simulate_step
from slipstream.trace import Trace

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("recorded_mlp.json").read_text())
TRACE = Trace.from_json(json.dumps(RECORDED["trace"]))
COSTS = Costs.of(ClusterSpec.from_json(json.dumps(RECORDED["cluster"])))


@pytest.mark.parametrize("planner", sorted(RECORDED["plans"]))
def test_the_step_at_the_recorded_setting_is_within_10_percent_of_the_measured_one(
    planner: str,
) -> None:
    plan = Plan.from_json(json.dumps(RECORDED["plans"][planner]))
    step = simulate_step(TRACE, COSTS, plan)
    assert step.step_seconds == pytest.approx(RECORDED["step_seconds"][planner], rel=0.10)
    assert step.step_seconds > 5 * TRACE.compute_seconds, "most of it is communication"


def test_planners_still_make_the_recorded_plans() -> None:
    for planner, recorded in RECORDED["plans"].items():
        plan = plan_step(planner, TRACE, COSTS)
        assert plan.fingerprint() == Plan.from_json(json.dumps(recorded)).fingerprint()
