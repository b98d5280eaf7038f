"""Cost curves: how many seconds a collective takes for M bytes, `T(M)`.

M is the size of the bucket in memory, whatever travels. Every curve has one arithmetic for single
sizes and arrays, bit for bit the same, so planners may mix the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import isfinite
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipstream.errors import CostError

Floats = NDArray[np.float64]


class Curve(Protocol):
    """T(M) of one collective on one cluster."""

    def seconds(self, num_bytes: float) -> float:
        """The seconds that a bucket of `num_bytes` takes."""
        ...

    def seconds_of(self, num_bytes: ArrayLike) -> Floats:
        """The same for an array of sizes, of the same shape, float64."""
        ...

    @property
    def is_monotone(self) -> bool:
        """Whether more bytes never take less time."""
        ...

    def least_seconds_per_byte(self, max_bytes: float) -> float:
        """A lower bound of T(M) / M over all 0 < M <= max_bytes."""
        ...


@dataclass(frozen=True)
class _StartupAndRate(ABC):
    """Startup a in seconds and b in seconds per byte, neither of them negative."""

    startup_seconds: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        for value in (self.startup_seconds, self.seconds_per_byte):
            if not (isfinite(value) and value >= 0):
                raise CostError(f"A line of costs cannot have {value} s: finite, and 0 or more.")

    @abstractmethod
    def seconds(self, num_bytes: float) -> float:
        """The seconds that a bucket of `num_bytes` takes."""

    @property
    def is_monotone(self) -> bool:
        """Always: neither number is negative."""
        return True

    def least_seconds_per_byte(self, max_bytes: float) -> float:
        """T(M) / M is least for the largest M."""
        return self.seconds(max_bytes) / max_bytes


class Line(_StartupAndRate):
    """T(M) = a + b M: startup a in seconds, b in seconds per byte.

    Raises CostError where either is negative or not finite.
    """

    def seconds(self, num_bytes: float) -> float:
        """The seconds that a bucket of `num_bytes` takes."""
        return self.startup_seconds + self.seconds_per_byte * num_bytes

    def seconds_of(self, num_bytes: ArrayLike) -> Floats:
        """The same for an array of sizes."""
        return self.startup_seconds + self.seconds_per_byte * np.asarray(num_bytes, np.float64)


class Floor(_StartupAndRate):
    """T(M) = max(a, b M): flat while startup rules, then a rate; a in seconds, b in seconds a byte.

    Raises CostError where either is negative or not finite.
    """

    def seconds(self, num_bytes: float) -> float:
        """The seconds that a bucket of `num_bytes` takes."""
        return max(self.startup_seconds, self.seconds_per_byte * num_bytes)

    def seconds_of(self, num_bytes: ArrayLike) -> Floats:
        """The same for an array of sizes."""
        rates: Floats = self.seconds_per_byte * np.asarray(num_bytes, np.float64)
        return np.maximum(self.startup_seconds, rates)


@dataclass(frozen=True)
class Table:
    """T(M) through measured points: (bytes, seconds), bytes increasing.

    Between points linear; below the first constant; past the last with the last slope (that of
    the two last points, never below 0; a single point grows in proportion). spread_seconds: the
    spread of each point, where it was measured.

    Raises CostError when there is no point, sizes do not increase, or a time is negative.
    """

    points: tuple[tuple[float, float], ...]
    spread_seconds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.points:
            raise CostError("A table of costs needs at least one point.")
        for size, seconds in self.points:
            if not (isfinite(size) and size >= 0 and isfinite(seconds) and seconds >= 0):
                raise CostError(
                    f"A table of costs cannot hold ({size}, {seconds}): finite, and 0 or more."
                )
        for (size, _), (next_size, _) in pairwise(self.points):
            if next_size <= size:
                raise CostError(
                    f"A table of costs goes from {size} to {next_size} bytes; sizes increase."
                )
        if self.spread_seconds is not None and len(self.spread_seconds) != len(self.points):
            raise CostError(
                f"A table of {len(self.points)} points has {len(self.spread_seconds)} spreads; "
                "each point has one, or none has."
            )

    @cached_property
    def _sizes(self) -> list[float]:
        return [float(size) for size, _ in self.points]

    @cached_property
    def _times(self) -> list[float]:
        return [float(seconds) for _, seconds in self.points]

    @cached_property
    def _slopes(self) -> list[float]:
        """Seconds per byte after each point."""
        slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(self.points)]
        if slopes:
            return [*slopes, max(0.0, slopes[-1])]
        size, seconds = self.points[0]
        return [seconds / size if size else 0.0]

    @cached_property
    def _arrays(self) -> tuple[Floats, Floats, Floats]:
        return np.array(self._sizes), np.array(self._times), np.array(self._slopes)

    def seconds(self, num_bytes: float) -> float:
        """The seconds that a bucket of `num_bytes` takes."""
        at = bisect_right(self._sizes, num_bytes) - 1
        if at < 0:
            return self._times[0]
        return self._times[at] + self._slopes[at] * (num_bytes - self._sizes[at])

    def seconds_of(self, num_bytes: ArrayLike) -> Floats:
        """The same for an array of sizes."""
        sizes, times, slopes = self._arrays
        asked = np.maximum(np.asarray(num_bytes, np.float64), sizes[0])
        at = np.searchsorted(sizes, asked, side="right") - 1
        result: Floats = times[at] + slopes[at] * (asked - sizes[at])
        return result

    @cached_property
    def is_monotone(self) -> bool:
        """Whether no point is below the one before it; measured ones may be."""
        return all(y1 >= y0 for y0, y1 in pairwise(self._times))

    def least_seconds_per_byte(self, max_bytes: float) -> float:
        """T(M) / M between two points is least at one of them."""
        knots = [size for size in self._sizes if 0 < size < max_bytes]
        return min(self.seconds(size) / size for size in [*knots, max_bytes])


@dataclass(frozen=True)
class Minimum:
    """T(M) = the least of several curves: for each bucket the best of what is allowed.

    Raises CostError when there is no curve.
    """

    curves: tuple[Curve, ...]

    def __post_init__(self) -> None:
        if not self.curves:
            raise CostError("There is no least of no cost curves.")

    def seconds(self, num_bytes: float) -> float:
        """The seconds that a bucket of `num_bytes` takes."""
        return min(curve.seconds(num_bytes) for curve in self.curves)

    def seconds_of(self, num_bytes: ArrayLike) -> Floats:
        """The same for an array of sizes."""
        best = self.curves[0].seconds_of(num_bytes)
        for curve in self.curves[1:]:
            best = np.minimum(best, curve.seconds_of(num_bytes))
        return best

    def winner(self, num_bytes: float) -> int:
        """Which curve is the least for a bucket of `num_bytes`; the first of equal ones."""
        times = [curve.seconds(num_bytes) for curve in self.curves]
        return times.index(min(times))

    @property
    def is_monotone(self) -> bool:
        """Whether all curves are, which is enough."""
        return all(curve.is_monotone for curve in self.curves)

    def least_seconds_per_byte(self, max_bytes: float) -> float:
        """The least of the curves' own bounds."""
        return min(curve.least_seconds_per_byte(max_bytes) for curve in self.curves)


def least_of(curves: Sequence[Curve]) -> Curve:
    """The least of the curves; a single one as it is, so that planners see a plain line."""
    return curves[0] if len(curves) == 1 else Minimum(tuple(curves))
