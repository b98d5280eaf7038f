"""A simulated step: what may overlap, what waits for what, and how long it can take."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.costs import Costs, Curve, Line, Table
from slipstream.errors import PlanError
from slipstream.plan import PLANNER_NAMES, Plan, plan_step
from slipstream.simulate import StepSimulation, picture, simulate_step
from slipstream.trace import Trace
from steps import costs_of, forward_end, lines, step_of, steps

ROUNDING = 1 + 1e-9
planners = st.sampled_from(PLANNER_NAMES)
waits = st.sampled_from(["backward", "update", "forward"])
tables = st.lists(st.integers(1, 50), min_size=2, max_size=5).map(
    lambda gaps: Table(
        tuple((sum(gaps[: i + 1]) * 10.0, sum(gaps[: i + 1]) * 1e-3) for i in range(len(gaps)))
    )
)
curves: st.SearchStrategy[Curve] = st.one_of(lines, tables)


def planned(planner: str, trace: Trace, costs: Costs, wait: str = "backward") -> Plan:
    plan = plan_step(planner, trace, costs, tolerance=0.0)
    return plan if plan.gather is not None else plan.model_copy(update={"wait": wait})


def backward_start(step: StepSimulation) -> float:
    return next(span.start_seconds for span in step.spans if span.row == "backward")


@given(trace=steps(dtypes=("float32", "float16")), curve=curves, planner=planners, wait=waits)
def test_no_bucket_sets_out_before_its_gradients_are_ready(
    trace: Trace, curve: Curve, planner: str, wait: str
) -> None:
    costs = costs_of(curve)
    step = simulate_step(trace, costs, planned(planner, trace, costs, wait))
    start = backward_start(step)
    ready = {gradient.name: gradient.ready_seconds for gradient in trace.gradients}
    for journey in step.journeys:
        assert journey.start_seconds >= journey.ready_seconds
        if journey.half == "reduce":
            last = max(ready[name] for name in journey.bucket.gradients)
            assert journey.ready_seconds == pytest.approx(start + last)
    assert sum(len(j.bucket.gradients) for j in step.journeys if j.half == "reduce") == len(ready)


@given(trace=steps(dtypes=("float32", "float16")), curve=curves, planner=planners, wait=waits)
def test_channel_and_computation_do_one_thing_at_a_time_and_fill_the_step(
    trace: Trace, curve: Curve, planner: str, wait: str
) -> None:
    costs = costs_of(curve)
    plan = planned(planner, trace, costs, wait)
    step = simulate_step(trace, costs, plan)
    for before, after in pairwise(step.journeys):
        assert after.start_seconds * ROUNDING >= before.end_seconds
    assert step.spans[0].start_seconds == 0
    for earlier, later in pairwise(step.spans):
        assert later.start_seconds == pytest.approx(earlier.end_seconds)
    assert step.spans[-1].end_seconds == pytest.approx(step.step_seconds)
    computing = sum(span.seconds for span in step.spans if span.row != "wait")
    assert computing == pytest.approx(trace.compute_seconds)
    waiting = sum(span.seconds for span in step.spans if span.row == "wait")
    assert waiting == pytest.approx(step.exposed_seconds, abs=1e-9)


@given(trace=steps(), curve=curves, planner=planners)
def test_a_step_takes_at_least_its_bound_and_at_most_the_sum_of_everything(
    trace: Trace, curve: Curve, planner: str
) -> None:
    costs = costs_of(curve)
    plan = planned(planner, trace, costs)
    step = simulate_step(trace, costs, plan)
    assert plan.lower_bound_seconds is not None
    assert step.step_seconds == plan.predicted_step_seconds
    assert plan.lower_bound_seconds <= step.step_seconds * ROUNDING
    assert step.step_seconds <= (trace.compute_seconds + step.communication_seconds) * ROUNDING
    assert step.step_seconds >= trace.compute_seconds


@given(trace=steps(), line=lines, planner=st.sampled_from(["optimal", "pipelined"]))
def test_a_faster_network_never_slows_the_planned_optimum(
    trace: Trace, line: Line, planner: str
) -> None:
    slow = costs_of(line)
    fast = costs_of(Line(line.startup_seconds, line.seconds_per_byte / 2))
    steps_of = [
        simulate_step(trace, costs, planned(planner, trace, costs)).step_seconds
        for costs in (slow, fast)
    ]
    assert steps_of[1] <= steps_of[0] * ROUNDING


@given(trace=steps(), line=lines, planner=planners, wait=waits)
def test_doubling_link_time_never_speeds_a_plan_up(
    trace: Trace, line: Line, planner: str, wait: str
) -> None:
    costs = costs_of(line)
    plan = planned(planner, trace, costs, wait)
    doubled = costs_of(Line(2 * line.startup_seconds, 2 * line.seconds_per_byte))
    once, twice = (simulate_step(trace, c, plan).step_seconds for c in (costs, doubled))
    assert twice * ROUNDING >= once


@given(trace=steps(), line=lines)
def test_a_pipelined_forward_is_that_of_a_walk_through_the_parameters(
    trace: Trace, line: Line
) -> None:
    costs = costs_of(line)
    plan = planned("pipelined", trace, costs)
    assert plan.gather is not None
    step = simulate_step(trace, costs, plan)
    walked = forward_end(trace, [bucket.gradients for bucket in plan.gather], line)
    assert backward_start(step) == pytest.approx(walked)


def test_a_step_worked_out_by_hand() -> None:
    trace = step_of([25, 25, 50], forward_seconds=2.0, input_seconds=1.0, update_seconds=0.5)
    costs = costs_of(Line(0.5, 0.01))
    plan = plan_step("wfbp", trace, costs)
    step = simulate_step(trace, costs, plan)
    # Backward from 3 to 6; buckets of 1.5, 1.5 and 2.5 s, ready at 4, 5 and 6.
    journeys = [(j.ready_seconds, j.start_seconds, j.end_seconds) for j in step.journeys]
    assert journeys == [(4.0, 4.0, 5.5), (5.0, 5.5, 7.0), (6.0, 7.0, 9.5)]
    spans = [(span.row, span.start_seconds, span.end_seconds) for span in step.spans]
    assert spans == [
        ("input", 0.0, 1.0),
        ("forward", 1.0, 3.0),
        ("backward", 3.0, 6.0),
        ("wait", 6.0, 9.5),
        ("update", 9.5, 10.0),
    ]
    assert (step.step_seconds, step.exposed_seconds, step.compute_seconds) == (10.0, 3.5, 6.5)
    assert step.communication_seconds == 5.5
    assert picture(step, width=20) == ("iiffffbbbbbb.......u", "        00011122222")
    deferred = simulate_step(trace, costs, plan.model_copy(update={"wait": "forward"}))
    assert [span.row for span in deferred.spans] == [
        "forward",
        "backward",
        "input",
        "wait",
        "update",
    ]
    assert (deferred.step_seconds, deferred.exposed_seconds) == (9.0, 2.5)


def test_a_plan_of_another_model_is_refused() -> None:
    trace, costs = step_of([1, 2]), costs_of(Line(1.0, 1.0))
    plan = plan_step("optimal", step_of([1, 2, 3]), costs)
    with pytest.raises(PlanError, match="'g2'"):
        simulate_step(trace, costs, plan)


def test_the_plan_simulated_is_the_plan_given() -> None:
    trace, costs = step_of([10, 20, 30]), costs_of(Line(0.1, 0.001))
    plan = plan_step("single", trace, costs)
    first, rest = replace_bucket(plan, 1)
    cut = plan.model_copy(update={"reduce": (first, rest)})
    assert [j.bucket for j in simulate_step(trace, costs, cut).journeys] == [first, rest]


def replace_bucket(plan: Plan, cut: int) -> tuple[object, object]:
    """The plan's only bucket, cut in two."""
    (bucket,) = plan.reduce
    names = bucket.gradients
    return (
        bucket.model_copy(update={"gradients": names[:cut]}),
        bucket.model_copy(update={"gradients": names[cut:]}),
    )


def test_a_simulation_is_a_value() -> None:
    trace, costs = step_of([1]), costs_of(Line(1.0, 1.0))
    step = simulate_step(trace, costs, plan_step("optimal", trace, costs))
    assert step == simulate_step(trace, costs, plan_step("optimal", trace, costs))
    assert replace(step, model="other") != step
