"""The exact optimum: the plan after which the channel is done at the earliest.

    F[0] = 0        F[j] = min over i < j of  max(F[i], r_j) + T(S_j - S_i)

(`lane.py` says what the letters mean.) All three ways below compute this minimum and differ in the
candidates i that they look at.

A line, T = a + b M, in O(n). F and G[i] = F[i] - b S_i do not decrease: dropping the last tensor
from a plan's last bucket ends it at least b s earlier. Let k be the largest i with F[i] <= r_j.
Among i <= k the value is r_j + T(S_j - S_i), least at k; among i > k it is G[i] + a + b S_j, least
at k+1. Two candidates are enough.

The least of A lines, in O(A n). F does not decrease, as T does not, so k is as good as any i <= k.
Beyond k each line has its own G, which need not be monotone; a queue per line holds the candidates
that can still become its least.

Any curve, in O(n w). Where T does not decrease, k is as good as any i <= k and the w tensors by
which the channel lags behind the backward are looked at; where it does, all are.

Buckets of other lanes turn F[i] into max(F[i], q) + c for all cuts before them. F still does not
decrease, but G may, so a line takes the second way then. A limit on bytes bounds i from below.

MG-WFBP's rule ("MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms",
INFOCOM'19) merges greedily under the same model and can end almost twice as late.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

import numpy as np

from slipstream.costs import Line, Minimum
from slipstream.plan.lane import Best, Lane, Other, cuts_from


def optimal(lane: Lane) -> Best:
    """The plan that ends at the earliest, in seconds after the start of backward.

    Ties go to the candidate with the larger last bucket. The end is that of the plan in floating
    point, least up to rounding.
    """
    if len(lane) == 0:
        return Best(lane.end_seconds([]), [], [0.0], [0])
    curves = lane.curve.curves if isinstance(lane.curve, Minimum) else (lane.curve,)
    lines = [curve for curve in curves if isinstance(curve, Line)]
    if isinstance(lane.curve, Line) and not lane.others:
        earliest, back = _by_line(lane, lane.curve)
    elif len(lines) == len(curves):
        earliest, back = _by_lines(lane, lines)
    else:
        earliest, back = _by_scan(lane)
    cuts = cuts_from(back.__getitem__, len(lane))
    return Best(lane.end_seconds(cuts), cuts, earliest, back)


def _by_line(lane: Lane, line: Line) -> tuple[list[float], list[int]]:
    startup, per_byte = line.startup_seconds, line.seconds_per_byte
    sums, first, ends, back = lane.sums, lane.first_cut, [0.0], [0]
    for j, ready in enumerate(lane.ready_seconds, 1):
        total = sums[j]
        best = bisect_right(ends, ready) - 1
        if best < first[j]:
            best = first[j]
        end = max(ends[best], ready) + (startup + per_byte * (total - sums[best]))
        after = best + 1
        if after < j:
            other_end = max(ends[after], ready) + (startup + per_byte * (total - sums[after]))
            if other_end < end:
                best, end = after, other_end
        ends.append(end)
        back.append(best)
    return ends, back


def _delayed(free: list[float], other: Other) -> list[float]:
    """When the channel is free behind each cut, once another lane's bucket has been carried."""
    ready, seconds = other.ready_seconds, other.seconds
    return [(end if end > ready else ready) + seconds for end in free]


class _Queue:
    """For one line, the cuts i that can become the least F[i] - b S_i as earlier ones drop out."""

    def __init__(self, per_byte: float) -> None:
        self._per_byte = per_byte
        self._held: deque[tuple[int, float]] = deque()

    def add(self, cut: int, free: float, sums: int) -> None:
        value = free - self._per_byte * sums
        while self._held and self._held[-1][1] > value:
            self._held.pop()
        self._held.append((cut, value))

    def least_beyond(self, cut: int) -> int | None:
        while self._held and self._held[0][0] <= cut:
            self._held.popleft()
        return self._held[0][0] if self._held else None

    def restart(self, free: list[float], sums: list[int]) -> None:
        self._held.clear()
        for cut, end in enumerate(free):
            self.add(cut, end, sums[cut])


def _by_lines(lane: Lane, lines: list[Line]) -> tuple[list[float], list[int]]:
    curve, sums, first = lane.curve, lane.sums, lane.first_cut
    queues = [_Queue(line.seconds_per_byte) for line in lines]
    pending = list(lane.others[::-1])
    free, earliest, back = [0.0], [0.0], [0]
    for queue in queues:
        queue.restart(free, sums)
    for j, ready in enumerate(lane.ready_seconds, 1):
        while pending and pending[-1].after < j:
            free = _delayed(free, pending.pop())
            for queue in queues:
                queue.restart(free, sums)
        nearest = max(bisect_right(free, ready) - 1, first[j])
        candidates = {nearest, *(queue.least_beyond(nearest) for queue in queues)}
        end, best = min(
            (max(free[i], ready) + curve.seconds(sums[j] - sums[i]), i)
            for i in candidates
            if i is not None
        )
        free.append(end)
        earliest.append(end)
        back.append(best)
        for queue in queues:
            queue.add(j, end, sums[j])
    return earliest, back


def _by_scan(lane: Lane) -> tuple[list[float], list[int]]:
    curve, sums, first, n = lane.curve, lane.sums_array, lane.first_cut, len(lane)
    monotone = curve.is_monotone
    pending = list(lane.others[::-1])
    free, earliest, back = np.zeros(n + 1), [0.0], [0]
    for j, ready in enumerate(lane.ready_seconds, 1):
        while pending and pending[-1].after < j:
            other = pending.pop()
            free[:j] = np.maximum(free[:j], other.ready_seconds) + other.seconds
        low = first[j]
        if monotone:
            low = max(low, int(free[:j].searchsorted(ready, side="right")) - 1)
        ends = np.maximum(free[low:j], ready) + curve.seconds_of(sums[j] - sums[low:j])
        at = int(ends.argmin())
        free[j] = ends[at]
        earliest.append(float(ends[at]))
        back.append(low + at)
    return earliest, back
