"""Simple shapes fitted to measured costs, each with its error.

    line          T(M) = a + b M                       the shape of the literature
    floor         T(M) = max(a, b M)                   flat while startup rules, then a rate
    two regimes   a1 + b1 M up to a size, a2 + b2 M beyond   where the backend switches protocol

All by least squares of the *relative* error: sizes span five orders of magnitude, and an absolute
fit would know only the largest. No number comes out negative. Planners use the table; fits are for
people to read, and for rules that need a startup (MG-WFBP's).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.costs.curves import Curve, Floats, Floor, Line, Table
from slipstream.errors import CostError

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Fit:
    """A shape fitted to points, and how far off it is.

    kind: "line", "floor" or "two regimes"; errors are relative, |fitted / measured - 1|.
    """

    kind: str
    curve: Curve
    median_error: float
    worst_error: float

    def __str__(self) -> str:
        errors = f"off by {self.median_error:.0%} (median), {self.worst_error:.0%} (worst)"
        return f"{self.kind}: {_formula(self.curve)}; {errors}"


def fit_line(points: Points) -> Fit:
    """a + b M. Raises CostError without points, or when a point has no time."""
    sizes, times = _checked(points)
    return _judged("line", Line(*_line(sizes, times)), sizes, times)


def fit_floor(points: Points) -> Fit:
    """max(a, b M): the best of all ways to call the smaller sizes flat and the rest a rate.

    Raises CostError without points, or when a point has no time.
    """
    sizes, times = _checked(points)
    fits = []
    for flat in range(len(sizes) + 1):
        startup = _flat(times[:flat]) if flat else 0.0
        per_byte = _flat(times[flat:] / sizes[flat:]) if flat < len(sizes) else 0.0
        fits.append(_judged("floor", Floor(startup, per_byte), sizes, times))
    return min(fits, key=lambda fit: _squares(fit.curve, sizes, times))


def fit_two_regimes(points: Points) -> Fit:
    """Two lines, one for the smaller sizes and one beyond; at least two points each.

    With fewer than four points it is one line. Raises CostError without points, or when a point
    has no time.
    """
    sizes, times = _checked(points)
    fits = [_judged("two regimes", Line(*_line(sizes, times)), sizes, times)]
    for small in range(2, len(sizes) - 1):
        a1, b1 = _line(sizes[:small], times[:small])
        a2, b2 = _line(sizes[small:], times[small:])
        last, first, far = sizes[small - 1], sizes[small], 2 * sizes[-1]
        knots = ((0.0, a1), (last, a1 + b1 * last), (first, a2 + b2 * first), (far, a2 + b2 * far))
        curve = Table(tuple((float(size), float(seconds)) for size, seconds in knots))
        fits.append(_judged("two regimes", curve, sizes, times))
    return min(fits, key=lambda fit: _squares(fit.curve, sizes, times))


def line_near(curve: Curve, max_bytes: float) -> Line:
    """The line nearest to a curve between 1 KiB and max_bytes; a line is its own."""
    if isinstance(curve, Line):
        return curve
    sizes = np.geomspace(1024, max(max_bytes, 2048), 40)
    times = np.maximum(curve.seconds_of(sizes), 1e-12)  # what costs nothing fits a line of nothing
    return Line(*_line(sizes, times))


def _checked(points: Points) -> tuple[Floats, Floats]:
    if not points:
        raise CostError("There is nothing to fit: no size was measured.")
    sizes, times = np.array(points, np.float64).T
    if (sizes <= 0).any() or (times <= 0).any() or not np.isfinite(times).all():
        raise CostError("A fit needs sizes and times above 0.")
    return sizes, times


def _line(sizes: Floats, times: Floats) -> tuple[float, float]:
    """a, b >= 0 with the least sum of ((a + b M - t) / t)^2."""
    ones, slopes = 1 / times, sizes / times
    if len(sizes) > 1:
        both = np.linalg.lstsq(np.stack([ones, slopes], 1), np.ones_like(times), rcond=None)[0]
        if (both >= 0).all():
            return float(both[0]), float(both[1])
    startup, per_byte = _flat(times), _flat(times / sizes)
    flat_squares = float(((startup * ones - 1) ** 2).sum())
    rate_squares = float(((per_byte * slopes - 1) ** 2).sum())
    return (startup, 0.0) if flat_squares <= rate_squares else (0.0, per_byte)


def _flat(times: Floats) -> float:
    """The constant c with the least sum of (c / t - 1)^2."""
    return float((1 / times).sum() / (1 / times**2).sum())


def _squares(curve: Curve, sizes: Floats, times: Floats) -> float:
    return float(((curve.seconds_of(sizes) / times - 1) ** 2).sum())


def _judged(kind: str, curve: Curve, sizes: Floats, times: Floats) -> Fit:
    errors = np.abs(curve.seconds_of(sizes) / times - 1)
    return Fit(kind, curve, float(np.median(errors)), float(errors.max()))


def _formula(curve: Curve) -> str:
    if isinstance(curve, Line):
        return f"{curve.startup_seconds * 1e3:.3g} ms + {curve.seconds_per_byte * 1e9:.3g} ns/B"
    if isinstance(curve, Floor):
        startup, per_byte = curve.startup_seconds * 1e3, curve.seconds_per_byte * 1e9
        return f"max({startup:.3g} ms, {per_byte:.3g} ns/B)"
    assert isinstance(curve, Table)
    (_, a1), (x1, y1), (x2, y2), (x3, y3) = curve.points
    small, large = (y1 - a1) / x1, (y3 - y2) / (x3 - x2)
    beyond = Line(max(0.0, y2 - large * x2), large)
    return f"{_formula(Line(a1, small))} up to {x1:.0f} B, {_formula(beyond)} beyond"
