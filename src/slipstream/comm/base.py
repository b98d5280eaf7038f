"""The one protocol that every collective follows."""

from __future__ import annotations

from typing import Protocol

import torch


class Collective(Protocol):
    """Sums flat tensors over the ranks of a group that it was built with.

    On CPUs a call blocks until the result is there (the GIL is free meanwhile); on a CUDA device it
    enqueues on the current stream. Every rank of the group must make the same calls in the same
    order, with tensors of the same length and dtype.
    """

    name: str

    def sum_(self, flat: torch.Tensor, divisor: int = 1) -> None:
        """Replaces `flat` (1-D, contiguous, floating point, mutated) by its sum over the ranks.

        The sum is formed in 32 bits or more, divided by `divisor`, and then rounded to the dtype.
        Afterwards all ranks hold the same bits. Raises whatever the backend raises when a rank does
        not come.
        """
        ...
