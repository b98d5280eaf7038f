"""The planning problem: one lane of tensors on one channel.

Tensors 1..n become ready in order, r_1 <= ... <= r_n. A plan cuts them into consecutive buckets,
which the channel carries one after the other: the bucket (i, j] holds tensors i+1..j and

    start = max(end of the bucket before it, r_j)        end = start + T(S_j - S_i)

with S the running sum of bytes. Starting later never helps, so the end of the bucket before is all
that matters of what came before: that is what makes exact planning cheap.

Buckets of other dtypes share the channel. Each stands at a fixed place in the launch order: after
every bucket that ends within the first `after` tensors, before every bucket that goes beyond them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from slipstream.costs import Curve
from slipstream.costs.curves import Floats

Cuts = list[int]
"""Where buckets end: increasing numbers of tensors, the last of them n."""


@dataclass(frozen=True)
class Other:
    """A bucket of another lane: its place, when it is ready, how long it takes (seconds)."""

    after: int
    ready_seconds: float
    seconds: float


@dataclass(frozen=True)
class Lane:
    """Tensors of one dtype, in the order in which they become ready; see the module's text.

    ready_seconds: not decreasing; num_bytes: of each tensor, as they are charged by `curve`;
    max_bytes: limit of a bucket, unless a single tensor exceeds it; others: ordered by `after`.
    """

    ready_seconds: Sequence[float]
    num_bytes: Sequence[int]
    curve: Curve
    max_bytes: int | None = None
    others: tuple[Other, ...] = ()

    def __len__(self) -> int:
        return len(self.num_bytes)

    @cached_property
    def sums(self) -> list[int]:
        """S_0 .. S_n: the bytes of the first i tensors, exactly."""
        return list(accumulate(self.num_bytes, initial=0))

    @cached_property
    def sums_array(self) -> Floats:
        """The same as float64, exact below 2**53 bytes."""
        return np.array(self.sums, np.float64)

    @cached_property
    def first_cut(self) -> list[int]:
        """For each j the least i for which the bucket (i, j] keeps to `max_bytes`."""
        if self.max_bytes is None:
            return [0] * (len(self) + 1)
        first, sums = [0], self.sums
        for j in range(1, len(self) + 1):
            i = first[-1]
            while i < j - 1 and sums[j] - sums[i] > self.max_bytes:
                i += 1
            first.append(i)
        return first

    def seconds(self, start: int, stop: int) -> float:
        """What the bucket (start, stop] takes."""
        return self.curve.seconds(self.sums[stop] - self.sums[start])

    def end_seconds(self, cuts: Sequence[int]) -> float:
        """When the channel has carried everything, by going through it bucket by bucket."""
        free, start, pending = 0.0, 0, list(self.others[::-1])
        for cut in cuts:
            while pending and pending[-1].after < cut:
                other = pending.pop()
                free = max(free, other.ready_seconds) + other.seconds
            free = max(free, self.ready_seconds[cut - 1]) + self.seconds(start, cut)
            start = cut
        for other in reversed(pending):
            free = max(free, other.ready_seconds) + other.seconds
        return free

    def passage(self, lo: int, j: int) -> tuple[Floats | float, Floats | float]:
        """What the buckets of other lanes do between the cut i and the bucket (i, j], lo <= i < j.

        Returns (busy, base), numbers where no other bucket is concerned, else arrays over i: the
        bucket (i, j] starts at max(end at cut i + busy, base).
        """
        ready = self.ready_seconds[j - 1]
        concerned = [other for other in self.others if lo <= other.after < j]
        if not concerned:
            return 0.0, ready
        busy, base, total = np.zeros(j - lo), np.full(j - lo, ready), 0.0
        for other in reversed(concerned):
            before = slice(0, other.after - lo + 1)
            done = other.ready_seconds + other.seconds + total
            base[before] = np.maximum(base[before], done)
            total += other.seconds
            busy[before] = total
        return busy, base


@dataclass(frozen=True)
class Best:
    """What the exact planners find.

    end_seconds: when the channel is done at the earliest; cuts: a plan that achieves it;
    earliest: for each j the earliest end of a plan for the first j tensors (other lanes' buckets
    behind cut j not yet carried); back: the cut before j in such a plan.
    """

    end_seconds: float
    cuts: Cuts
    earliest: list[float]
    back: list[int]


def cuts_from(back: Callable[[int], int], n: int) -> Cuts:
    """The cuts of the plan that ends at n, followed backwards."""
    cuts = []
    while n > 0:
        cuts.append(n)
        n = back(n)
    return cuts[::-1]
