"""Pipelined plans: each half against every way to cut it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.costs import Curve, Line, Table
from slipstream.plan import Plan, plan_step, time_step
from slipstream.plan.halves import forward_half
from slipstream.trace import Trace
from steps import costs_of, every_cut, forward_end, lines, step_of, steps

tables = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 30)), min_size=1, max_size=4).map(
    lambda points: Table(tuple((float(x), y * 1e-3) for x, y in sorted(dict(points).items())))
)


@given(steps(most=7), lines | tables)
def test_no_other_boundaries_give_a_shorter_step(trace: Trace, half: Curve) -> None:
    costs = costs_of(half)
    plan = plan_step("pipelined", trace, costs, tolerance=0.0)
    assert plan.gather is not None and plan.predicted_step_seconds is not None
    assert plan.wait == "forward"
    order = [gradient.name for gradient in forward_half(trace).gradients][::-1]
    gathered = [name for bucket in plan.gather for name in bucket.gradients]
    assert gathered == order, "gathers follow the forward"
    needed = {gradient.name: gradient.needed_seconds for gradient in trace.gradients}
    assert [needed[name] for name in order] == sorted(needed.values())  # type: ignore[type-var]
    ends = [(forward_end(trace, buckets, half), len(buckets)) for buckets in every_cut(order)]
    best = min(end for end, _ in ends)
    timing = time_step(trace, costs, plan)
    forward = plan.predicted_step_seconds - timing.reduce[-1].end_seconds
    assert forward == pytest.approx(best, rel=1e-9, abs=1e-12)
    in_time = [count for end, count in ends if end <= best * (1 + 1e-12)]
    assert len(plan.gather) == min(in_time), "the fewest of the best"


def test_a_step_without_elements_still_counts_its_update() -> None:
    trace = step_of([0, 0], update_seconds=1.0, forward_seconds=0.5)
    plan = plan_step("pipelined", trace, costs_of(Line(0.0, 0.0)))
    assert plan.predicted_step_seconds == pytest.approx(trace.compute_seconds)


@given(steps(most=7), lines)
def test_halves_may_differ_and_the_backward_is_that_of_an_optimal_plan(
    trace: Trace, line: Line
) -> None:
    pipelined = plan_step("pipelined", trace, costs_of(line), tolerance=0.0)
    optimal = plan_step("optimal", trace, costs_of(line), tolerance=0.0)
    assert pipelined.reduce == optimal.reduce


def test_pipelining_hides_in_the_forward_what_the_backward_cannot() -> None:
    """C = 2 B with f = B / 2: the best case of overlap in both directions, 1.25x."""
    count = 200
    trace = step_of([1000] * count, gap_seconds=1.0 / count, forward_seconds=0.5)
    per_byte = 2.0 / trace.bytes
    whole, half = Line(0.0, per_byte), Line(0.0, per_byte / 2)
    plain = plan_step("optimal", trace, costs_of(whole)).predicted_step_seconds
    pipelined = plan_step("pipelined", trace, costs_of(whole, half)).predicted_step_seconds
    assert plain is not None and pipelined is not None
    assert plain / pipelined == pytest.approx(1.25, rel=0.02)


def test_input_hides_gathers_too() -> None:
    trace = step_of([100] * 4, forward_seconds=4.0, input_seconds=1.0)
    costs = costs_of(Line(0.0, 1e-3), Line(0.25, 0.0))
    plan = plan_step("pipelined", trace, costs)
    assert plan.gather is not None
    assert plan.predicted_step_seconds == pytest.approx(trace.compute_seconds + 0.25)
    assert len(plan.gather) == 1, "all of it fits behind the input"


def test_gather_buckets_are_in_the_file_and_need_the_forward() -> None:
    trace = step_of([100] * 4, forward_seconds=1.0)
    plan = plan_step("pipelined", trace, costs_of(Line(0.1, 1e-6)))
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.gather == plan.gather
    assert again.fingerprint() == plan.fingerprint()
    assert plan.model_copy(update={"gather": None}).fingerprint() != plan.fingerprint()
