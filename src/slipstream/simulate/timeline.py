"""Simulated steps as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Each step is a process; its rows are input, forward, backward, update, wait, and one for each
bucket: how long it stood ready while the channel was busy, then its journey.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slipstream.simulate.step import Journey, StepSimulation

_ROWS = ("input", "forward", "backward", "update", "wait")
Event = dict[str, Any]


def chrome_trace(steps: Mapping[str, StepSimulation]) -> dict[str, Any]:
    """The document: steps by name, all starting at 0; times in it are microseconds."""
    events: list[Event] = []
    for process, (name, step) in enumerate(steps.items(), start=1):
        events += _events(process, f"{name}: {step.step_seconds * 1e3:.3f} ms", step)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _events(process: int, name: str, step: StepSimulation) -> Iterator[Event]:
    yield _label("process_name", process, 0, {"name": name})
    yield _label("process_sort_index", process, 0, {"sort_index": process})
    rows = [*_ROWS, *(journey.name for journey in step.journeys)]
    for row, title in enumerate(rows):
        yield _label("thread_name", process, row, {"name": title})
        yield _label("thread_sort_index", process, row, {"sort_index": row})
    for span in step.spans:
        row = _ROWS.index(span.row)
        yield _complete(process, row, span.name, span.start_seconds, span.end_seconds, {})
    for row, journey in enumerate(step.journeys, start=len(_ROWS)):
        yield from _journey(process, row, journey)


def _journey(process: int, row: int, journey: Journey) -> Iterator[Event]:
    ready, start, end = journey.ready_seconds, journey.start_seconds, journey.end_seconds
    if start > ready:
        yield _complete(process, row, "waits for the channel", ready, start, {})
    bucket = journey.bucket
    about = bucket.model_dump(mode="json", include={"bytes", "collective", "wire"})
    gradients: Sequence[str] = bucket.gradients
    yield _complete(process, row, journey.name, start, end, {**about, "gradients": gradients})


def _complete(
    process: int, row: int, name: str, start: float, end: float, about: Mapping[str, Any]
) -> Event:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": row,
        "ts": start * 1e6,
        "dur": (end - start) * 1e6,
        "args": dict(about),
    }


def _label(kind: str, process: int, row: int, about: Mapping[str, Any]) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": dict(about)}
