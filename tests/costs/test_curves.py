"""Cost curves: their values, their bounds, and that arrays and single sizes agree to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes import KINDS, random_curve
from slipstream.costs import Curve, Floor, Line, Minimum, Table, least_of
from slipstream.errors import CostError

TABLE = Table(((1024, 1e-3), (2048, 3e-3), (4096, 4e-3)))


def test_a_line() -> None:
    line = Line(1e-3, 2e-9)
    assert line.seconds(0) == 1e-3
    assert line.seconds(500_000) == pytest.approx(2e-3)


def test_a_floor() -> None:
    floor = Floor(1e-3, 1e-9)
    assert [floor.seconds(m) for m in (0, 1e6, 3e6)] == pytest.approx([1e-3, 1e-3, 3e-3])


@pytest.mark.parametrize(
    ("num_bytes", "seconds"),
    [
        (0, 1e-3),  # below the first point: constant
        (1024, 1e-3),
        (1536, 2e-3),  # between points: linear
        (2048, 3e-3),
        (3072, 3.5e-3),
        (4096, 4e-3),
        (8192, 6e-3),  # past the last: its last slope
    ],
)
def test_a_table_between_below_and_beyond_its_points(num_bytes: float, seconds: float) -> None:
    assert TABLE.seconds(num_bytes) == pytest.approx(seconds)


def test_a_table_that_falls_at_its_end_stays_level_beyond() -> None:
    table = Table(((1, 2.0), (2, 1.0)))
    assert table.seconds(1000) == 1.0
    assert not table.is_monotone


def test_a_single_point_grows_in_proportion() -> None:
    table = Table(((1000, 0.5),))
    assert [table.seconds(size) for size in (10, 1000, 3000)] == pytest.approx([0.5, 0.5, 1.5])
    assert Table(((0, 0.5),)).seconds(3000) == 0.5


def test_the_least_of_several_and_which_it_is() -> None:
    both = Minimum((Line(1.0, 1.0), Line(3.0, 0.5)))
    assert [both.seconds(size) for size in (0, 4, 10)] == [1.0, 5.0, 8.0]
    assert [both.winner(size) for size in (0, 4, 10)] == [0, 0, 1]
    line = Line(1.0, 1.0)
    assert least_of([line]) is line
    assert isinstance(least_of([line, TABLE]), Minimum)


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_and_single_sizes_agree_to_the_bit(kind: str) -> None:
    rng = np.random.default_rng(2)
    for _ in range(100):
        curve = random_curve(kind, rng)
        sizes = np.concatenate([rng.uniform(0, 80, 20), rng.integers(0, 60, 20)])
        assert [curve.seconds(size) for size in sizes] == curve.seconds_of(sizes).tolist()
    floor = Floor(1.0, 0.1)
    assert [floor.seconds(size) for size in sizes] == floor.seconds_of(sizes).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_no_size_has_a_better_rate_than_the_bound(kind: str) -> None:
    rng = np.random.default_rng(4)
    for _ in range(100):
        curve = random_curve(kind, rng)
        largest = float(rng.uniform(1, 70))
        knots = np.arange(1.0, largest)
        sizes = np.concatenate([knots, np.linspace(largest / 1000, largest, 1000)])
        rates = curve.seconds_of(sizes) / sizes
        bound = curve.least_seconds_per_byte(largest)
        assert bound <= rates.min() * (1 + 1e-12)
        assert bound == pytest.approx(rates.min(), rel=1e-12), "and it is reached"


@pytest.mark.parametrize("kind", KINDS)
def test_a_curve_that_calls_itself_monotone_is(kind: str) -> None:
    rng = np.random.default_rng(6)
    seen = set()
    for _ in range(100):
        curve = random_curve(kind, rng)
        falls = bool((np.diff(curve.seconds_of(np.linspace(0, 80, 400))) < -1e-9).any())
        assert not (falls and curve.is_monotone)
        seen.add(curve.is_monotone)
    assert (False in seen) == (kind in ("any table", "table and line"))


@pytest.mark.parametrize(
    ("points", "spreads", "words"),
    [
        ((), None, "at least one point"),
        (((2, 1.0), (1, 1.0)), None, "from 2 to 1 bytes"),
        (((1, 1.0), (1, 2.0)), None, "from 1 to 1 bytes"),
        (((1, -1.0),), None, "cannot hold"),
        (((1, float("nan")),), None, "cannot hold"),
        (((-1, 1.0),), None, "cannot hold"),
        (((1, 1.0),), (0.1, 0.1), "1 points has 2 spreads"),
    ],
)
def test_impossible_tables_are_refused(
    points: tuple[tuple[float, float], ...], spreads: tuple[float, ...] | None, words: str
) -> None:
    with pytest.raises(CostError, match=words):
        Table(points, spreads)


@given(st.floats(max_value=-1e-300) | st.sampled_from([float("inf"), float("nan")]))
def test_impossible_lines_are_refused(number: float) -> None:
    for curve in (Line, Floor):
        with pytest.raises(CostError, match="finite, and 0 or more"):
            curve(number, 1e-9)
        with pytest.raises(CostError, match="finite, and 0 or more"):
            curve(1e-3, number)


def test_the_least_of_nothing_is_refused() -> None:
    nothing: tuple[Curve, ...] = ()
    with pytest.raises(CostError, match="no cost curves"):
        Minimum(nothing)
