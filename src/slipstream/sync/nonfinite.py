"""Finds out, together, on which ranks non-finite gradients began."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from slipstream.comm.peers import Peers
from slipstream.sync.report import NonFinite


class Named(Protocol):
    """A gradient's place."""

    name: str


class Flagged(Protocol):
    """Gradients with the flags that this rank has sent, where it has, and those of all ranks."""

    @property
    def slots(self) -> Sequence[Named]:
        """The gradients, in the order of the flags."""
        ...

    @property
    def flags(self) -> torch.Tensor:
        """One element a gradient, not finite where some rank's gradient was not."""
        ...

    @property
    def local_flags(self) -> torch.Tensor | None:
        """This rank's."""
        ...


def find_nonfinite(buffers: Sequence[Flagged], peers: Peers) -> NonFinite | None:
    """Reads the averaged flags; asks the ranks for their own only when some are not finite.

    All ranks hold the same averaged flags, so all of them ask or none does.
    """
    if all(bool(torch.isfinite(buffer.flags).all()) for buffer in buffers):
        return None
    first = next(
        (
            slot.name
            for buffer in buffers
            if buffer.local_flags is not None
            for slot, finite in zip(
                buffer.slots, torch.isfinite(buffer.local_flags).tolist(), strict=True
            )
            if not finite
        ),
        None,
    )
    everyone = peers.gather(first, "finding the rank with non-finite gradients")
    ranks = tuple(rank for rank, name in enumerate(everyone) if name is not None)
    return NonFinite(ranks, everyone[ranks[0]])
