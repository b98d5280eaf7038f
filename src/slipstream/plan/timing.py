"""When each bucket of a plan travels, and when the step ends: the model behind every prediction.

    input | forward | backward | update          the computation, one after the other
                      | bucket | bucket | ...    the channel: in plan order, one at a time

A bucket starts when its last gradient is ready and the bucket before it has ended. What waits for
the averages depends on the plan:

    wait="backward", "update"   the update
    wait="forward"              the update, which runs behind the next step's input
    with gather buckets         nothing: they travel from the last reduced bucket on (a barrier),
                                behind input and forward; see `halves.py`

All times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.costs import Costs, Operation
from slipstream.plan.halves import charged_bytes, forward_half
from slipstream.plan.model import Bucket, Plan
from slipstream.trace import Trace


@dataclass(frozen=True)
class BucketTiming:
    """A bucket in time. ready: when it could have started; waited: for the channel, in seconds."""

    ready_seconds: float
    start_seconds: float
    end_seconds: float

    @property
    def waited_seconds(self) -> float:
        """How long the bucket stood ready while the channel was busy with others."""
        return self.start_seconds - self.ready_seconds


@dataclass(frozen=True)
class StepTiming:
    """A step by a plan.

    reduce: of each bucket, from the start of backward. gather: of each gather bucket, from the end
    of the last reduced bucket (or of backward, whichever is later); ready_seconds is 0. None
    without gather buckets. step_seconds: of the whole step; exposed_seconds: how much of it there
    would not be if communication took no time.
    """

    reduce: tuple[BucketTiming, ...]
    gather: tuple[BucketTiming, ...] | None
    step_seconds: float
    exposed_seconds: float


def schedule(ready: Sequence[float], seconds: Sequence[float]) -> tuple[BucketTiming, ...]:
    """Buckets one after the other on one channel that is free at 0."""
    free, timings = 0.0, []
    for at, takes in zip(ready, seconds, strict=True):
        start = max(free, at)
        free = start + takes
        timings.append(BucketTiming(at, start, free))
    return tuple(timings)


def bucket_seconds(
    buckets: Sequence[Bucket], trace: Trace, costs: Costs, operation: Operation
) -> list[float]:
    """What each bucket takes by its own collective and wire. Raises CostError, PlanError."""
    charged = {gradient.name: charged_bytes(gradient) for gradient in trace.gradients}
    ways = {(bucket.collective, bucket.wire) for bucket in buckets}
    curves = {(name, wire): costs.curve(name, operation, wire) for name, wire in ways}
    return [
        curves[bucket.collective, bucket.wire].seconds(sum(charged[g] for g in bucket.gradients))
        for bucket in buckets
    ]


def time_step(trace: Trace, costs: Costs, plan: Plan) -> StepTiming:
    """A step of this trace on these costs by this plan.

    Raises PlanError for a plan of another model, CostError for a collective without costs, and
    TraceError where a plan gathers and the trace does not say when parameters are needed.
    """
    plan.check_covers(trace.gradients, trace.model)
    operation: Operation = "all_reduce" if plan.gather is None else "reduce_scatter"
    ready_at = {gradient.name: gradient.ready_seconds for gradient in trace.gradients}
    ready = [max(ready_at[name] for name in bucket.gradients) for bucket in plan.reduce]
    reduce = schedule(ready, bucket_seconds(plan.reduce, trace, costs, operation))
    reduced = max(trace.backward_seconds, reduce[-1].end_seconds)
    gather = None
    if plan.gather is not None:
        gather, forward = _gathered(plan.gather, trace, costs)
        step = reduced + forward
    elif plan.wait == "forward":
        reduced = max(reduced, trace.backward_seconds + trace.input_seconds)
        step = trace.forward_seconds + reduced + trace.update_seconds
    else:
        step = trace.input_seconds + trace.forward_seconds + reduced + trace.update_seconds
    # Adding the parts in another order may lose the last bit: no step is shorter than its parts.
    step = max(step, trace.compute_seconds)
    return StepTiming(reduce, gather, step, step - trace.compute_seconds)


def _gathered(
    buckets: Sequence[Bucket], trace: Trace, costs: Costs
) -> tuple[tuple[BucketTiming, ...], float]:
    """The gather buckets, and how long input, updates and forward take with them."""
    seconds = bucket_seconds(buckets, trace, costs, "all_gather")
    gather = schedule([0.0] * len(buckets), seconds)
    half = forward_half(trace)
    before_end = {
        gradient.name: seconds
        for gradient, seconds in zip(half.gradients, half.ready_seconds, strict=True)
    }
    ends = [
        timing.end_seconds + max(before_end[name] for name in bucket.gradients)
        for bucket, timing in zip(buckets, gather, strict=True)
    ]
    return gather, max(half.floor_seconds, *ends)
