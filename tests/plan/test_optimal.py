"""The exact planner against every plan there is, and against the recurrence tried in full."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes import (
    KINDS,
    Floats,
    Ints,
    every_plan,
    quadratic_optima,
    quadratic_optimum,
    random_curve,
    random_lane,
)
from slipstream.costs import Curve, Line, Minimum, Table
from slipstream.plan.fewest import ROUNDING, fewest
from slipstream.plan.lane import Lane
from slipstream.plan.mgwfbp import Variant, mgwfbp
from slipstream.plan.optimal import optimal

Case = tuple[Lane, Floats, Ints]
EXACT = 1e-12


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """2,000 problems of up to 12 tensors with the outcome of every plan."""
    rng = np.random.default_rng(3)
    lanes = [random_lane(KINDS[i % len(KINDS)], rng, with_others=i % 4 == 3) for i in range(2000)]
    return [(lane, *every_plan(lane)) for lane in lanes]


def check_cuts(lane: Lane, cuts: list[int]) -> None:
    assert cuts == sorted(set(cuts)) and cuts[-1] == len(lane)
    for start, stop in zip([0, *cuts], cuts, strict=False):
        within = lane.max_bytes is None or lane.sums[stop] - lane.sums[start] <= lane.max_bytes
        assert within or stop - start == 1, "only a single tensor may exceed the limit"


def test_no_plan_ends_earlier_than_the_optimum(cases: list[Case]) -> None:
    for lane, ends, _ in cases:
        best = optimal(lane)
        check_cuts(lane, best.cuts)
        assert best.end_seconds == lane.end_seconds(best.cuts)
        assert best.end_seconds == pytest.approx(ends.min(), rel=EXACT, abs=1e-300), lane


@pytest.mark.parametrize("tolerance", [0.0, 0.005, 0.3])
def test_no_plan_in_time_has_fewer_buckets(cases: list[Case], tolerance: float) -> None:
    for lane, ends, counts in cases:
        best = optimal(lane)
        limit = best.end_seconds * (1 + tolerance)
        cuts = fewest(lane, best, limit)
        check_cuts(lane, cuts)
        assert lane.end_seconds(cuts) <= limit * (1 + 2 * ROUNDING)
        assert len(cuts) == counts[ends <= limit * (1 + ROUNDING)].min(), lane


@pytest.mark.parametrize("num_lines", [1, 2, 3])
def test_lines_agree_with_the_full_recurrence(num_lines: int) -> None:
    """18,000 problems of up to 60 tensors."""
    rng = np.random.default_rng(num_lines)
    for n in rng.integers(1, 60, 60):
        ready = np.cumsum(rng.exponential(1.0, (100, n)) * rng.choice([0, 1, 3], (100, n)), axis=1)
        sizes = rng.integers(0, 1000, (100, n)) * rng.choice([0, 1, 50], (100, n))
        sums = np.concatenate([np.zeros((100, 1)), np.cumsum(sizes, axis=1)], axis=1)
        a = rng.exponential(rng.choice([0.1, 3, 30]), (100, num_lines))
        b = rng.exponential(1e-3, (100, num_lines))
        wanted = quadratic_optima(ready, sums, a, b)
        for i in range(100):
            lines = tuple(map(Line, a[i].tolist(), b[i].tolist()))
            curve = lines[0] if num_lines == 1 else Minimum(lines)
            lane = Lane(ready[i].tolist(), sizes[i].tolist(), curve)
            assert optimal(lane).end_seconds == pytest.approx(wanted[i], rel=EXACT)


def test_tables_agree_with_the_full_recurrence() -> None:
    """2,000 problems of up to 40 tensors, half of them with tables that sometimes decrease."""
    rng = np.random.default_rng(7)
    for i in range(2000):
        lane = random_lane(KINDS[2 + i % 3], rng, most=40)
        lane = Lane(lane.ready_seconds, lane.num_bytes, lane.curve)
        wanted = quadratic_optimum(np.array(lane.ready_seconds), lane.sums_array, lane.curve)
        assert optimal(lane).end_seconds == pytest.approx(wanted, rel=EXACT, abs=1e-300)


@pytest.mark.parametrize("kind", KINDS)
def test_never_above_mgwfbp(kind: str) -> None:
    rng = np.random.default_rng(11)
    worse = 0
    for _ in range(300):
        lane = random_lane(kind, rng, most=60)
        lane = Lane(lane.ready_seconds, lane.num_bytes, lane.curve)
        end = optimal(lane).end_seconds
        for variant in get_args(Variant):
            a = float(rng.exponential())
            greedy = mgwfbp(lane.ready_seconds, lane.sums, lane.curve, a, variant)
            assert end <= lane.end_seconds(greedy) * (1 + EXACT)
            worse += end < lane.end_seconds(greedy) * (1 - 1e-3)
    assert worse > 30, "and often below it"


@pytest.mark.parametrize(
    ("n", "end", "buckets"),
    [(10, 13.9, 4), (50, 55.4, 9), (200, 199.9, 18), (1000, 943.4, 40)],
)
@pytest.mark.parametrize("kind", ["line", "lines", "table"])
def test_golden_ends(n: int, end: float, buckets: int, kind: str) -> None:
    """a = 1, b = 1, every gap and size 0.9: published ends; here with the fewest buckets."""
    line = Line(1.0, 0.1)  # per byte, with tensors of 9 bytes
    far = (1e5, 1.0 + 1e4)
    table = Table(((0.0, 1.0), far))
    curves: dict[str, Curve] = {"line": line, "lines": Minimum((line, Line(2.0, 0.2)))}
    lane = Lane([0.9 * (j + 1) for j in range(n)], [9] * n, curves.get(kind, table))
    best = optimal(lane)
    assert best.end_seconds == pytest.approx(end, rel=EXACT)
    assert len(fewest(lane, best, best.end_seconds)) == buckets
    assert lane.end_seconds([n]) == pytest.approx({10: 19, 50: 91, 200: 361, 1000: 1801}[n])


small = st.integers(0, 4)
gaps_and_sizes = st.lists(st.tuples(small, small), min_size=1, max_size=7)


@given(gaps_and_sizes, st.lists(st.tuples(small, small), min_size=1, max_size=2))
def test_ties_and_zeros(steps: list[tuple[int, int]], costs: list[tuple[int, int]]) -> None:
    """Small integers meet exactly: equal ready times, empty tensors, costs of nothing."""
    lines = tuple(Line(float(a), float(b)) for a, b in costs)
    curve = lines[0] if len(lines) == 1 else Minimum(lines)
    ready = np.cumsum([float(gap) for gap, _ in steps]).tolist()
    lane = Lane(ready, [size for _, size in steps], curve)
    ends, counts = every_plan(lane)
    best = optimal(lane)
    assert best.end_seconds == ends.min()
    assert len(fewest(lane, best, best.end_seconds)) == counts[ends == ends.min()].min()


def test_without_tensors_there_is_nothing_to_cut() -> None:
    lane = Lane([], [], Line(1.0, 1.0))
    best = optimal(lane)
    assert (best.end_seconds, best.cuts, fewest(lane, best, 1.0)) == (0.0, [], [])


@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_below_the_optimum_counts_as_the_optimum(kind: str) -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        lane = random_lane(kind, rng)
        best = optimal(lane)
        assert fewest(lane, best, 0.0) == fewest(lane, best, best.end_seconds)


def test_large_problems_keep_to_their_limit_too() -> None:
    """Where enumeration cannot follow: fewer buckets with more time, never late, never more."""
    rng = np.random.default_rng(9)
    for kind in KINDS:
        n = 400
        ready = np.cumsum(rng.exponential(1.0, n)).tolist()
        lane = Lane(ready, rng.integers(0, 7, n).tolist(), random_curve(kind, rng))
        best = optimal(lane)
        before = len(best.cuts)
        for tolerance in (0.0, 0.005, 0.05, 0.5):
            cuts = fewest(lane, best, best.end_seconds * (1 + tolerance))
            assert lane.end_seconds(cuts) <= best.end_seconds * (1 + tolerance + 2 * ROUNDING)
            assert len(cuts) <= before
            before = len(cuts)
