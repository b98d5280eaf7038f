"""Hidden and exposed communication of a step, and its drawing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_run import spans
from slipstream.report import gantt
from slipstream.report.timeline import Span, StepTimeline, read_timeline, verdict


def timeline(*rows: tuple[str, float, float]) -> StepTimeline:
    return StepTimeline(1, tuple(Span(row, row, start, end) for row, start, end in rows))


def test_exposed_is_what_lies_within_the_waits() -> None:
    step = timeline(
        ("backward", 0, 10),
        ("communication", 2, 6),
        ("communication", 8, 13),
        ("wait", 10, 13),
    )
    assert step.communication_seconds == 9
    assert step.exposed_seconds == 3
    assert step.exposed_parts(step.row("communication")[1]) == [(10, 13)]
    assert step.exposed_of(step.row("communication")[0]) == 0
    assert verdict(step) == (
        "6.00 s of 9.00 s of communication (67 %) ran hidden; for 3.00 s the step waited."
    )


def test_overlapping_buckets_count_once() -> None:
    step = timeline(("communication", 0, 4), ("communication", 2, 6), ("wait", 3, 5))
    assert step.communication_seconds == 6
    assert step.exposed_seconds == 2


def test_verdicts_without_exposure_or_communication() -> None:
    assert verdict(timeline(("communication", 0, 1))) == (
        "All 1.00 s of communication ran hidden behind computation."
    )
    assert verdict(timeline(("forward", 0, 1))) == "There was no communication in this step."


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["communication", "wait"]),
            st.integers(0, 50),
            st.integers(0, 50),
        ),
        min_size=1,
    )
)
def test_hidden_and_exposed_add_up(rows: list[tuple[str, int, int]]) -> None:
    step = timeline(*((row, start, start + length) for row, start, length in rows))
    ticks = range(101)
    busy = {
        tick
        for tick in ticks
        for span in step.row("communication")
        if span.start_seconds <= tick < span.end_seconds
    }
    waiting = {
        tick
        for tick in ticks
        for span in step.row("wait")
        if span.start_seconds <= tick < span.end_seconds
    }
    assert step.communication_seconds == len(busy)
    assert step.exposed_seconds == len(busy & waiting)


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {},
        {"row": "elsewhere", "start_seconds": 0, "end_seconds": 1},
        {"row": "wait", "start_seconds": 2, "end_seconds": 1},
        {"row": "wait", "start_seconds": -1, "end_seconds": 1},
        {"row": "wait", "start_seconds": 0, "end_seconds": "NaN"},
        {"row": ["wait"], "start_seconds": 0, "end_seconds": 1},
    ],
)
def test_spans_that_cannot_be_drawn_are_left_out(entry: object) -> None:
    good = {"row": "forward", "start_seconds": 0.0, "end_seconds": 1.0}
    step = read_timeline({"kind": "timeline", "step": 3, "spans": [entry, good]})
    assert step == StepTimeline(3, (Span("forward", "forward", 0.0, 1.0),))
    assert read_timeline({"kind": "timeline", "step": 3, "spans": [entry]}) is None


def test_the_drawing_has_a_bar_a_span_and_marks_what_is_exposed() -> None:
    step = read_timeline({"kind": "timeline", "step": 9, "spans": spans()})
    assert step is not None
    drawing = gantt.draw(step)
    assert drawing.count('class="bar hidden"') == 5
    assert drawing.count('class="bar exposed"') == 1
    assert drawing.count('class="bar wait"') == 1
    assert drawing.count('class="shade"') == 1
    assert drawing.count('class="hover"') == len(step.spans)


def test_overlapping_spans_of_a_row_get_lanes() -> None:
    one = gantt.draw(timeline(("communication", 0, 2), ("communication", 2, 3)))
    two = gantt.draw(timeline(("communication", 0, 2), ("communication", 1, 3)))
    assert two.count('class="track"') == one.count('class="track"') + 1
