"""Explanations: each number is checked against the model, each sentence against a case."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.costs import Costs, Line
from slipstream.errors import CostError
from slipstream.plan import PLANNER_NAMES, Bucket, Plan, explain, plan_step, time_step
from slipstream.trace import Trace
from steps import FOUR_NODES, costs_of, lines, step_of, steps

planners = st.sampled_from(PLANNER_NAMES)


def merged(plan: Plan, half: str, index: int) -> Plan:
    """The plan with bucket `index` of one half and the one behind it made one."""
    buckets: list[Bucket] = list(getattr(plan, half))
    one, two = buckets[index : index + 2]
    joined = Bucket(gradients=one.gradients + two.gradients, bytes=one.bytes + two.bytes)
    return plan.model_copy(
        update={half: (*buckets[:index], joined, *buckets[index + 2 :])},
    )


@given(steps(dtypes=("float32", "float64")), planners, lines)
def test_the_parts_add_up(trace: Trace, planner: str, line: Line) -> None:
    plan = plan_step(planner, trace, costs_of(line))
    why = explain(plan, trace, costs_of(line))
    exposed = sum(bucket.exposed_seconds for bucket in why.buckets)
    assert exposed == pytest.approx(why.timing.exposed_seconds, abs=1e-9)
    for bucket in why.buckets:
        takes = bucket.timing.end_seconds - bucket.timing.start_seconds
        assert bucket.hidden_seconds + bucket.exposed_seconds == pytest.approx(takes, abs=1e-12)
        assert min(bucket.hidden_seconds, bucket.busy_seconds, bucket.gathering_seconds) >= 0
    assert why.timing == time_step(trace, costs_of(line), plan)
    assert why.bounds[-1].step_seconds == plan.lower_bound_seconds
    assert why.distance >= -1e-12
    others = (why.timing.step_seconds, why.unmerged_step_seconds, why.single_step_seconds)
    assert why.best_step_seconds <= min(others)


@given(steps(dtypes=("float32", "float64")), planners, lines)
def test_one_more_merge_costs_what_the_model_says(trace: Trace, planner: str, line: Line) -> None:
    costs = costs_of(line)
    plan = plan_step(planner, trace, costs)
    why = explain(plan, trace, costs)
    kinds = {gradient.name: gradient.dtype for gradient in trace.gradients}
    for reason in why.buckets:
        buckets = getattr(plan, reason.half)
        last = reason.index == len(buckets) - 1
        dtypes = {kinds[b.gradients[0]] for b in buckets[reason.index : reason.index + 2]}
        if last or len(dtypes) > 1:
            assert reason.merge_seconds is None
            continue
        step = time_step(trace, costs, merged(plan, reason.half, reason.index)).step_seconds
        assert reason.merge_seconds == pytest.approx(step - why.timing.step_seconds, abs=1e-9)


@given(steps(), lines)
def test_in_an_exact_plan_no_merge_comes_free(trace: Trace, line: Line) -> None:
    """Otherwise the fewest-bucket pass would have made it."""
    costs = costs_of(line)
    plan = plan_step("optimal", trace, costs, tolerance=0.0)
    for reason in explain(plan, trace, costs).buckets:
        assert reason.merge_seconds is None or reason.merge_seconds > 0


def test_a_plan_as_a_person_reads_it() -> None:
    trace = step_of([250] * 4, gap_seconds=1e-3)
    costs = costs_of(Line(0.5e-3, 1e-6))
    why = explain(plan_step("optimal", trace, costs), trace, costs)
    assert [str(reason) for reason in why.buckets] == [
        "reduce 0 (g0; 1000 B): is ready at 1.00 ms; its 1.50 ms are hidden; merged with reduce 1 "
        "the step would end 500 µs later.",
        "reduce 1 (g1; 1000 B): is ready at 2.00 ms (the channel was busy for 500 µs meanwhile), "
        "sets out at 2.50 ms; its 1.50 ms are hidden; merged with reduce 2 the step would end "
        "1.00 ms later.",
        "reduce 2 (2, g2 to g3; 1.95 KiB): is ready at 4.00 ms (the channel was busy for 1.00 ms "
        "meanwhile); its 2.50 ms are exposed.",
    ]
    summary = " ".join(why.summary())
    assert "The step takes 6.50 ms; 2.50 ms of it is communication that nothing hides." in summary
    assert "One bucket per tensor would take 7.00 ms, a single bucket 8.50 ms." in summary


def test_gathers_are_explained_from_the_forward() -> None:
    trace = step_of([250] * 4, gap_seconds=1e-3, forward_seconds=4e-3)
    costs = costs_of(Line(0.2e-3, 0.5e-6))
    why = explain(plan_step("pipelined", trace, costs), trace, costs)
    gathers = [str(reason) for reason in why.buckets if reason.half == "gather"]
    assert gathers[0].startswith("gather 0 (g3; 1000 B): sets out at 0 s; its 700 µs are exposed;")
    assert gathers[-1].endswith("are hidden.")


def test_regimes_in_which_merging_cannot_help_are_named() -> None:
    trace = step_of([250] * 4, gap_seconds=1e-3)

    def summary(planner: str, line: Line) -> str:
        plan = plan_step(planner, trace, costs_of(line))
        return " ".join(explain(plan, trace, costs_of(line)).summary())

    swamped = summary("optimal", Line(1e-4, 1.0))
    assert "The network is the limit, and no merging changes that" in swamped
    assert "Merging gains next to nothing here" in swamped
    fast = summary("optimal", Line(1e-6, 1e-12))
    assert "The computation is the limit: communication is hidden." in fast
    for planner in ("optimal", "wfbp"):
        slow_start = summary(planner, Line(2e-3, 1e-9))
        assert "Merging gains next to nothing" not in slow_start
        assert "the limit" not in slow_start
    for planner in ("wfbp", "single"):
        assert "Merging gains next to nothing" in summary(planner, Line(0.0, 1e-9))
    late = step_of([1] * 6, gap_seconds=1e-3)
    why = explain(plan_step("wfbp", late, costs_of(Line(1.0, 0.0))), late, costs_of(Line(1.0, 0.0)))
    assert "Overlap gains next to nothing here" in " ".join(why.summary())
    assert "Overlap gains" not in swamped + fast
    assert "larger batch a rank or pipeline." in swamped
    assert "send fewer bytes or use a larger batch a rank." in summary("pipelined", Line(0.0, 1.0))


def test_a_plan_that_is_not_the_best_is_told_what_the_best_would_take() -> None:
    trace, costs = step_of([250] * 4, gap_seconds=1e-3), costs_of(Line(2e-3, 1e-9))
    why = explain(plan_step("wfbp", trace, costs), trace, costs)
    steps = (why.timing.step_seconds, why.best_step_seconds)
    assert steps == pytest.approx((9.004e-3, 6.003e-3))
    best = "The best buckets would take 6.00 ms; this plan is 50.0 % above them."
    assert best in why.summary()
    exact = explain(plan_step("optimal", trace, costs), trace, costs)
    assert "The best buckets" not in " ".join(exact.summary())


def test_an_earlier_end_by_merging_is_called_earlier() -> None:
    trace = step_of([1] * 6, gap_seconds=1e-3)
    costs = costs_of(Line(2e-3, 0.0))
    why = explain(plan_step("wfbp", trace, costs), trace, costs)
    assert why.buckets[0].merge_seconds == pytest.approx(-1e-3)
    assert "the step would end 1.00 ms earlier." in str(why.buckets[0])


def test_what_the_planner_was_allowed_counts() -> None:
    """The bound is that of all allowed ways, not only of those that the plan took."""
    trace = step_of([1000] * 3)
    curves = {"native": Line(0.0, 1e-3), "torus": Line(0.0, 5e-4)}
    costs = Costs.from_curves(FOUR_NODES, curves)
    plan = plan_step("optimal", trace, costs)
    own = explain(plan, trace, costs)
    allowed = explain(plan, trace, costs, collectives=("native", "torus"))
    assert allowed.bounds[-1].step_seconds < own.bounds[-1].step_seconds
    with pytest.raises(CostError, match="by 'direct'"):
        explain(plan, trace, costs, collectives=("direct",))
