"""What travels: the elements as they lie in memory, or rounded to 16 bits.

Sums are formed in the memory's dtype, which has 32 bits or more; only what is sent is rounded, and
whoever keeps what it has sent keeps the rounded values, so that all ranks hold the same bits.
"""

from __future__ import annotations

import torch

from slipstream.comm.adding import add
from slipstream.comm.teams import Scratch
from slipstream.wires import DenseWire

TRAVELS_AS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Format:
    """One wire format; `scratch` gives the memory for what is rounded and for what arrives."""

    def __init__(self, wire: DenseWire, scratch: Scratch) -> None:
        self.wire = wire
        self._dtype = TRAVELS_AS.get(wire)
        self._scratch = scratch

    @property
    def rounds(self) -> bool:
        """Whether what travels has fewer bits than what lies in memory."""
        return self._dtype is not None

    def packed(self, values: torch.Tensor) -> torch.Tensor:
        """What to send: `values` (1-D) themselves, or a rounded copy."""
        if self._dtype is None:
            return values
        return self._scratch.take(values.numel(), self._dtype).copy_(values)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """As `packed`; `values` are overwritten with what the others will have."""
        sent = self.packed(values)
        if sent is not values:
            values.copy_(sent)
        return sent

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for what a member sends of which this rank has `like` (1-D)."""
        return self._scratch.take(like.numel(), self._dtype or like.dtype)

    def place(self, target: torch.Tensor) -> torch.Tensor:
        """Where to receive what will be `target` (1-D): see `put`."""
        return target if self._dtype is None else self.buffer(target)

    def put(self, arrived: torch.Tensor, target: torch.Tensor) -> None:
        """Writes what arrived in `place(target)` into `target`."""
        if arrived is not target:
            target.copy_(arrived)

    def add(self, total: torch.Tensor, arrived: torch.Tensor) -> None:
        """Adds what has arrived to `total` (1-D, mutated)."""
        add(total, arrived, out=total)
