"""When another plan pays, and what is worth measuring: no ranks, no clocks."""

from __future__ import annotations

from itertools import pairwise

import pytest

from slipstream.auto.decision import StepTime, decide
from slipstream.auto.settings import AutoSettings
from slipstream.auto.sizes import sizes_to_probe
from slipstream.costs import Line
from slipstream.errors import PlanError
from slipstream.plan import plan_step
from steps import costs_of, step_of

STEP = step_of([100] * 10, gap_seconds=1.0)  # 4,000 B in 10 s of backward


def verdict(startup: float, per_byte: float, old: str = "single", error: float = 0.0) -> str:
    """The objection; empty where the plan changes."""
    costs = costs_of(Line(startup, per_byte))
    plan = plan_step(old, STEP, costs)
    return decide(STEP, costs, plan, StepTime(14.0, error), AutoSettings()).objection


def test_a_plan_changes_where_that_gains_more_than_3_percent_and_the_spread() -> None:
    assert verdict(0.1, 1e-3) == ""
    assert verdict(0.1, 5e-5) == "a gain below 3 %"
    assert verdict(0.1, 1e-3, error=2.0) == ""
    assert verdict(0.1, 1e-3, error=4.0) == "a gain below the spread of the measurements"
    assert verdict(100.0, 1e-3) == "which are the same buckets"
    assert verdict(2.0, 1e-4, old="wfbp") == ""  # merging pays


def test_steps_are_slower_only_beyond_noise() -> None:
    calm, noisy = StepTime.of([1.0] * 8), StepTime.of([0.8, 1.2] * 4)
    assert calm == StepTime(1.0, 0.0) and noisy.error_seconds > 0.1
    assert StepTime(1.02, 0.0).is_slower_than(calm)
    assert not StepTime(1.005, 0.0).is_slower_than(calm)
    assert not StepTime(1.2, 0.0).is_slower_than(noisy)
    assert StepTime(1.4, 0.0).is_slower_than(noisy)


def test_sizes_go_from_the_smallest_bucket_to_the_whole_model() -> None:
    sizes = sizes_to_probe([40, 9_000, 4 * 2**20, 2**20])
    assert sizes[0] == 4096 and sizes[-1] == 40 + 9_000 + 5 * 2**20 - (40 + 9_000) % 4
    assert all(size % 4 == 0 for size in sizes) and len(sizes) < 10
    assert all(1.5 < b / a <= 3.1 for a, b in pairwise(sizes))
    assert sizes_to_probe([8]) == [8] and sizes_to_probe([]) == [4] == sizes_to_probe([0])
    assert sizes_to_probe([2**40])[-1] == 256 * 2**20


def test_a_planner_named_twice_is_refused() -> None:
    assert AutoSettings.of("mgwfbp", {"variant": "caffe"}).planner == "mgwfbp"
    with pytest.raises(PlanError, match="names its planner already"):
        AutoSettings.of("optimal", {"planner": "wfbp"})
