"""Sparse ways in plans: who may, where it pays, and what is said of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.cluster import Cluster
from slipstream.costs import Costs, Line, Link, Links
from slipstream.costs.formulas import break_even_density
from slipstream.errors import CostError, PlanError
from slipstream.plan import Gradient, Plan, explain, plan_buckets, plan_step
from slipstream.plan.sparsity import Sparsity, implied, resparsified
from slipstream.trace import Trace, TraceGradient
from slipstream.wires import Density

SPARSITY = Sparsity(density=0.01, dense=("*.bias", "head.*"), small_numel=100)
WIRE = SPARSITY.wire
NAMES = ["head.weight", "head.bias", "b.weight", "b.bias", "a.weight", "a.bias", "norm"]
NUMELS = [5000, 50, 40_000, 200, 30_000, 300, 64]


def trace_of(numels: list[int] | None = None) -> Trace:
    numels = numels or NUMELS
    return Trace(
        model="small",
        batch_size=1,
        input_seconds=0.0,
        forward_seconds=0.01,
        update_seconds=0.0,
        gradients=tuple(
            TraceGradient(name=name, numel=numel, ready_seconds=0.001 * (1 + at))
            for at, (name, numel) in enumerate(zip(NAMES, numels, strict=True))
        ),
    )


def costs_of(sparse_seconds_per_byte: float, startup: float = 1e-4) -> Costs:
    return Costs(
        Cluster((1, 1)),
        {
            ("native", "all_reduce", "float32"): Line(startup, 1e-7),
            ("hitopk", "all_reduce", WIRE): Line(startup, sparse_seconds_per_byte),
        },
    )


def test_who_may_be_sent_sparsely() -> None:
    allowed = [g.name for g in trace_of().gradients if SPARSITY.allows(g)]
    assert allowed == ["b.weight", "a.weight"]
    assert not SPARSITY.allows(Gradient("c.weight", 10**6, "float64"))
    assert SPARSITY.allows(Gradient("c.weight", 10**6, "bfloat16"))
    assert SPARSITY.unmatched(NAMES) == []
    assert Sparsity(dense=("haed.*", "norm")).unmatched(NAMES) == ["haed.*"]


@pytest.mark.parametrize("density", [0, -0.1, 1.5, float("nan"), True, "0.1"])
def test_a_density_is_a_share(density: object) -> None:
    """Case 29."""
    with pytest.raises(PlanError, match="above 0 and at most 1"):
        Sparsity(density=density)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="no sparse collective"):
        Sparsity(collective="ring")  # type: ignore[arg-type]


@pytest.mark.parametrize("planner", ["wfbp", "single", "fixed", "ddp"])
def test_planners_by_size_send_sparsely_what_may_be(planner: str) -> None:
    gradients = [Gradient(g.name, g.numel, g.dtype) for g in trace_of().gradients]
    plan = plan_buckets(planner, gradients, sparsity=SPARSITY)
    plan.check_covers(gradients)
    sparse = [b for b in plan.reduce if not isinstance(b.wire, str)]
    assert [name for bucket in sparse for name in bucket.gradients] == ["b.weight", "a.weight"]
    assert {(b.collective, b.wire) for b in sparse} == {("hitopk", WIRE)}
    last = [NAMES.index(bucket.gradients[-1]) for bucket in plan.reduce]
    assert last == sorted(last)


def test_the_planner_sends_sparsely_only_where_that_is_faster() -> None:
    trace = trace_of()
    cheap, dear = costs_of(1e-9), costs_of(1e-6)
    plan = plan_step("optimal", trace, cheap, sparsity=SPARSITY)
    plan.check_covers(trace.gradients)
    sparse = [n for b in plan.reduce if not isinstance(b.wire, str) for n in b.gradients]
    assert sorted(sparse) == ["a.weight", "b.weight"]
    plain = plan_step("optimal", trace, cheap)
    assert (plan.predicted_step_seconds or 0.0) < 0.8 * (plain.predicted_step_seconds or 0.0)
    kept = plan_step("optimal", trace, dear, sparsity=SPARSITY)
    assert kept.travels_like(plan_step("optimal", trace, dear))
    said = " ".join(explain(plan, trace, cheap, sparsity=SPARSITY).summary())
    assert "send 0.01 of the elements by hitopk; 2 gradients" in said
    assert "below a density of 50.0 %" in said
    said = " ".join(explain(kept, trace, dear, sparsity=SPARSITY).summary())
    assert "0.01 of the elements by hitopk pays nowhere here" in said
    nobody = Sparsity(density=0.01, small_numel=10**6)
    said = " ".join(explain(kept, trace, dear, sparsity=nobody).summary())
    assert "No gradient may send 0.01" in said


@given(
    st.lists(st.integers(1, 10**6), min_size=7, max_size=7),
    st.floats(1e-11, 1e-6),
    st.floats(0, 1e-2),
)
def test_what_is_permitted_never_makes_a_plan_slower(
    numels: list[int], sparse: float, startup: float
) -> None:
    trace, costs = trace_of(numels), costs_of(sparse, startup)
    plan = plan_step("optimal", trace, costs, tolerance=0.0, sparsity=SPARSITY)
    plan.check_covers(trace.gradients)
    plain = plan_step("optimal", trace, costs, tolerance=0.0)
    assert plan.predicted_step_seconds is not None and plan.lower_bound_seconds is not None
    assert plan.predicted_step_seconds <= (plain.predicted_step_seconds or 0.0) * (1 + 1e-12)
    assert plan.lower_bound_seconds <= plan.predicted_step_seconds * (1 + 1e-12)
    bounds = explain(plan, trace, costs, sparsity=SPARSITY).bounds
    assert bounds[-1].step_seconds <= plan.predicted_step_seconds * (1 + 1e-12)


def test_a_plan_that_is_read_is_explained_by_what_it_does() -> None:
    trace, costs = trace_of(), costs_of(1e-9)
    plan = plan_step("optimal", trace, costs, sparsity=SPARSITY)
    again = Plan.from_json(plan.to_json(), "the plan")
    assert again == plan
    found = implied(again.reduce)
    assert found is not None and found.wire == WIRE
    assert [g.name for g in trace.gradients if found.allows(g)] == ["b.weight", "a.weight"]
    reasons = explain(again, trace, costs)
    assert reasons.bounds[-1].step_seconds <= reasons.timing.step_seconds
    assert implied(plan_step("optimal", trace, costs).reduce) is None


def test_densities_of_a_plan_change_and_everything_can_be_sent() -> None:
    plan = plan_step("optimal", trace_of(), costs_of(1e-9), sparsity=SPARSITY)
    denser = resparsified(plan, Sparsity(density=0.25, values="bfloat16", collective="a2a_topk"))
    ways = {(b.collective, b.wire) for b in denser.reduce if not isinstance(b.wire, str)}
    assert ways == {("a2a_topk", Density(density=0.25, values="bfloat16"))}
    full = resparsified(plan, None)
    assert {(b.collective, b.wire) for b in full.reduce} == {("native", "float32")}
    assert [b.gradients for b in full.reduce] == [b.gradients for b in plan.reduce]


def test_without_costs_there_is_no_sparse_way() -> None:
    costs = Costs(Cluster((1, 1)), {("native", "all_reduce", "float32"): Line(1e-4, 1e-7)})
    with pytest.raises(CostError, match="Nobody has measured all_reduce by 'hitopk'"):
        plan_step("optimal", trace_of(), costs, sparsity=SPARSITY)


def test_break_even_densities_are_the_formulas() -> None:
    """2s / (m (s+4)): 6.25 % in 32 bits and 4.17 % in 16 on 16 nodes."""
    nodes = Cluster.regular(16, 8)
    assert break_even_density(nodes) == pytest.approx(0.0625)
    assert break_even_density(nodes, "float16") == pytest.approx(2 / 48)
    assert break_even_density(Cluster((8,))) == float("inf")


@pytest.mark.parametrize(
    ("collective", "density", "seconds"),
    [("hitopk", 0.01, 7.36e-3), ("hitopk", 0.001, 0.736e-3), ("naive_topk", 0.001, 6.23e-3)],
)
def test_costs_by_formula_are_those_of_the_worked_example(
    collective: str, density: float, seconds: float
) -> None:
    """ResNet-50 in float16 on 16 nodes of 8 with 25 Gbit/s, bytes between nodes alone."""
    free = Link(latency_seconds=0.0, seconds_per_byte=0.0)
    card = Link(latency_seconds=0.0, seconds_per_byte=1 / 3.125e9)
    links = Links(intra=free, inter=card, select_seconds_per_byte=0.0)
    costs = Costs(Cluster.regular(16, 8), {}, links)
    curve = costs.curve(collective, "all_reduce", Density(density=density, values="float16"))
    assert curve.seconds(4 * 25_557_032) == pytest.approx(seconds, rel=0.01)
    dense = costs.curve("torus", "all_reduce", "float16")
    assert dense.seconds(4 * 25_557_032) == pytest.approx(30.7e-3, rel=0.01)
