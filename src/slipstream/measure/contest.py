"""Rival ways to do one thing, timed alternately within a budget that all ranks keep alike.

First a look: every way twice on every size, from the smallest size up. Where time runs short, ways
that take far longer than the best are given up first, then the larger sizes. Then rounds as in
`timing.py`, from the largest size down, over the ways that came close to the best of a size. What
did not come close keeps the longer of its two looks, so that it cannot win by a lucky one.

Decisions follow from numbers that every rank has, so all ranks make the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.measure.timing import FLOAT_BYTES, MIN_ROUNDS, Bench, Budget, Operation
from slipstream.words import size as size_words

CLOSE = 1.5
"""What takes up to so many times what the best takes at a size may turn out the best there."""
FAR = 2.0
"""What takes longer than so many times the best at a size is given up before a size is."""
_LOOKS = 2

_Entry = tuple[int, int]  # which way, and which size in bytes


class Contest:
    """Several operations on the same sizes, measured within `seconds` on rank 0's clock.

    operations: each mutates a flat float32 tensor on `bench.device`. sizes: bytes, increasing
    multiples of 4.
    """

    def __init__(
        self, operations: Sequence[Operation], bench: Bench, sizes: Sequence[int], seconds: float
    ) -> None:
        self._operations = operations
        self._bench = bench
        self._sizes = sizes
        self._budget = Budget(bench, seconds)
        self._looks: list[dict[int, list[float]]] = [{} for _ in operations]

    def run(self) -> list[dict[int, list[float]]]:
        """For each operation: for each size that it reached, smallest first, what it took.

        All reach the smallest size. Raises RankFailure when a rank does not come.
        """
        elapsed = self._look()
        close = self._close()
        found = [{size: [max(times)] for size, times in looks.items()} for looks in self._looks]
        for entry in close:
            found[entry[0]][entry[1]] = []
        flat = self._bench.tensor(max(size for _, size in close))
        estimates = {(way, size): min(self._looks[way][size]) for way, size in close}
        repetitions = self._budget.repetitions(estimates, elapsed)
        self._budget.rounds(elapsed, lambda: self._round(flat, repetitions, found))
        return found

    def _look(self) -> float:
        """Every way on each size, as far as the budget reaches; returns the seconds passed."""
        ways, elapsed = list(range(len(self._operations))), 0.0
        for size in self._sizes:
            if self._looks[0]:
                ways = self._affordable(ways, size, self._budget.seconds - elapsed)
            if not ways:
                break
            self._bench.tell(f"first look at {size_words(size)} by {len(ways)} ways")
            flat = self._bench.tensor(size)
            mine = [self._times(way, flat, _LOOKS) for way in ways]
            shared, elapsed = self._budget.shared(mine)
            for way, times in zip(ways, shared, strict=True):
                self._looks[way][size] = times
        return elapsed

    def _affordable(self, ways: list[int], size: int, left_seconds: float) -> list[int]:
        """Those to look at on one more size; none where even those near the best take too long."""
        expected = {way: self._expected(way, size) for way in ways}
        close = {way for way, at in self._close() if at == max(self._looks[way])}
        so_far = sum(min(self._looks[way][at]) for way, at in self._close())
        last = {way: min(self._looks[way][max(self._looks[way])]) for way in ways}
        best = min(last.values())
        kept = sorted(ways, key=last.__getitem__)
        while True:
            look = _LOOKS * sum(expected[way] for way in kept)
            more = [expected[way] for way in kept if way in close]
            if look + MIN_ROUNDS * (so_far + sum(more) + max(more)) <= left_seconds:
                return sorted(kept)
            if last[kept[-1]] <= FAR * best:
                return []
            kept.pop()

    def _expected(self, way: int, size: int) -> float:
        """By the line through the last two sizes, of which the first is taken for startup alone."""
        looks = self._looks[way]
        *_, before, last = (0, *looks)
        rise = max(0.0, min(looks[last]) - min(looks[before])) if before else 0.0
        return min(looks[last]) + rise * (size - last) / (last - before)

    def _close(self) -> list[_Entry]:
        """Each way on each size at which it may turn out the best."""
        best: dict[int, float] = {}
        for looks in self._looks:
            for size, times in looks.items():
                best[size] = min(best.get(size, times[0]), *times)
        return [
            (way, size)
            for way, looks in enumerate(self._looks)
            for size, times in looks.items()
            if min(times) <= CLOSE * best[size]
        ]

    def _round(
        self,
        flat: torch.Tensor,
        repetitions: dict[_Entry, int],
        found: list[dict[int, list[float]]],
    ) -> float:
        """Every entry without a pause; returns the seconds that have passed by its end."""
        entries = sorted(repetitions, key=lambda entry: (-entry[1], entry[0]))
        self._times(entries[0][0], flat, 1)  # drains the links' token buckets
        mine = [
            self._times(way, flat[: size // FLOAT_BYTES], repetitions[way, size])
            for way, size in entries
        ]
        shared, elapsed = self._budget.shared(mine)
        for (way, size), times in zip(entries, shared, strict=True):
            found[way][size] += times
        return elapsed

    def _times(self, way: int, flat: torch.Tensor, repetitions: int) -> list[float]:
        doing = f"measuring {size_words(flat.numel() * FLOAT_BYTES)}"
        return self._bench.seconds(lambda: self._operations[way](flat), repetitions, doing)
