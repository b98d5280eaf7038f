"""Sparse sums as something to measure: with a residual as training has one, selection included."""

from __future__ import annotations

import torch

from slipstream.comm import Collectives
from slipstream.comm.sparse import TopK
from slipstream.wires import Density


class SparseSum:
    """A sparse all-reduce of tensors of any size, for `Sweep` and `Contest`.

    What is selected from is not zeros, in which all elements are alike, but a residual of normal
    random numbers, made when a size comes for the first time.
    """

    def __init__(self, collectives: Collectives, name: str, wire: Density, ranks: int) -> None:
        self._collectives, self._name, self._wire = collectives, name, wire
        self._ranks = ranks
        self._numel = 0
        self._sum: TopK | None = None

    def __call__(self, flat: torch.Tensor) -> None:
        """Averages `flat` (mutated)."""
        if self._sum is None or flat.numel() != self._numel:
            self._numel = flat.numel()
            self._sum = self._prepared()
        self._sum.draw += 1
        self._sum.sum_(flat, self._ranks)

    def _prepared(self) -> TopK:
        made = self._collectives.for_bucket(self._name, self._wire, self._numel)
        assert isinstance(made, TopK)
        generator = torch.Generator().manual_seed(self._numel)
        for kept in made.kept():
            kept.values.normal_(generator=generator)
        return made
