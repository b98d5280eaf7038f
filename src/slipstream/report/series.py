"""From metrics records to what a chart draws: points, gaps, smoothing, thinning."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.report.records import Record, finite

Point = tuple[float, float]

# Beyond this the difference of two values can overflow.
_LARGEST = 1e300
_MOST_POINTS = 600


@dataclass(frozen=True)
class Series:
    """One curve. segments: runs of neighbouring finite points, split where a value is missing.

    css: the class that colours it; is_sparse: few points, drawn with marks and not smoothed.
    """

    name: str
    css: str
    segments: tuple[tuple[Point, ...], ...]
    is_sparse: bool = False

    @property
    def points(self) -> list[Point]:
        """All points in order."""
        return [point for segment in self.segments for point in segment]


def series(
    name: str, css: str, records: Iterable[Record], field: str, *, is_sparse: bool = False
) -> Series:
    """The curve of `field` over the step of `records`."""
    segments: list[list[Point]] = [[]]
    for record in records:
        value = finite(record, field)
        if value is not None and abs(value) < _LARGEST:
            segments[-1].append((float(record["step"]), value))
        elif segments[-1]:
            segments.append([])
    kept = tuple(tuple(segment) for segment in segments if segment)
    return Series(name, css, kept, is_sparse)


def smooth(points: tuple[Point, ...], window: int) -> list[Point]:
    """Centred moving average over `window` points (fewer at the ends), at 300 to 600 places."""
    half = window // 2
    last = len(points) - 1
    every = -(-len(points) // _MOST_POINTS)
    averaged = []
    for index in [*range(0, last, every), last]:
        reach = min(half, index, last - index)
        near = [y for _, y in points[index - reach : index + reach + 1]]
        # fsum: one huge value must not wash out its neighbours, as running sums would let it.
        averaged.append((points[index][0], math.fsum(near) / len(near)))
    return averaged


def window_of(num_points: int) -> int:
    """Over how many records a curve of so many is smoothed; 1 means not at all."""
    return 1 if num_points < 24 else max(3, num_points // 30) | 1


def thin(points: list[Point] | tuple[Point, ...]) -> list[Point]:
    """At most about 600 points that keep each stretch's lowest and highest value."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    length = -(-len(points) * 2 // _MOST_POINTS)
    kept: list[Point] = []
    for start in range(0, len(points), length):
        stretch = points[start : start + length]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept.extend(sorted(ends))
    return kept
