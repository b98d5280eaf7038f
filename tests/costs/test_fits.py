"""Fits find the shape that made the points, and say how far off they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.costs import (
    Curve,
    Floor,
    Line,
    Minimum,
    Table,
    fit_floor,
    fit_line,
    fit_two_regimes,
    line_near,
)
from slipstream.errors import CostError

SIZES = np.geomspace(1024, 2**28, 25)
Points = list[tuple[float, float]]


def points_of(curve: Curve, noise: float = 0.0) -> Points:
    rng = np.random.default_rng(0)
    times = curve.seconds_of(SIZES) * rng.uniform(1 - noise, 1 + noise, len(SIZES))
    return list(zip(SIZES.tolist(), times.tolist(), strict=True))


def test_a_line_is_found_again() -> None:
    fit = fit_line(points_of(Line(2e-3, 1.5e-9)))
    assert isinstance(fit.curve, Line)
    assert fit.curve.startup_seconds == pytest.approx(2e-3)
    assert fit.curve.seconds_per_byte == pytest.approx(1.5e-9)
    assert fit.worst_error < 1e-9


def test_a_floor_is_found_again_and_beats_a_line() -> None:
    """The shape of Gloo over a slow link: flat for long, then a rate."""
    points = points_of(Floor(7e-3, 12.6e-9), noise=0.03)
    floor, line = fit_floor(points), fit_line(points)
    assert isinstance(floor.curve, Floor)
    assert floor.curve.startup_seconds == pytest.approx(7e-3, rel=0.03)
    assert floor.curve.seconds_per_byte == pytest.approx(12.6e-9, rel=0.03)
    assert floor.worst_error < 0.06 < 0.3 < line.worst_error


def test_two_regimes_find_the_switch_of_protocol() -> None:
    small, large = Line(1e-4, 4e-9), Line(3e-3, 1e-9)
    switch = 2**20
    points = [(size, (small if size <= switch else large).seconds(size)) for size in SIZES.tolist()]
    fit = fit_two_regimes(points)
    assert fit.worst_error < 1e-6 < 0.05 < fit_line(points).worst_error
    last = max(size for size in SIZES.tolist() if size <= switch)
    assert f"up to {last:.0f} B" in str(fit)
    assert fit.curve.seconds(512) == pytest.approx(small.seconds(512))
    assert fit.curve.seconds(2**29) == pytest.approx(large.seconds(2**29))


def test_fits_say_in_words_what_they_are() -> None:
    points = points_of(Line(2e-3, 1.5e-9))
    assert str(fit_line(points)) == "line: 2 ms + 1.5 ns/B; off by 0% (median), 0% (worst)"
    assert str(fit_floor(points)).startswith("floor: max(")


positive = st.floats(1e-6, 10.0)


@given(st.lists(st.tuples(st.integers(1, 2**30), positive), min_size=1, max_size=12))
def test_whatever_was_measured_fits_are_costs(raw: list[tuple[int, float]]) -> None:
    """No negative numbers, whatever the noise; two regimes are never worse than one line."""
    points = [(float(size), seconds) for size, seconds in sorted(dict(raw).items())]
    fits = [fit_line(points), fit_floor(points), fit_two_regimes(points)]
    sizes = np.array([size for size, _ in points])
    times = np.array([seconds for _, seconds in points])
    squares = []
    for fit in fits:
        errors = np.abs(fit.curve.seconds_of(sizes) / times - 1)
        assert fit.worst_error == pytest.approx(errors.max())
        assert fit.median_error <= fit.worst_error
        assert (fit.curve.seconds_of(np.array([0.0, 1e3, 1e12])) >= 0).all()
        squares.append((errors**2).sum())
    assert squares[2] <= squares[0] * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("points", [[], [(0.0, 1.0)], [(1.0, 0.0)], [(1.0, float("nan"))]])
def test_nothing_to_fit_is_an_error(points: Points) -> None:
    for fit in (fit_line, fit_floor, fit_two_regimes):
        with pytest.raises(CostError):
            fit(points)


def test_the_line_near_a_curve() -> None:
    line = Line(1e-3, 1e-9)
    assert line_near(line, 1e6) is line
    table = Table(tuple(points_of(line)))
    assert line_near(table, 2**28).startup_seconds == pytest.approx(1e-3, rel=0.01)
    assert line_near(Minimum((line, line)), 2**28).seconds_per_byte == pytest.approx(1e-9)
    assert line_near(Table(((1, 0.0),)), 0).startup_seconds < 1e-9
