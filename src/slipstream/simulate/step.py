"""One step as a timeline: what computes when, which bucket travels when, who waits for whom.

The times are those of `plan.time_step`, the same that planners minimise and `plan.json` predicts;
here they become spans that can be drawn, and checked: no bucket sets out before its gradients are
ready, the channel carries one bucket at a time, and the last span ends with the step.

A step that repeats is shown from where it can be cut:

    wait="backward", "update"   input | forward | backward | (wait) | update
    wait="forward"              forward | backward | next input | (wait) | update
    with gather buckets         input | update and forward, parameter by parameter | backward

All times are seconds from the start of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from slipstream.costs import Costs
from slipstream.plan import Bucket, BucketTiming, Plan, StepTiming, time_step
from slipstream.plan.halves import forward_half
from slipstream.trace import Trace

ComputeRow = Literal["input", "forward", "backward", "update", "wait"]


@dataclass(frozen=True)
class Span:
    """Something that the computation does, or waits for, from start to end."""

    row: ComputeRow
    name: str
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True)
class Journey:
    """A bucket in the step: ready, sent when the channel was free, arrived.

    half: "reduce" or "gather"; index: its place in that half of the plan.
    """

    half: Literal["reduce", "gather"]
    index: int
    bucket: Bucket
    ready_seconds: float
    start_seconds: float
    end_seconds: float

    @property
    def name(self) -> str:
        """Its name in a timeline."""
        return f"{self.half} {self.index}"


@dataclass(frozen=True)
class StepSimulation:
    """A simulated step.

    spans: the computation, in order; they do not overlap. journeys: the buckets in the order in
    which they travel. compute_seconds: the step if communication took no time; exposed_seconds:
    what communication adds to it; communication_seconds: how long the channel is busy.
    """

    model: str
    planner: str
    spans: tuple[Span, ...]
    journeys: tuple[Journey, ...]
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    communication_seconds: float


def simulate_step(trace: Trace, costs: Costs, plan: Plan) -> StepSimulation:
    """The step of this trace on these costs, communicating by this plan.

    Raises PlanError for a plan of another model, CostError for a collective without costs,
    TraceError where the plan gathers and the trace lacks needed_seconds.
    """
    timing = time_step(trace, costs, plan)
    if plan.gather is not None and timing.gather is not None:
        spans, offset = _pipelined(trace, plan, timing)
    elif plan.wait == "forward":
        spans, offset = _one_after_the_other(trace, timing, True), trace.forward_seconds
    else:
        spans = _one_after_the_other(trace, timing, False)
        offset = trace.input_seconds + trace.forward_seconds
    journeys = [
        *_journeys("gather", plan.gather or (), timing.gather or (), 0.0),
        *_journeys("reduce", plan.reduce, timing.reduce, offset),
    ]
    return StepSimulation(
        model=trace.model,
        planner=plan.planner,
        spans=tuple(span for span in spans if span.seconds > 0),
        journeys=tuple(journeys),
        step_seconds=timing.step_seconds,
        compute_seconds=trace.compute_seconds,
        exposed_seconds=timing.exposed_seconds,
        communication_seconds=sum(
            bucket.end_seconds - bucket.start_seconds
            for bucket in (*timing.reduce, *(timing.gather or ()))
        ),
    )


def _journeys(
    half: Literal["reduce", "gather"],
    buckets: tuple[Bucket, ...],
    timings: tuple[BucketTiming, ...],
    offset: float,
) -> Iterator[Journey]:
    for index, (bucket, timing) in enumerate(zip(buckets, timings, strict=True)):
        yield Journey(
            half,
            index,
            bucket,
            ready_seconds=offset + timing.ready_seconds,
            start_seconds=offset + timing.start_seconds,
            end_seconds=offset + timing.end_seconds,
        )


def _one_after_the_other(trace: Trace, timing: StepTiming, deferred: bool) -> list[Span]:
    """The spans of a step without gathers; deferred: its update waits behind the next input."""
    parts: list[tuple[ComputeRow, str, float]] = [
        ("forward", "forward", trace.forward_seconds),
        ("backward", "backward", trace.backward_seconds),
    ]
    at, name = (2, "next input") if deferred else (0, "input")
    parts.insert(at, ("input", name, trace.input_seconds))
    now, spans = 0.0, list[Span]()
    for row, name, seconds in parts:
        spans.append(Span(row, name, now, now + seconds))
        now += seconds
    update = timing.step_seconds - trace.update_seconds
    spans.append(Span("wait", "wait for averages", now, update))
    return [*spans, Span("update", "update", update, timing.step_seconds)]


def _pipelined(trace: Trace, plan: Plan, timing: StepTiming) -> tuple[list[Span], float]:
    """The spans, and where the backward starts.

    The half's ready times count from the undelayed end of forward backwards: each parameter's
    update begins there, and its first reader follows.
    """
    assert plan.gather is not None and timing.gather is not None
    half = forward_half(trace)
    arrived = {
        name: (f"gather {index}", when.end_seconds)
        for index, (bucket, when) in enumerate(zip(plan.gather, timing.gather, strict=True))
        for name in bucket.gradients
    }
    spans = [Span("input", "input", 0.0, trace.input_seconds)]
    now, undelayed, total = trace.input_seconds, trace.input_seconds, trace.bytes
    for gradient, ready in zip(reversed(half.gradients), reversed(half.ready_seconds), strict=True):
        wanted = half.floor_seconds - ready
        _extend(spans, "forward", now, now + (wanted - undelayed))
        now, undelayed = now + (wanted - undelayed), wanted
        gather, end = arrived[gradient.name]
        if end > now:
            spans.append(Span("wait", f"wait for {gather}", now, end))
            now = end
        update = trace.update_seconds * (gradient.bytes / total) if total else 0.0
        _extend(spans, "update", now, now + update)
        now, undelayed = now + update, undelayed + update
    end = now + (half.floor_seconds - undelayed)
    _extend(spans, "forward", now, end)
    backward = end + trace.backward_seconds
    spans += [
        Span("backward", "backward", end, backward),
        Span("wait", "wait for averages", backward, timing.step_seconds),
    ]
    return spans, end


def _extend(spans: list[Span], row: Literal["forward", "update"], start: float, end: float) -> None:
    """Adds a span, or lengthens the last one where that is of the same row and ends there."""
    if end <= start:
        return
    if spans[-1].row == row and spans[-1].end_seconds == start:
        start = spans.pop().start_seconds
    spans.append(Span(row, row, start, end))
