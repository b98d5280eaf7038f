"""The fewest buckets that still end in time: what buys nothing is left out.

Every bucket is one more startup that the network may stretch, so among plans that end within a
tolerance of the optimum the one with the fewest buckets is the most robust. Found exactly:

A line: take the last bucket as large as its deadline allows, subtract its time from the deadline,
go on with the tensors before it. That is optimal, for where a plan reaches cut i' in time, dropping
the tensors behind an earlier cut i from it frees at least the b (S_i' - S_i) that the larger last
bucket costs: the smaller problem is feasible with as many buckets.

Any other curve: that plan is only an upper bound. The end time per count and tensor,

    D[c][j] = min over i < j of  max(D[c-1][i], r_j) + T(S_j - S_i)

tells whether fewer suffice. What cannot be part of a plan that ends in time is left out: ends later
than the latest from which the rest can still be carried, and counts above those of the earliest
end, which nothing can improve.

Memory goes with counts times tensors. Time goes with the square of the tensors for a table that
falls somewhere, as measured ones do: 0.1 s for 1,000, 0.3 s for 2,000, 3 s for 8,000 on one core.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from slipstream.costs import Line
from slipstream.costs.curves import Floats
from slipstream.plan.lane import Best, Cuts, Lane, cuts_from

ROUNDING = 1e-12
"""Ends this close to one another, relatively, count as the same."""


def fewest(lane: Lane, best: Best, limit_seconds: float) -> Cuts:
    """A plan with the fewest buckets that ends by `limit_seconds`, from `optimal(lane)`.

    Among plans with as few buckets: not specified which, but always the same one. A limit below
    the optimum counts as the optimum.
    """
    if len(lane) == 0:
        return []
    deadline = max(limit_seconds, best.end_seconds) * (1 + ROUNDING)
    for other in lane.others:
        if other.after == len(lane):
            deadline -= other.seconds
    enough = _as_late_as_possible(lane, best, deadline)
    if isinstance(lane.curve, Line) or len(enough) == 1:
        return enough
    return _fewer(lane, best, deadline, len(enough) - 1) or enough


def _as_late_as_possible(lane: Lane, best: Best, deadline: float) -> Cuts:
    """From the last bucket backwards, each as large as its deadline allows."""
    others = [other for other in lane.others if other.after < len(lane)]
    monotone, cuts, j = lane.curve.is_monotone, [], len(lane)
    while j > 0:
        cuts.append(j)
        cut, cut_deadline, cut_others = best.back[j], best.earliest[best.back[j]], None
        base, busy, position = lane.ready_seconds[j - 1], 0.0, len(others)
        for i in range(j - 1, lane.first_cut[j] - 1, -1):
            while position and others[position - 1].after >= i:
                position -= 1
                other = others[position]
                base = max(base, other.ready_seconds + other.seconds + busy)
                busy += other.seconds
            seconds = lane.seconds(i, j)
            if base + seconds > deadline:
                if monotone:
                    break
            elif best.earliest[i] + busy + seconds <= deadline:
                cut, cut_deadline, cut_others = i, deadline - seconds - busy, position
        if cut_others is None:
            cut_others = bisect_left([other.after for other in others], cut)
        j, deadline = cut, cut_deadline
        del others[cut_others:]
    return cuts[::-1]


def _fewer(lane: Lane, best: Best, deadline: float, most: int) -> Cuts | None:
    """A plan of at most `most` buckets, as few as possible, or None where there is none."""
    n, never = len(lane), most + 1
    latest, lowest_cut = _latest(lane, best, deadline)
    buckets_of_best = [0]
    for j in range(1, n + 1):
        buckets_of_best.append(buckets_of_best[best.back[j]] + 1)
    ends = np.full((most + 1, n + 1), np.inf)
    back = np.zeros((most + 1, n + 1), np.int32)
    fewest_to = np.full(n + 1, never)
    ends[0, 0], fewest_to[0] = 0.0, 0
    for j in range(1, n + 1):
        low = lowest_cut[j]
        if low == j:
            continue
        fewest_here = 1 + int(fewest_to[low:j].min())
        most_here = min(most, buckets_of_best[j])
        if fewest_here > most_here:
            continue
        busy, base = lane.passage(low, j)
        seconds = _row(lane, low, j)
        table = np.maximum(ends[fewest_here - 1 : most_here, low:j] + busy, base) + seconds
        at = table.argmin(axis=1)
        here = table[np.arange(len(at)), at]
        here[here > latest[j]] = np.inf
        ends[fewest_here : most_here + 1, j] = here
        back[fewest_here : most_here + 1, j] = low + at
        reached = np.flatnonzero(np.isfinite(here))
        if len(reached):
            fewest_to[j] = fewest_here + int(reached[0])
    count = int(fewest_to[n])
    if count == never:
        return None
    counts = iter(range(count, 0, -1))
    return cuts_from(lambda j: int(back[next(counts), j]), n)


def _latest(lane: Lane, best: Best, deadline: float) -> tuple[Floats, list[int]]:
    """For each cut the latest end from which the rest can be carried by the deadline.

    And for each j the least i of a bucket (i, j] that can be part of such a plan; j for none.
    """
    n = len(lane)
    latest, lowest_cut = np.full(n + 1, -np.inf), [0] * (n + 1)
    latest[n] = deadline
    earliest = np.array(best.earliest)
    for j in range(n, 0, -1):
        lowest_cut[j] = j
        if earliest[j] > latest[j]:
            continue
        low = _first_in_time(lane, j, latest[j])
        busy, base = lane.passage(low, j)
        room = latest[j] - _row(lane, low, j)
        start_by = np.where(room >= base, room - busy, -np.inf)
        np.maximum(latest[low:j], start_by, out=latest[low:j])
        useful = np.flatnonzero(start_by >= earliest[low:j])
        if len(useful):
            lowest_cut[j] = low + int(useful[0])
    return latest, lowest_cut


def _first_in_time(lane: Lane, j: int, latest: float) -> int:
    """The least i for which the bucket (i, j] can end by `latest`, or one below it."""
    low = lane.first_cut[j]
    if not lane.curve.is_monotone or j - low < 128:
        return low
    room = latest - lane.ready_seconds[j - 1]
    return bisect_left(range(j - 1), True, low, key=lambda i: lane.seconds(i, j) <= room)


def _row(lane: Lane, low: int, j: int) -> Floats:
    """T of the buckets (i, j] for low <= i < j."""
    return lane.curve.seconds_of(lane.sums_array[j] - lane.sums_array[low:j])
