"""The timeline of one step: its spans, and which communication was hidden or exposed."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.report.records import Record, finite
from slipstream.words import duration, percent

ROWS = ("input", "forward", "backward", "communication", "wait", "update")

_MOST_SPANS = 2000


@dataclass(frozen=True)
class Span:
    """Something that lasted, in seconds from the start of the step."""

    row: str
    name: str
    start_seconds: float
    end_seconds: float
    bytes: float | None = None

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True)
class StepTimeline:
    """The spans of one step, and how much of its communication ran hidden or exposed."""

    step: int
    spans: tuple[Span, ...]

    def row(self, row: str) -> list[Span]:
        """The spans of one row by start."""
        return sorted((s for s in self.spans if s.row == row), key=lambda s: s.start_seconds)

    @property
    def end_seconds(self) -> float:
        """When the last span ends."""
        return max(span.end_seconds for span in self.spans)

    @property
    def communication_seconds(self) -> float:
        """Time in which at least one bucket was under way."""
        return _length(union(self.row("communication")))

    @property
    def exposed_seconds(self) -> float:
        """Communication for which the step waited."""
        return sum(self.exposed_of(part) for part in union(self.row("communication")))

    def exposed_of(self, part: Span | tuple[float, float]) -> float:
        """How much of `part` lies within the waits."""
        return _length(self.exposed_parts(part))

    def exposed_parts(self, part: Span | tuple[float, float]) -> list[tuple[float, float]]:
        """The pieces of `part` that lie within the waits."""
        begin, end = (part.start_seconds, part.end_seconds) if isinstance(part, Span) else part
        cut = [(max(a, begin), min(b, end)) for a, b in union(self.row("wait"))]
        return [(a, b) for a, b in cut if b > a]


def read_timeline(record: Record) -> StepTimeline | None:
    """The timeline in a record of kind "timeline"; None when no span in it can be drawn."""
    raw = record.get("spans")
    spans = [_span(entry) for entry in raw[:_MOST_SPANS]] if isinstance(raw, list) else []
    kept = tuple(span for span in spans if span is not None)
    if not kept or max(span.end_seconds for span in kept) <= 0:
        return None
    return StepTimeline(record["step"], kept)


def _span(entry: object) -> Span | None:
    if not isinstance(entry, dict) or entry.get("row") not in ROWS:
        return None
    start, end = finite(entry, "start_seconds"), finite(entry, "end_seconds")
    if start is None or end is None or not 0 <= start <= end < 1e9:
        return None
    return Span(
        entry["row"], str(entry.get("name", entry["row"])), start, end, finite(entry, "bytes")
    )


def verdict(timeline: StepTimeline) -> str:
    """How much of the communication was hidden, in a sentence."""
    total, exposed = timeline.communication_seconds, timeline.exposed_seconds
    if total <= 0:
        return "There was no communication in this step."
    if exposed <= 0:
        return f"All {duration(total)} of communication ran hidden behind computation."
    return (
        f"{duration(total - exposed)} of {duration(total)} of communication "
        f"({percent((total - exposed) / total, 0)}) ran hidden; "
        f"for {duration(exposed)} the step waited."
    )


def union(spans: list[Span]) -> list[tuple[float, float]]:
    """The stretches of time that `spans`, sorted by start, cover; in order, not touching."""
    joined: list[tuple[float, float]] = []
    for span in spans:
        if joined and span.start_seconds <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], span.end_seconds))
        else:
            joined.append((span.start_seconds, span.end_seconds))
    return joined


def _length(parts: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in parts)
