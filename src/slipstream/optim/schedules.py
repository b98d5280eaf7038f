"""Learning rates over time: linear warm-up, then one of three decays. Pure arithmetic, no torch.

With n updates in all, w of them in the warm-up and peak rate r, the rate of update u = 0, 1, ... is

    warm-up     r (u + 1) / w                            for u < w
    cosine      r (f + (1 - f) (1 + cos(pi p)) / 2)      p = (u - w) / (n - w), f = final fraction
    polynomial  r (f + (1 - f) (1 - p) ** power)
    step        r factor ** floor(u / updates between two drops)

An update is one optimizer step, whatever number of micro-batches it gathers; a skipped step is not
an update, so it leaves the rate where it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate as a function of the number of updates already made.

    peak: the rate after the warm-up; num_updates: the length of the whole training;
    warmup_updates: 0 = none; final_fraction: last rate / peak (cosine and polynomial);
    power: of the polynomial; step_updates, step_factor: updates between two drops, counted from the
    start of training, and what each drop multiplies the rate by (step).
    """

    kind: Literal["cosine", "step", "polynomial"]
    peak: float
    num_updates: int
    warmup_updates: int = 0
    final_fraction: float = 0.0
    power: float = 2.0
    step_updates: int = 1
    step_factor: float = 0.1

    def __post_init__(self) -> None:
        if self.num_updates < 1 or not 0 <= self.warmup_updates <= self.num_updates:
            raise ValueError(
                f"a warm-up of {self.warmup_updates} updates does not fit in {self.num_updates}"
            )
        if self.step_updates < 1:
            raise ValueError(f"step_updates is {self.step_updates}; at least 1 is needed")

    def rate(self, update: int) -> float:
        """The learning rate of update number `update`, counted from 0.

        Past the end of training it stays at its last value.
        """
        if update < 0:
            raise ValueError(f"update is {update}; updates are counted from 0")
        if update < self.warmup_updates:
            return self.peak * (update + 1) / self.warmup_updates
        if self.kind == "step":
            return self.peak * self.step_factor ** (update // self.step_updates)
        return self.peak * (self.final_fraction + (1 - self.final_fraction) * self._decay(update))

    def _decay(self, update: int) -> float:
        """What is left of the way down: 1 at the peak, 0 at the final rate."""
        decaying = max(1, self.num_updates - self.warmup_updates)
        progress = min(1.0, (update - self.warmup_updates) / decaying)
        if self.kind == "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        remaining: float = (1 - progress) ** self.power
        return remaining
