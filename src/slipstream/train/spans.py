"""What one step spent its time on, as the spans of a `timeline` record."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from slipstream.sync import StepTimeline


class StepClock:
    """Cuts the time of a step into named spans; costs one clock reading a span.

    Times are time.perf_counter() values, like those of `GradientSync.timeline`.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._spans: list[tuple[str, str, float, float]] = []
        self._cut_at = now()

    def begin(self) -> None:
        """Starts a new step here and forgets the last one's spans."""
        self._spans = []
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

    def record(self, step: int, timeline: StepTimeline) -> dict[str, Any]:
        """The step's `timeline` record: these spans and the buckets on the wire."""
        start = self._spans[0][2] if self._spans else self._cut_at
        spans: list[dict[str, Any]] = [
            {"row": row, "name": name, "start_seconds": begin - start, "end_seconds": end - start}
            for row, name, begin, end in self._spans
        ]
        spans += [
            {
                "row": "communication",
                "name": f"bucket {bucket.index}",
                "start_seconds": bucket.start_seconds - start,
                "end_seconds": bucket.end_seconds - start,
                "bytes": bucket.bytes,
            }
            for bucket in timeline.buckets
        ]
        return {"kind": "timeline", "step": step, "spans": spans}
