"""A line chart as inline SVG: faint records, bold average, marks for evaluations, readouts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from slipstream.report.hover import readout
from slipstream.report.markup import Markup, el
from slipstream.report.scale import Scale, fit
from slipstream.report.series import Point, Series, smooth, thin, window_of
from slipstream.words import count, tidy

_WIDTH, _HEIGHT = 560.0, 268.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 548.0, 14.0, 226.0
_MOST_READOUTS = 80


@dataclass(frozen=True)
class Chart:
    """One chart. show: a value in words; low: a fixed lower end of the vertical axis."""

    title: str
    series: tuple[Series, ...]
    show: Callable[[float], str]
    low: float | None = None
    may_be_log: bool = False


@dataclass(frozen=True)
class Frame:
    """What all charts of a run share.

    last_step: where the horizontal axis ends; epoch_ends: steps with a dotted line; skips: steps
    with a red line.
    """

    last_step: float
    epoch_ends: tuple[float, ...] = ()
    skips: tuple[float, ...] = ()


def draw(chart: Chart, frame: Frame) -> Markup:
    """The chart with its title and legend as a figure; says so when there is nothing to draw."""
    drawn = [one for one in chart.series if one.segments]
    heading = el("h3", chart.title)
    if not drawn:
        return el(
            "figure", heading, el("p", "Nothing was recorded.", class_="empty"), class_="card"
        )
    x = Scale(0.0, max(frame.last_step, 1.0), _LEFT, _RIGHT)
    values = [y for one in drawn for _, y in one.points]
    y = fit(values, _BOTTOM, _TOP, low=chart.low, may_be_log=chart.may_be_log)
    svg = el(
        "svg",
        _grid(chart, x, y),
        _verticals(frame, x),
        [_curve(one, x, y) for one in drawn],
        _readouts(chart, drawn, x, y),
        viewBox=f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}",
        role="img",
        aria_label=_spoken(chart, drawn),
        class_="chart",
    )
    return el("figure", heading, _legend(chart, drawn, y), svg, class_="card")


def _grid(chart: Chart, x: Scale, y: Scale) -> Markup:
    lines = [
        [
            el("line", x1=_LEFT, x2=_RIGHT, y1=y(tick), y2=y(tick), class_="grid"),
            el("text", tidy(chart.show(tick)), x=_LEFT - 8, y=y(tick) + 4, text_anchor="end"),
        ]
        for tick in y.ticks()
    ]
    steps = [
        el("text", count(tick), x=x(tick), y=_BOTTOM + 18, text_anchor="middle")
        for tick in x.ticks(6)
        if tick == int(tick)
    ]
    axis = el("line", x1=_LEFT, x2=_RIGHT, y1=_BOTTOM, y2=_BOTTOM, class_="axis")
    middle = (_LEFT + _RIGHT) / 2
    label = el("text", "step", x=middle, y=_BOTTOM + 36, text_anchor="middle")
    return el("g", lines, steps, axis, label, class_="scale")


def _verticals(frame: Frame, x: Scale) -> Markup | None:
    kinds = (("epoch-end", frame.epoch_ends), ("skip", frame.skips))
    lines = [
        el("line", x1=x(step), x2=x(step), y1=_TOP, y2=_BOTTOM, class_=css)
        for css, steps in kinds
        for step in steps[:200]
    ]
    return el("g", lines) if lines else None


def _curve(one: Series, x: Scale, y: Scale) -> Markup:
    parts = []
    for segment in one.segments:
        if one.is_sparse or len(segment) == 1:
            parts.append(_path(thin(segment), x, y, "bold"))
            if len(segment) <= 60:
                parts += [el("circle", cx=x(px), cy=y(py), r=3.5) for px, py in segment]
            continue
        window = window_of(len(segment))
        if window > 1:
            parts.append(_path(thin(segment), x, y, "faint"))
        parts.append(_path(smooth(segment, window), x, y, "bold"))
    return el("g", parts, class_=f"curve {one.css}")


def _path(points: list[Point], x: Scale, y: Scale, css: str) -> Markup:
    places = "L".join(f"{x(px):.1f} {y(py):.1f}" for px, py in points)
    return el("path", d=f"M{places}", class_=css)


def _readouts(chart: Chart, drawn: list[Series], x: Scale, y: Scale) -> Markup:
    """Invisible columns, one a step that is read out; each shows a line, dots and a box."""
    steps = sorted({px for one in drawn for px, _ in one.points})
    every = -(-len(steps) // _MOST_READOUTS)
    steps = sorted({*steps[::every], steps[-1]})
    edges = [_LEFT, *((x(a) + x(b)) / 2 for a, b in pairwise(steps)), _RIGHT]
    columns = []
    for index, step in enumerate(steps):
        place = x(step)
        lines, dots = [("", f"step {count(step)}")], []
        for one in drawn:
            at = bisect_right(one.points, step, key=lambda point: point[0]) - 1
            if at < 0:
                continue
            value = one.points[at][1]
            lines.append((one.css, f"{one.name} {chart.show(value)}"))
            dots.append(el("circle", cx=place, cy=y(value), r=3.5, class_=one.css))
        hit = el(
            "rect",
            x=edges[index],
            y=_TOP,
            width=max(edges[index + 1] - edges[index], 0.5),
            height=_BOTTOM - _TOP,
            class_="hit",
        )
        line = el("line", x1=place, x2=place, y1=_TOP, y2=_BOTTOM, class_="cursor")
        box = readout(place, _TOP + 4, lines, left=_LEFT, right=_RIGHT)
        columns.append(el("g", hit, el("g", line, dots, box, class_="tip"), class_="hover"))
    return el("g", columns)


def _legend(chart: Chart, drawn: list[Series], y: Scale) -> Markup:
    entries = []
    for one in drawn:
        last = chart.show(one.points[-1][1])
        entries.append(el("span", el("i", class_=f"key {one.css}"), f"{one.name} ", el("b", last)))
    longest = max(
        (window_of(len(s)) for one in drawn if not one.is_sparse for s in one.segments), default=1
    )
    if longest > 1:
        entries.append(el("span", f"bold: average over {longest} records", class_="quiet"))
    if y.is_log:
        entries.append(el("span", "logarithmic", class_="quiet"))
    return el("p", entries, class_="legend")


def _spoken(chart: Chart, drawn: list[Series]) -> str:
    parts = (
        f"{one.name} from {chart.show(one.points[0][1])} to {chart.show(one.points[-1][1])}"
        for one in drawn
    )
    return f"{chart.title}: {', '.join(parts)}"
