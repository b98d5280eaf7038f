"""Plans from traces and costs: what holds for all planners, and what each one promises."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.costs import Choice, CostKey, Costs, Curve, Line, Table
from slipstream.errors import CostError, PlanError, TraceError
from slipstream.plan import (
    PLANNER_NAMES,
    Bucket,
    Gradient,
    Plan,
    lower_bounds,
    plan_step,
    time_step,
)
from slipstream.plan.menu import Menu
from slipstream.trace import Trace, parameters_sha256
from steps import FOUR_NODES, costs_of, every_cut, forward_end, lines, step_of, steps

DTYPES = ("float32", "bfloat16", "float64")
planners = st.sampled_from(PLANNER_NAMES)
MERGING = ("wfbp", "mgwfbp", "optimal")


def names_of(plan: Plan) -> list[list[str]]:
    return [list(bucket.gradients) for bucket in plan.reduce]


@given(steps(dtypes=DTYPES), planners, lines)
def test_every_gradient_travels_once_in_order_with_its_own_kind(
    trace: Trace, planner: str, line: Line
) -> None:
    plan = plan_step(planner, trace, costs_of(line))
    plan.check_covers([Gradient(g.name, g.numel, g.dtype) for g in trace.gradients])
    place = {gradient.name: index for index, gradient in enumerate(trace.gradients)}
    sizes = {gradient.name: gradient.bytes for gradient in trace.gradients}
    for bucket in plan.reduce:
        places = [place[name] for name in bucket.gradients]
        assert places == sorted(places)
        assert bucket.bytes == sum(sizes[name] for name in bucket.gradients)
    last = [place[bucket.gradients[-1]] for bucket in plan.reduce]
    assert last == sorted(last), "buckets leave in the order in which they fill"
    assert plan.parameters_sha256 == parameters_sha256(trace.gradients)
    assert (plan.model, plan.nodes, plan.ranks_per_node) == ("steps", 4, 1)
    assert Plan.from_json(plan.to_json()) == plan


@given(steps(dtypes=DTYPES), planners, lines)
def test_a_step_lies_between_its_lower_bound_and_the_sum_of_its_parts(
    trace: Trace, planner: str, line: Line
) -> None:
    costs = costs_of(line)
    plan = plan_step(planner, trace, costs)
    timing = time_step(trace, costs, plan)
    step, bound = plan.predicted_step_seconds, plan.lower_bound_seconds
    assert step is not None and bound is not None
    assert step == timing.step_seconds
    travelling = [t.end_seconds - t.start_seconds for t in (*timing.reduce, *(timing.gather or ()))]
    slack = 1 + 1e-12
    assert trace.compute_seconds <= bound * slack
    assert bound <= step * slack
    assert step <= (trace.compute_seconds + sum(travelling)) * slack
    for before, after in pairwise(timing.reduce):
        assert after.start_seconds >= max(before.end_seconds, after.ready_seconds)
    ready = {gradient.name: gradient.ready_seconds for gradient in trace.gradients}
    for bucket, times in zip(plan.reduce, timing.reduce, strict=True):
        assert times.start_seconds >= max(ready[name] for name in bucket.gradients)


@given(steps(dtypes=DTYPES), planners, lines, st.floats(1.0, 3.0), st.booleans())
def test_a_slower_network_never_makes_a_plan_faster(
    trace: Trace, planner: str, line: Line, factor: float, startup: bool
) -> None:
    """For the same plan always; for planners that adapt to the costs exactly, too."""
    a, b = line.startup_seconds, line.seconds_per_byte
    slow = Line(a * factor, b) if startup else Line(a, b * factor)
    plan = plan_step(planner, trace, costs_of(line), tolerance=0.0)
    quick = time_step(trace, costs_of(line), plan).step_seconds
    assert time_step(trace, costs_of(slow), plan).step_seconds >= quick * (1 - 1e-12)
    if planner in ("optimal", "pipelined"):
        again = plan_step(planner, trace, costs_of(slow), tolerance=0.0).predicted_step_seconds
        assert again is not None and again >= quick * (1 - 1e-12)


@given(steps(), lines)
def test_optimal_is_never_above_another_planner(trace: Trace, line: Line) -> None:
    ends = {
        name: plan_step(name, trace, costs_of(line), tolerance=0.0).predicted_step_seconds
        for name in PLANNER_NAMES
    }
    best = ends.pop("optimal")
    pipelined = ends.pop("pipelined")
    assert best is not None and pipelined is not None
    assert all(end is not None and best <= end * (1 + 1e-12) for end in ends.values())


@given(steps(dtypes=DTYPES), lines, st.floats(0, 0.5))
def test_tolerance_trades_time_for_buckets(trace: Trace, line: Line, tolerance: float) -> None:
    exact = plan_step("optimal", trace, costs_of(line), tolerance=0.0)
    loose = plan_step("optimal", trace, costs_of(line), tolerance=tolerance)
    outside = trace.input_seconds + trace.forward_seconds + trace.update_seconds
    assert exact.predicted_step_seconds is not None and loose.predicted_step_seconds is not None
    limit = (exact.predicted_step_seconds - outside) * (1 + tolerance) + outside
    assert loose.predicted_step_seconds <= limit * (1 + 1e-9)
    assert len(loose.reduce) <= len(exact.reduce)


def test_dtypes_are_lanes_and_the_largest_is_planned() -> None:
    """A bfloat16 gradient in the middle joins the other one, and does not cut the lane in two."""
    dtypes = ["float32", "bfloat16", "float32", "bfloat16", "float32", "float32"]
    trace = step_of([100, 1, 100, 1, 100, 100], dtypes=dtypes)
    plan = plan_step("optimal", trace, costs_of(Line(0.5, 1e-6)), tolerance=0.0)
    assert names_of(plan) == [["g1", "g3"], ["g0", "g2", "g4"], ["g5"]]


@given(steps(most=8, dtypes=("float32", "float32", "float64")), lines)
def test_no_other_cut_of_the_largest_lane_is_faster(trace: Trace, line: Line) -> None:
    """With the other lanes' buckets where they are, by the model that predicts whole steps."""
    plan = plan_step("optimal", trace, costs_of(line), tolerance=0.0)
    place = {gradient.name: index for index, gradient in enumerate(trace.gradients)}
    sizes = {gradient.name: gradient.bytes for gradient in trace.gradients}
    lanes: dict[str, list[str]] = {}
    for gradient in trace.gradients:
        lanes.setdefault(gradient.dtype, []).append(gradient.name)
    main = max(lanes.values(), key=lambda lane: sum(map(sizes.__getitem__, lane)))
    others = [lane for lane in lanes.values() if lane is not main]
    found = []
    for cuts in every_cut(main):
        groups = sorted([*cuts, *others], key=lambda group: place[group[-1]])
        reduce = tuple(
            Bucket(gradients=tuple(group), bytes=sum(map(sizes.__getitem__, group)))
            for group in groups
        )
        other = plan.model_copy(update={"reduce": reduce})
        found.append((time_step(trace, costs_of(line), other).step_seconds, len(reduce)))
    best = min(step for step, _ in found)
    assert plan.predicted_step_seconds == pytest.approx(best, rel=1e-12)
    in_time = [count for step, count in found if step <= best * (1 + 1e-12)]
    assert len(plan.reduce) <= min(in_time), "its end has 1e-12 of room, their step less"


def test_sixteen_bit_gradients_are_charged_as_the_32_bits_in_which_they_travel() -> None:
    costs = costs_of(Line(0.0, 1.0))
    narrow = plan_step("single", step_of([10], dtypes=["bfloat16"]), costs)
    wide = plan_step("single", step_of([10]), costs)
    assert narrow.reduce[0].bytes == 20 and wide.reduce[0].bytes == 40
    assert narrow.predicted_step_seconds == wide.predicted_step_seconds == 1.0 + 40.0


@pytest.mark.parametrize("planner", ["optimal", "pipelined"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bucket_exceeds_its_limit_in_memory(planner: str, dtype: str) -> None:
    dtypes = [dtype] * 9 + ["complex64"] * 3
    trace = step_of([5] * 8 + [50] + [2] * 3, dtypes=dtypes, forward_seconds=1.0)
    size = trace.gradients[0].bytes
    plan = plan_step(planner, trace, costs_of(Line(10.0, 0.0)), max_bucket_bytes=2 * size)
    for bucket in (*plan.reduce, *(plan.gather or ())):
        assert bucket.bytes <= 2 * size or bucket.gradients == ("g8",)
    assert [len(bucket.gradients) for bucket in plan.reduce if "g0" in bucket.gradients] == [2]


def test_each_bucket_takes_the_cheapest_way_that_is_allowed() -> None:
    """Small buckets by the one with the small startup, large ones by the one with the rate."""
    curves = {"native": Line(0.1, 1e-3), "torus": Line(1.0, 1e-4)}
    costs = Costs.from_curves(FOUR_NODES, curves)
    trace = step_of([10, 10000, 10], gap_seconds=20.0)
    plan = plan_step("wfbp", trace, costs, collectives=("native", "torus"))
    assert [bucket.collective for bucket in plan.reduce] == ["native", "torus", "native"]
    best = plan_step("optimal", trace, costs, collectives=("native", "torus"), tolerance=0.0)
    alone = [
        plan_step("optimal", trace, costs, collectives=(name,), tolerance=0.0) for name in curves
    ]
    assert best.predicted_step_seconds is not None
    for plan in alone:
        assert plan.predicted_step_seconds is not None
        assert best.predicted_step_seconds <= plan.predicted_step_seconds
    assert {bucket.collective for bucket in best.reduce} == {"native", "torus"}


def test_lossy_wires_are_taken_only_where_they_are_allowed() -> None:
    line, half = Line(0.1, 1e-3), Line(0.1, 5e-4)
    measured: dict[CostKey, Curve] = {
        ("ring", "all_reduce", "float32"): line,
        ("ring", "all_reduce", "bfloat16"): half,
    }
    costs = Costs(FOUR_NODES, measured)
    trace, ring = step_of([1000] * 4), ("ring",)
    plan = plan_step("optimal", trace, costs, collectives=ring)
    assert {bucket.wire for bucket in plan.reduce} == {"float32"}
    plan = plan_step("optimal", trace, costs, collectives=ring, allow=("float32", "bfloat16"))
    assert {bucket.wire for bucket in plan.reduce} == {"bfloat16"}


@pytest.mark.parametrize("planner", MERGING)
def test_where_startup_is_nothing_merging_gains_nothing(planner: str) -> None:
    trace = step_of([1000] * 6)
    plan = plan_step(planner, trace, costs_of(Line(0.0, 1e-3)), tolerance=0.0)
    unmerged = plan_step("wfbp", trace, costs_of(Line(0.0, 1e-3)))
    assert plan.predicted_step_seconds == pytest.approx(unmerged.predicted_step_seconds)


def test_mgwfbp_uses_the_startup_of_the_fitted_line_on_a_table() -> None:
    trace = step_of([300] * 20, gap_seconds=0.9)
    line = Line(1.0, 1e-3)
    table = Table(tuple((2.0**k, line.seconds(2.0**k)) for k in range(8, 24)))
    on_line = plan_step("mgwfbp", trace, costs_of(line))
    on_table = plan_step("mgwfbp", trace, costs_of(table))
    assert names_of(on_line) == names_of(on_table)
    assert len(on_line.reduce) == 1
    assert names_of(plan_step("mgwfbp", trace, costs_of(line), variant="caffe")) == names_of(
        on_line
    )


@pytest.mark.parametrize(
    ("planner", "settings", "words"),
    [
        ("optimum", {}, "no planner 'optimum'; there are wfbp, .* optimal, pipelined"),
        ("optimal", {"tolerance": -0.1}, "tolerance is -0.1"),
        ("optimal", {"tolerance": float("nan")}, "tolerance is nan"),
        ("optimal", {"max_bucket_bytes": 0}, "max_bucket_bytes is 0"),
        ("ddp", {"max_bucket_bytes": 10}, "not a setting of planner 'ddp'"),
        ("optimal", {"cap_bytes": 1}, "'optimal' has no option 'cap_bytes'"),
        ("mgwfbp", {"cap_bytes": 1}, "'mgwfbp' has no option 'cap_bytes'; it takes variant"),
        ("mgwfbp", {"variant": "keras"}, "no variant 'keras'; it has pytorch, caffe"),
        ("ddp", {"cap_mb": 1}, "'ddp' has no option 'cap_mb'"),
    ],
)
def test_wrong_settings_are_refused(planner: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan_step(planner, step_of([1, 2]), costs_of(Line(1.0, 1.0)), **settings)


def test_what_a_planner_lacks_is_named() -> None:
    trace = step_of([1, 2])
    with pytest.raises(CostError, match="by 'direct'"):
        plan_step("optimal", trace, costs_of(Line(1.0, 1.0)), collectives=("direct",))
    unknown = [gradient.model_copy(update={"needed_seconds": None}) for gradient in trace.gradients]
    without = trace.model_copy(update={"gradients": tuple(unknown)})
    with pytest.raises(TraceError, match="first needs 'g0'"):
        plan_step("pipelined", without, costs_of(Line(1.0, 1.0)))


@given(steps(), lines)
def test_bounds_name_what_limits(trace: Trace, line: Line) -> None:
    kinds = {
        bound.kind: bound.step_seconds
        for bound in lower_bounds(trace, Menu.plain([Choice("native", "float32", line)]))
    }
    outside = trace.input_seconds + trace.forward_seconds + trace.update_seconds
    assert kinds["compute"] == pytest.approx(trace.compute_seconds)
    last = trace.backward_seconds + line.seconds(trace.gradients[-1].bytes)
    assert kinds["last bucket"] == pytest.approx(outside + last)
    channel = trace.gradients[0].ready_seconds + (line.seconds(trace.bytes) if trace.bytes else 0)
    assert kinds["network"] == pytest.approx(outside + max(channel, trace.backward_seconds))


@given(steps(most=8), lines)
def test_gather_halves_equal_the_forward_simulated_from_its_start(trace: Trace, line: Line) -> None:
    costs = costs_of(line)
    plan = plan_step("pipelined", trace, costs, tolerance=0.0)
    assert plan.gather is not None and plan.predicted_step_seconds is not None
    reduced = time_step(trace, costs, plan).reduce[-1].end_seconds
    end = forward_end(trace, [list(bucket.gradients) for bucket in plan.gather], line)
    assert plan.predicted_step_seconds == pytest.approx(reduced + end, rel=1e-9)
