"""Readouts that appear under the pointer, by style rules alone: no script."""

from __future__ import annotations

from slipstream.report.markup import Child, Markup, el

_CHARACTER_WIDTH = 6.7
_LINE_HEIGHT = 16


def readout(
    x: float, y: float, lines: list[tuple[str, str]], *, left: float, right: float
) -> Markup:
    """A box of text beside `x`, its top at `y`, kept within `left`..`right`.

    lines: pairs of a css class (for the colour, "" for none) and a text.
    """
    longest = max(len(content) for _, content in lines)
    width = longest * _CHARACTER_WIDTH + 16
    box_left = x + 10 if x + 10 + width <= right else max(left, x - 10 - width)
    rows: list[Child] = [
        el("text", content, x=box_left + 8, y=y + 16 + index * _LINE_HEIGHT, class_=css or None)
        for index, (css, content) in enumerate(lines)
    ]
    height = height_of(lines)
    box = el("rect", x=box_left, y=y, width=width, height=height, rx=5, class_="tip-box")
    return el("g", box, rows, class_="tip-text")


def height_of(lines: list[tuple[str, str]]) -> float:
    """How high the box for `lines` is."""
    return len(lines) * _LINE_HEIGHT + 10.0
