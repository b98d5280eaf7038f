"""The halves of an all-reduce as operations on a bucket, to be timed like an all-reduce of it."""

from __future__ import annotations

import torch

from slipstream.comm import Halves


class _Half:
    """Keeps memory for the largest bucket so far, cut in one row a rank."""

    def __init__(self, halves: Halves, world_size: int) -> None:
        self._halves = halves
        self._world_size = world_size
        self._matrix = torch.zeros(0)
        self._row = torch.zeros(0)

    def _parts(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A matrix as large as the bucket, filled up to equal rows, and one row."""
        length = -(-flat.numel() // self._world_size)
        if self._row.numel() < length:
            self._matrix = flat.new_zeros(length * self._world_size)
            self._row = flat.new_zeros(length)
        return self._matrix[: length * self._world_size], self._row[:length]


class ScatterHalf(_Half):
    """Reduce-scatters as many elements as `flat` has."""

    def __call__(self, flat: torch.Tensor) -> None:
        self._halves.reduce_scatter(*self._parts(flat))


class GatherHalf(_Half):
    """All-gathers as many elements as `flat` has."""

    def __call__(self, flat: torch.Tensor) -> None:
        matrix, row = self._parts(flat)
        self._halves.all_gather(row, matrix)
