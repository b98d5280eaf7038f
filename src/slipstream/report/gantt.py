"""A step's timeline as a Gantt chart in which exposed communication stands out at a glance."""

from __future__ import annotations

from slipstream.report.hover import height_of, readout
from slipstream.report.markup import Markup, el
from slipstream.report.scale import Scale
from slipstream.report.timeline import ROWS, Span, StepTimeline, union, verdict
from slipstream.words import duration, size, tidy

_WIDTH, _LEFT, _RIGHT, _TOP = 1120.0, 136.0, 1104.0, 12.0
_BAR, _LANE_GAP, _ROW_GAP = 26.0, 3.0, 10.0
_AXIS_HEIGHT = 40.0
_MOST_LANES = 6
_ALWAYS_SHOWN = ("communication", "wait")
_LABELS = {"wait": "exposed wait"}


def draw(timeline: StepTimeline) -> Markup:
    """The chart as SVG: a row for each kind of span, waits shaded across all rows."""
    x = Scale(0.0, timeline.end_seconds, _LEFT, _RIGHT)
    rows: list[Markup] = []
    readouts: list[tuple[Span, float]] = []
    top = _TOP
    for row in ROWS:
        lanes = _lanes(timeline.row(row))
        if lanes or row in _ALWAYS_SHOWN:
            rows.append(_row(timeline, row, lanes, x, top))
            for index, lane in enumerate(lanes):
                y = top + index * (_BAR + _LANE_GAP)
                readouts += [(span, y) for span in lane]
            top += max(len(lanes), 1) * (_BAR + _LANE_GAP) - _LANE_GAP + _ROW_GAP
    height = top + _AXIS_HEIGHT
    shades = [
        el("rect", x=x(a), y=_TOP - 4, width=x(b) - x(a), height=top - _TOP, class_="shade")
        for a, b in union(timeline.row("wait"))
    ]
    return el(
        "svg",
        _pattern(),
        shades,
        _axis(x, top),
        rows,
        # Above all rows, or later rows would cover them.
        [_readout(timeline, span, x, y, height) for span, y in readouts],
        viewBox=f"0 0 {_WIDTH:.0f} {height:.0f}",
        role="img",
        aria_label=f"Timeline of step {timeline.step}. {verdict(timeline)}",
        class_="gantt",
    )


def _row(timeline: StepTimeline, row: str, lanes: list[list[Span]], x: Scale, top: float) -> Markup:
    parts = [
        el("text", _LABELS.get(row, row), x=_LEFT - 14, y=top + 18, text_anchor="end", class_="row")
    ]
    for index, lane in enumerate(lanes or [[]]):
        y = top + index * (_BAR + _LANE_GAP)
        width = _RIGHT - _LEFT
        parts.append(el("rect", x=_LEFT, y=y, width=width, height=_BAR, rx=4, class_="track"))
        parts += [_bar(timeline, span, x, y) for span in lane]
    return el("g", parts)


def _bar(timeline: StepTimeline, span: Span, x: Scale, y: float) -> Markup:
    """One span; a bucket's part within a wait is drawn over it as exposed."""
    left, width = x(span.start_seconds), max(x(span.end_seconds) - x(span.start_seconds), 1.0)
    is_bucket = span.row == "communication"
    css = "hidden" if is_bucket else span.row
    shapes = [el("rect", x=left, y=y, width=width, height=_BAR, rx=3, class_=f"bar {css}")]
    exposed = timeline.exposed_parts(span) if is_bucket else []
    for begin, end in exposed:
        piece = max(x(end) - x(begin), 1.0)
        at = {"x": x(begin), "y": y, "width": piece, "height": _BAR, "rx": 3.0}
        shapes += [el("rect", **at, class_="bar exposed"), el("rect", **at, class_="hatch")]
    if span.row == "wait":
        shapes.append(el("rect", x=left, y=y, width=width, height=_BAR, rx=3, class_="hatch"))
    label = span.name if is_bucket else duration(span.seconds)
    if is_bucket and len(label) * 7.5 > width - 6:
        label = "".join(filter(str.isdigit, label))
    if label and len(label) * 7.5 <= width - 4:
        middle = left + width / 2
        shapes.append(
            el("text", label, x=middle, y=y + 17.5, text_anchor="middle", class_="in-bar")
        )
    return el("g", shapes)


def _readout(timeline: StepTimeline, span: Span, x: Scale, y: float, height: float) -> Markup:
    """An invisible copy of the bar, over which its numbers appear: below it, or above at the end.

    The drawing scrolls sideways on narrow screens and is therefore cut at its `height`.
    """
    left, width = x(span.start_seconds), max(x(span.end_seconds) - x(span.start_seconds), 3.0)
    hit = el("rect", x=left, y=y, width=width, height=_BAR, class_="hit")
    lines = _lines(timeline, span)
    top = y + _BAR + 4
    if top + height_of(lines) > height:
        top = max(0.0, y - 4 - height_of(lines))
    box = readout(left + width / 2, top, lines, left=_LEFT, right=_RIGHT)
    return el("g", hit, el("g", box, class_="tip"), class_="hover")


def _lines(timeline: StepTimeline, span: Span) -> list[tuple[str, str]]:
    lines = [
        ("", span.name[:60]),
        ("", f"{duration(span.start_seconds)} + {duration(span.seconds)}"),
    ]
    if span.bytes is not None:
        speed = f", {size(span.bytes / span.seconds)}/s" if span.seconds > 0 else ""
        lines.append(("", f"{size(span.bytes)}{speed}"))
    if span.row == "communication":
        exposed = timeline.exposed_of(span)
        lines.append(("hidden", f"{duration(span.seconds - exposed)} hidden"))
        lines.append(("exposed", f"{duration(exposed)} exposed"))
    return lines


def _lanes(spans: list[Span]) -> list[list[Span]]:
    """Spans in as few lanes as keep them from overlapping, at most six; the last takes the rest."""
    lanes: list[list[Span]] = []
    for span in spans:
        free = (lane for lane in lanes if lane[-1].end_seconds <= span.start_seconds)
        lane = next(free, None)
        if lane is not None:
            lane.append(span)
        elif len(lanes) < _MOST_LANES:
            lanes.append([span])
        else:
            lanes[-1].append(span)
    return lanes


def _axis(x: Scale, bottom: float) -> Markup:
    marks = [
        [
            el("line", x1=x(tick), x2=x(tick), y1=_TOP - 4, y2=bottom - 4, class_="grid"),
            el("text", tidy(duration(tick)), x=x(tick), y=bottom + 14, text_anchor="middle"),
        ]
        for tick in x.ticks(10)
    ]
    middle = (_LEFT + _RIGHT) / 2
    label = el(
        "text", "time from the start of the step", x=middle, y=bottom + 32, text_anchor="middle"
    )
    return el("g", marks, label, class_="scale")


def _pattern() -> Markup:
    """The diagonal lines of everything exposed, so that it does not depend on colour alone."""
    stroke = el("line", x1=0, x2=0, y1=0, y2=6, class_="hatch-line")
    pattern = el(
        "pattern",
        stroke,
        id="exposed-hatch",
        width=6,
        height=6,
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    )
    return el("defs", pattern)
