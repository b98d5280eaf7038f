"""What every selector does: k of n elements by magnitude, always exactly k, in index order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol, runtime_checkable

import torch

from slipstream.errors import PlanError

MOST_ELEMENTS = 2**31 - 1
"""Indices have 32 bits."""


@dataclass(frozen=True, slots=True)
class Selection:
    """k elements of a flat tensor.

    indices: int32 [k], ascending, each once; values: [k], the elements that stand there.
    """

    indices: torch.Tensor
    values: torch.Tensor


class Selector(Protocol):
    """Selects the k elements of largest magnitude, or nearly those.

    Every selector returns exactly k indices, so that what ranks exchange has one size. NaN counts
    as larger than infinity, and that as larger than any number: what is not finite is selected
    first, by every selector, and so is seen by all ranks. Selectors keep memory between calls and
    are for one thread at a time.
    """

    name: str

    def select(self, values: torch.Tensor, k: int, draw: int = 0) -> Selection:
        """k of `values` (float32 [n], contiguous, on the CPU; left as they are); 1 <= k <= n.

        Of no elements none can be selected: n = k = 0. draw: which random numbers to use, where a
        selector uses any (the step, say): with the same seed, draw and values the result is the
        same. Raises ValueError for tensors and k of another kind.
        """
        ...


@runtime_checkable
class Adding(Selector, Protocol):
    """A selector that adds gradient and residual in the same pass in which it selects."""

    def add_and_select(
        self, gradient: torch.Tensor, old: torch.Tensor, new: torch.Tensor, k: int
    ) -> tuple[int, torch.Tensor]:
        """Writes gradient + old to `new` (may be `old`); all float32 [n] on the CPU, 1 <= k < n.

        Stops before a chunk with a sum that is not finite, which is then left alone. Returns how
        many elements were written and, if those are all, the indices of the k selected sums.
        """
        ...


def k_of(density: float, n: int) -> int:
    """How many of n elements a density stands for: density * n rounded up, at least 1, at most n.

    The density counts as the decimal number that it is written as: 0.07 of 100 are 7, though as a
    binary number 0.07 is a little more. Of no elements none are selected. Raises PlanError unless
    0 < density <= 1, and ValueError for a negative n.
    """
    if isinstance(density, bool) or not (math.isfinite(density) and 0 < density <= 1):
        raise PlanError(
            f"A density of {density!r} cannot be used: it is the share of elements that travel, "
            "above 0 and at most 1 (0.01 is one in a hundred)."
        )
    if n < 0:
        raise ValueError(f"There cannot be {n} elements.")
    return min(n, max(1, math.ceil(Fraction(repr(float(density))) * n)))


def check(values: torch.Tensor, k: int, *, on: str = "CPU", device_type: str = "cpu") -> None:
    """Raises ValueError for what no selector takes; on: what the device is called."""
    if values.device.type != device_type or values.dtype != torch.float32:
        raise ValueError(
            f"Selection takes float32 on the {on}, not {values.dtype} on {values.device}."
        )
    if values.dim() != 1 or not values.is_contiguous():
        raise ValueError(
            f"Selection takes a flat, contiguous tensor, not one of shape {tuple(values.shape)} "
            f"and stride {values.stride()}."
        )
    n = values.numel()
    if n > MOST_ELEMENTS:
        raise ValueError(f"{n:,} elements are too many for 32-bit indices; split the tensor.")
    if not min(1, n) <= k <= n:
        raise ValueError(f"{k} of {n} elements cannot be selected.")


def everything(values: torch.Tensor) -> Selection:
    """All elements: k = n, whatever the selector."""
    return Selection(torch.arange(values.numel(), dtype=torch.int32), values.clone())


def drawn(seed: int, draw: int, below: int) -> int:
    """A number in 0 .. below - 1 that seed and draw determine (splitmix64, Steele et al. 2014)."""
    mask = 2**64 - 1
    state = (seed * 0xD1342543DE82EF95 + (draw + 1) * 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return (state ^ (state >> 31)) % below
