"""Timing one operation between ranks for many sizes, within a budget that all ranks keep alike.

First each size once, from the smallest up, as far as the budget reaches. Then rounds over all of
them, from the largest down and without a pause: a link's token bucket, which would make the first
messages after a pause look fast, is empty by then. What a repetition took is what its slowest rank
took. Decisions follow from numbers that every rank has, so all ranks make the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from slipstream.comm.peers import Peers
from slipstream.words import size as size_words

Operation = Callable[[torch.Tensor], None]
FLOAT_BYTES = 4
MIN_ROUNDS = 3
MAX_ROUNDS = 12
_MAX_REPETITIONS = 10  # of one thing in one round

Entry = TypeVar("Entry", bound=Hashable)
"""What is measured in a round: a size, or a way on a size."""


@dataclass(frozen=True)
class Bench:
    """What a measurement is made with, the same on every rank.

    peers: the ranks; device: where tensors live; clock: seconds from any fixed point on; tell:
    takes sentences about the progress.
    """

    peers: Peers
    device: torch.device
    clock: Callable[[], float] = time.perf_counter
    tell: Callable[[str], None] = lambda _: None

    def settle(self) -> None:
        """Returns when the device has done what was enqueued on it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object], repetitions: int, doing: str) -> list[float]:
        """What each repetition took on this rank, one right after the other.

        Raises RankFailure, which says `doing`, when a rank does not come.
        """
        times = []
        try:
            self.settle()
            for _ in range(repetitions):
                started = self.clock()
                run()
                self.settle()
                times.append(self.clock() - started)
        except RuntimeError as error:
            raise self.peers.failure(error, doing) from error
        return times

    def tensor(self, num_bytes: int) -> torch.Tensor:
        """Float32 zeros of so many bytes, a multiple of 4."""
        return torch.zeros(num_bytes // FLOAT_BYTES, dtype=torch.float32, device=self.device)


class Budget:
    """`seconds` from now on, on rank 0's clock, which all ranks keep alike."""

    def __init__(self, bench: Bench, seconds: float) -> None:
        self.seconds = seconds
        self._bench = bench
        self._started = bench.clock()

    def shared(self, mine: list[list[float]]) -> tuple[list[list[float]], float]:
        """Each repetition's seconds on its slowest rank; and what has passed of the budget."""
        message = {"times": mine, "elapsed": self._bench.clock() - self._started}
        everyone = self._bench.peers.gather(message, "comparing measurements")
        slowest = [
            [max(repetition) for repetition in zip(*ranks, strict=True)]
            for ranks in zip(*(other["times"] for other in everyone), strict=True)
        ]
        return slowest, float(everyone[0]["elapsed"])

    def repetitions(self, estimates: Mapping[Entry, float], elapsed: float) -> dict[Entry, int]:
        """How often each runs in a round: once, and up to 10 times where time is left."""
        once = sum(estimates.values()) + max(estimates.values())
        spare = ((self.seconds - elapsed) / MIN_ROUNDS - once) / len(estimates)
        most = _MAX_REPETITIONS - 1
        return {
            entry: 1 + (max(0, int(spare / seconds)) if spare < most * seconds else most)
            for entry, seconds in estimates.items()
        }

    def rounds(self, elapsed: float, run_round: Callable[[], float]) -> None:
        """Runs rounds while another one fits, each of which returns what has passed by its end."""
        for number in range(1, MAX_ROUNDS + 1):
            self._bench.tell(f"round {number} of at most {MAX_ROUNDS}")
            before = elapsed
            elapsed = run_round()
            if number >= MIN_ROUNDS and elapsed + (elapsed - before) > self.seconds:
                return


class Sweep:
    """The sizes of one operation, measured within `seconds` on rank 0's clock.

    operation: mutates a flat float32 tensor on `bench.device`. sizes: bytes, increasing multiples
    of 4.
    """

    def __init__(
        self, operation: Operation, bench: Bench, sizes: Sequence[int], seconds: float
    ) -> None:
        self._operation = operation
        self._bench = bench
        self._sizes = sizes
        self._budget = Budget(bench, seconds)

    def run(self) -> dict[int, list[float]]:
        """For each size that the budget reached, smallest first, what its repetitions took.

        The smallest size is always measured. Raises RankFailure when a rank does not come.
        """
        estimates, elapsed = self._look()
        flat = self._bench.tensor(max(estimates))
        repetitions = self._budget.repetitions(estimates, elapsed)
        found: dict[int, list[float]] = {size: [] for size in estimates}
        self._budget.rounds(elapsed, lambda: self._round(flat, repetitions, found))
        return found

    def _look(self) -> tuple[dict[int, float], float]:
        """One run of each size, as far as the budget reaches; and the seconds that passed."""
        estimates: dict[int, float] = {}
        elapsed = 0.0
        for size in self._sizes:
            if estimates and elapsed + self._least_seconds(estimates, size) > self._budget.seconds:
                break
            self._bench.tell(f"first look at {size_words(size)}")
            times = self._times(self._bench.tensor(size), 2)[1:]  # the first one touches new memory
            shared, elapsed = self._budget.shared([times])
            estimates[size] = shared[0][0]
        return estimates, elapsed

    @staticmethod
    def _least_seconds(estimates: dict[int, float], size: int) -> float:
        """What a look at one more size and the fewest rounds would take.

        By the line through the last two sizes, of which the first is taken for mere startup: in
        proportion to its bytes, a small one would make all others look out of reach.
        """
        *_, before, last = (0, *estimates)
        rise = max(0.0, estimates[last] - estimates[before]) if before else 0.0
        expected = estimates[last] + rise * (size - last) / (last - before)
        return 2 * expected + MIN_ROUNDS * (sum(estimates.values()) + 2 * expected)

    def _round(
        self, flat: torch.Tensor, repetitions: dict[int, int], found: dict[int, list[float]]
    ) -> float:
        """Measures every size without a pause; returns the seconds that have passed by its end."""
        sizes = sorted(repetitions, reverse=True)
        self._times(flat, 1)  # drains the links' token buckets
        mine = [self._times(flat[: size // FLOAT_BYTES], repetitions[size]) for size in sizes]
        shared, elapsed = self._budget.shared(mine)
        for size, times in zip(sizes, shared, strict=True):
            found[size] += times
        return elapsed

    def _times(self, flat: torch.Tensor, repetitions: int) -> list[float]:
        doing = f"measuring {size_words(flat.numel() * FLOAT_BYTES)}"
        return self._bench.seconds(lambda: self._operation(flat), repetitions, doing)
