"""A world of one rank."""

from __future__ import annotations

from typing import Any

import torch

from slipstream.wires import DenseWire


class Alone:
    """The sum over one rank is what it was. Follows `Collective` and `Halves`."""

    name = "native"
    wire: DenseWire = "float32"
    layout_invariant = True

    def sum_(self, flat: torch.Tensor, divisor: int = 1) -> None:
        """Leaves `flat` as it is; a single rank has nothing to divide by."""
        assert divisor == 1

    def begin(self, flat: torch.Tensor, divisor: int = 1) -> Any:
        """None: there is nothing to wait for."""
        return None

    def reduce_scatter(self, matrix: torch.Tensor, row: torch.Tensor, divisor: int = 1) -> None:
        """Copies the one row."""
        assert divisor == 1
        row.copy_(matrix)

    def all_gather(self, row: torch.Tensor, matrix: torch.Tensor) -> None:
        """Copies the one row."""
        matrix.copy_(row)
