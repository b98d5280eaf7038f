"""When buckets travel and when the step ends, on examples that can be done by hand."""

from __future__ import annotations

import pytest

from slipstream.costs import Costs, Line
from slipstream.errors import CostError, PlanError
from slipstream.plan import Bucket, Plan, plan_step, time_step
from slipstream.trace import Trace, TraceGradient
from steps import FOUR_NODES, costs_of, step_of

TRACE = step_of([10, 10, 20], forward_seconds=3.0, input_seconds=0.5, update_seconds=0.25)
COSTS = costs_of(Line(0.2, 0.01))


def plan_of(*groups: str, **fields: object) -> Plan:
    """A plan whose buckets are given as space-separated names."""

    def buckets(texts: tuple[str, ...]) -> tuple[Bucket, ...]:
        sizes = {gradient.name: gradient.bytes for gradient in TRACE.gradients}
        members = [tuple(text.split()) for text in texts]
        return tuple(Bucket(gradients=m, bytes=sum(sizes[name] for name in m)) for m in members)

    gather = fields.pop("gather", None)
    made = None if gather is None else buckets(gather)  # type: ignore[arg-type]
    return Plan.model_validate(
        {"planner": "by hand", "reduce": buckets(groups), "gather": made, **fields}
    )


def test_buckets_go_one_after_the_other() -> None:
    """Ready at 1, 2, 3; they take 0.6, 0.6 and 1.0."""
    timing = time_step(TRACE, COSTS, plan_of("g0", "g1", "g2"))
    assert [t.start_seconds for t in timing.reduce] == pytest.approx([1.0, 2.0, 3.0])
    assert [t.end_seconds for t in timing.reduce] == pytest.approx([1.6, 2.6, 4.0])
    assert timing.step_seconds == pytest.approx(0.5 + 3.0 + 4.0 + 0.25)
    assert timing.exposed_seconds == pytest.approx(1.0)
    assert timing.gather is None


def test_a_bucket_waits_for_its_last_gradient_and_for_the_channel() -> None:
    timing = time_step(TRACE, COSTS, plan_of("g0 g1", "g2"))
    first, second = timing.reduce
    assert (first.ready_seconds, first.start_seconds) == (2.0, 2.0)
    assert first.end_seconds == pytest.approx(3.0)
    slow = time_step(TRACE, costs_of(Line(0.2, 0.1)), plan_of("g0 g1", "g2")).reduce[1]
    assert slow.ready_seconds == 3.0 and slow.start_seconds == pytest.approx(10.2)
    assert slow.waited_seconds == pytest.approx(7.2)
    assert second.waited_seconds == 0.0


def test_a_deferred_update_hides_behind_the_next_input() -> None:
    plan = plan_of("g0 g1 g2", wait="forward")
    whole = time_step(TRACE, COSTS, plan_of("g0 g1 g2"))
    assert whole.exposed_seconds == pytest.approx(1.8)
    deferred = time_step(TRACE, COSTS, plan)
    assert deferred.step_seconds == pytest.approx(whole.step_seconds - TRACE.input_seconds)
    assert time_step(TRACE, costs_of(Line(0.1, 0.0)), plan).exposed_seconds == 0.0


def test_gathers_hold_up_the_first_reader_of_a_late_bucket() -> None:
    """Needed: g2 at 0, g1 at 1, g0 at 2 of a forward of 3 that begins after an input of 0.5."""
    half = costs_of(Line(9.0, 9.0), Line(0.2, 0.01))
    plan = plan_of("g0 g1 g2", wait="forward", gather=("g2", "g1 g0"))
    timing = time_step(TRACE, half, plan)
    assert timing.gather is not None
    assert [t.end_seconds for t in timing.gather] == pytest.approx([1.0, 2.0])
    # g2 arrives 0.5 after the input is there; g1 is wanted at 1.0 + update of g2 + 1, and is there.
    reduced = 3.0 + 0.2 + 1.6
    assert timing.step_seconds == pytest.approx(reduced + 1.0 + 0.25 + 3.0)
    assert timing.exposed_seconds == pytest.approx(1.8 + 0.5)


def test_plans_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PlanError, match="lacks the trainable parameter 'g2'"):
        time_step(TRACE, COSTS, plan_of("g0 g1"))
    with pytest.raises(CostError, match="by 'native'"):
        time_step(TRACE, Costs.from_curves(FOUR_NODES, {"torus": Line(1, 1)}), plan_of("g0 g1 g2"))


def test_a_plan_out_of_order_is_timed_as_it_stands() -> None:
    """A user's plan may be anything; buckets still go in its order."""
    timing = time_step(TRACE, COSTS, plan_of("g2", "g0 g1"))
    assert [t.start_seconds for t in timing.reduce] == pytest.approx([3.0, 4.0])
    backwards = plan_of("g0 g1 g2", wait="forward", gather=("g0", "g1 g2"))
    in_order = plan_of("g0 g1 g2", wait="forward", gather=("g1 g2", "g0"))
    steps = [time_step(TRACE, COSTS, plan).step_seconds for plan in (backwards, in_order)]
    assert steps[0] > steps[1]


def test_no_step_is_shorter_than_its_computation_however_its_parts_are_added() -> None:
    """22 + 3 + 2 ms: added in the order of a pipelined step they lose the last bit."""
    trace = Trace.model_validate(
        {
            **step_of([0], forward_seconds=0.022, update_seconds=0.003).model_dump(),
            "gradients": (TraceGradient(name="g", numel=0, ready_seconds=0.002, needed_seconds=0),),
        }
    )
    costs = costs_of(Line(0.0, 0.0))
    for planner in ("pipelined", "optimal"):
        timing = time_step(trace, costs, plan_step(planner, trace, costs))
        assert timing.step_seconds == trace.compute_seconds
        assert timing.exposed_seconds == 0.0


def test_one_rank_needs_no_communication() -> None:
    alone = Trace.from_json(TRACE.to_json())
    timing = time_step(alone, costs_of(Line(0.0, 0.0)), plan_of("g0", "g1", "g2"))
    assert timing.exposed_seconds == 0.0
    assert timing.step_seconds == pytest.approx(alone.compute_seconds)
