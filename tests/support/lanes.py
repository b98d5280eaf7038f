"""Planning problems at random, and slow ways to solve them that leave no room for cleverness."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.costs import Curve, Line, Minimum, Table
from slipstream.plan.lane import Lane, Other

KINDS = ("line", "lines", "increasing table", "any table", "table and line")
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def random_curve(kind: str, rng: np.random.Generator) -> Curve:
    """A curve for buckets of 0 to some 60 bytes, with zero costs and flat parts among them."""
    if kind == "line":
        return Line(_amount(rng), _amount(rng) * rng.choice([0.1, 1.0]))
    if kind == "lines":
        return Minimum(tuple(Line(_amount(rng), _amount(rng)) for _ in range(rng.integers(2, 5))))
    count = int(rng.integers(1, 7))
    sizes = np.cumsum(rng.integers(1, 9, count))
    times = rng.exponential(1.5, count) * rng.choice([0.0, 1.0], count, p=[0.1, 0.9])
    if kind == "increasing table":
        times = np.cumsum(times)
    table = Table(tuple((int(x), float(y)) for x, y in zip(sizes, times, strict=True)))
    return table if kind != "table and line" else Minimum((table, Line(1.0, 0.3)))


def random_lane(
    kind: str, rng: np.random.Generator, most: int = 12, with_others: bool = False
) -> Lane:
    """1 to `most` tensors, some of no bytes, some ready at once; limits on bytes now and then."""
    n = int(rng.integers(1, most + 1))
    gaps = rng.exponential(1.0, n) * rng.choice([0.0, 0.5, 2.0], n)
    ready = [float(at) for at in np.cumsum(gaps)]
    return Lane(
        ready_seconds=ready,
        num_bytes=[int(size) for size in rng.integers(0, 7, n)],
        curve=random_curve(kind, rng),
        max_bytes=int(rng.integers(1, 15)) if rng.random() < 0.3 else None,
        others=random_others(ready, rng) if with_others else (),
    )


def random_others(ready: Sequence[float], rng: np.random.Generator) -> tuple[Other, ...]:
    """Up to three buckets of other lanes, each ready between the tensors around its place."""
    others, before = [], 0.0
    for after in sorted(int(place) for place in rng.integers(0, len(ready) + 1, rng.integers(4))):
        low = ready[after - 1] if after else 0.0
        high = ready[after] if after < len(ready) else low + 1.0
        before = max(before, float(rng.uniform(low, high)))
        others.append(Other(after, before, float(rng.exponential())))
    return tuple(others)


def every_plan(lane: Lane) -> tuple[Floats, Ints]:
    """The end of every one of the 2^(n-1) plans (infinite beyond a limit), and its buckets.

    Goes through the tensors once, for all plans side by side; bit j-1 of a plan's number says that
    a bucket ends with tensor j.
    """
    n, sums = len(lane), np.array(lane.sums, np.float64)
    plans = np.arange(2 ** (n - 1))
    free, start = np.zeros(len(plans)), np.zeros(len(plans), np.int64)
    counts, carried = np.zeros(len(plans), np.int64), np.zeros(len(plans), np.int64)
    allowed = np.ones(len(plans), bool)
    for j in range(1, n + 1):
        ends_here = (plans >> (j - 1)) & 1 == 1 if j < n else np.ones(len(plans), bool)
        for index, other in enumerate(lane.others):
            goes = ends_here & (carried == index) & (other.after < j)
            free = np.where(goes, np.maximum(free, other.ready_seconds) + other.seconds, free)
            carried += goes
        sizes = sums[j] - sums[start]
        if lane.max_bytes is not None:
            allowed &= ~(ends_here & (sizes > lane.max_bytes) & (j - start > 1))
        ends = np.maximum(free, lane.ready_seconds[j - 1]) + lane.curve.seconds_of(sizes)
        free, start = np.where(ends_here, ends, free), np.where(ends_here, j, start)
        counts += ends_here
    for index, other in enumerate(lane.others):
        goes = carried <= index
        free = np.where(goes, np.maximum(free, other.ready_seconds) + other.seconds, free)
    return np.where(allowed, free, np.inf), counts


def quadratic_optimum(ready: Floats, sums: Floats, seconds_of: Curve) -> float:
    """The recurrence as it stands in the books, every candidate tried, for one problem.

    ready: [n]; sums: [n + 1].
    """
    ends = np.zeros(len(ready) + 1)
    for j in range(1, len(ready) + 1):
        takes = seconds_of.seconds_of(sums[j] - sums[:j])
        ends[j] = (np.maximum(ends[:j], ready[j - 1]) + takes).min()
    return float(ends[-1])


def quadratic_optima(ready: Floats, sums: Floats, a: Floats, b: Floats) -> Floats:
    """The same for many problems of one length at once, with the least of A lines each.

    ready: [problems, n]; sums: [problems, n + 1]; a, b: [problems, A]. Returns [problems].
    """
    ends = np.zeros_like(sums)
    for j in range(1, ready.shape[1] + 1):
        sizes = sums[:, j : j + 1] - sums[:, :j]
        takes = (a[:, :, None] + b[:, :, None] * sizes[:, None, :]).min(axis=1)
        ends[:, j] = (np.maximum(ends[:, :j], ready[:, j - 1 : j]) + takes).min(axis=1)
    return ends[:, -1]


def _amount(rng: np.random.Generator) -> float:
    return float(rng.exponential()) if rng.random() < 0.8 else 0.0
