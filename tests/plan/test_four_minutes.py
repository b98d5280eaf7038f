"""The rule of "ImageNet in four minutes": a pool that is sent when full, a switch by size."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.cluster import Cluster
from slipstream.costs import Costs, Line
from slipstream.errors import CostError, PlanError
from slipstream.plan import Plan, plan_step
from slipstream.plan.four_minutes import crossing_bytes
from slipstream.trace import Trace, TraceGradient

QUICK, WIDE = Line(1.0, 3e-3), Line(9.0, 1e-3)
"""The first is cheaper up to 4,000 bytes."""


def trace(*numels: int) -> Trace:
    return Trace(
        model="some layers",
        batch_size=1,
        input_seconds=0.0,
        forward_seconds=1.0,
        update_seconds=0.0,
        gradients=tuple(
            TraceGradient(name=f"g{i}", numel=numel, ready_seconds=float(i + 1))
            for i, numel in enumerate(numels)
        ),
    )


def planned(*numels: int, **options: Any) -> Plan:
    costs = Costs.from_curves(Cluster((2, 2)), {"hierarchical": QUICK, "ring": WIDE})
    return plan_step("four_minutes", trace(*numels), costs, **options)


def test_a_pool_is_sent_as_soon_as_it_holds_enough_by_the_collective_for_its_size() -> None:
    plan = planned(100, 100, 2000, 10, 10, pool_bytes=700, switch_bytes=1000)
    assert [(bucket.gradients, bucket.collective) for bucket in plan.reduce] == [
        (("g0", "g1"), "hierarchical"),
        (("g2",), "ring"),
        (("g3", "g4"), "hierarchical"),
    ]


def test_the_switch_is_where_the_costs_cross_unless_it_is_set() -> None:
    assert crossing_bytes(QUICK, WIDE) == 2048
    assert crossing_bytes(WIDE, QUICK) == 0
    plan = planned(512, 1024, 4096, pool_bytes=1)
    assert [bucket.collective for bucket in plan.reduce] == ["hierarchical", "ring", "ring"]


def test_what_it_cannot_plan_with_is_refused() -> None:
    with pytest.raises(PlanError, match="'four_minutes' needs the costs of both"):
        plan_step("four_minutes", trace(1), Costs.from_curves(Cluster((2,)), {"ring": WIDE}))
    with pytest.raises(CostError, match="Nobody has measured"):
        plan_step("four_minutes", trace(1), Costs.from_curves(Cluster((2,)), {"native": WIDE}))
    with pytest.raises(PlanError, match="switch_bytes is 0"):
        planned(1, switch_bytes=0)
    with pytest.raises(PlanError, match="first_bytes is 0"):
        planned(1, pool_bytes=0)
    with pytest.raises(PlanError, match="no option 'cap_bytes'; it takes pool_bytes, switch_bytes"):
        planned(1, cap_bytes=3)
