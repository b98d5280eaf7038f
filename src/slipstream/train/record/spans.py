"""What one step spent its time on, as the spans of a `timeline` record."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.sync import BucketTimes, StepTimeline

Span = tuple[str, str, float, float]


class StepClock:
    """Cuts the time of a step into named spans; costs one clock reading a span.

    Times are time.perf_counter() values, like those of `GradientSync.timeline`.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._spans: list[Span] = []
        self._before: list[Span] = []
        self._cut_at = now()

    def begin(self) -> None:
        """Starts a new step here and forgets the spans of all but the last one."""
        self._before, self._spans = self._spans or self._before, []
        self._cut_at = self._now()

    @property
    def seconds(self) -> float:
        """From the start of the step to its last cut."""
        return self._cut_at - self._spans[0][2] if self._spans else 0.0

    def cut(self, row: str, name: str | None = None) -> float:
        """Ends the span that began at the last cut; returns its seconds.

        row: one of input, forward, backward, wait, update; name: what the report calls it.
        """
        now = self._now()
        self._spans.append((row, name or row, self._cut_at, now))
        seconds = now - self._cut_at
        self._cut_at = now
        return seconds

    def record(
        self, step: int, timeline: StepTimeline, earlier: StepTimeline | None = None
    ) -> dict[str, Any]:
        """The step's `timeline` record: these spans and the buckets on the wire.

        timeline: of the last round, earlier: of the one before it. A round that gathers ends in the
        next step's forward; then the record is of the step before this one.
        """
        buckets = _named("bucket", timeline.buckets)
        if timeline.gathers:
            step, spans = step - 1, self._before
            buckets = _named("gather", earlier.gathers if earlier else ()) + buckets
            buckets += _named("gather", timeline.gathers)
        else:
            spans = _wait_apart(self._spans, timeline)
        start, end = (spans[0][2], spans[-1][3]) if spans else (self._cut_at, self._cut_at)
        shown: list[dict[str, Any]] = [
            {"row": row, "name": name, "start_seconds": begin - start, "end_seconds": end - start}
            for row, name, begin, end in spans
        ]
        shown += [
            {
                "row": "communication",
                "name": name,
                "start_seconds": max(0.0, bucket.start_seconds - start),
                "end_seconds": bucket.end_seconds - start,
                "bytes": bucket.bytes,
            }
            for name, bucket in buckets
            if bucket.start_seconds < end and bucket.end_seconds > start
        ]
        return {"kind": "timeline", "step": step, "spans": shown}


def _named(name: str, buckets: Sequence[BucketTimes]) -> list[tuple[str, BucketTimes]]:
    return [(f"{name} {bucket.index}", bucket) for bucket in buckets]


def _wait_apart(spans: list[Span], timeline: StepTimeline) -> list[Span]:
    """Splits the wait for buckets off the end of the last backward, inside which the engine waits.

    With wait="backward" the training thread stands still from some moment on until the last bucket
    is back; what the engine measured of it and no "wait" span holds yet is cut out of backward.
    """
    known = sum(end - begin for row, _, begin, end in spans if row == "wait")
    waited = timeline.exposed_seconds - known
    last = max((index for index, span in enumerate(spans) if span[0] == "backward"), default=None)
    if last is None or waited <= 0 or not timeline.buckets:
        return spans
    row, name, begin, end = spans[last]
    back = min(end, max(bucket.end_seconds for bucket in timeline.buckets))
    since = max(begin, back - waited)
    apart = [(row, name, begin, since), ("wait", "wait for gradients", since, end)]
    return [*spans[:last], *apart, *spans[last + 1 :]]
