"""The protocols that collectives follow: the whole of an all-reduce, and its two halves."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from slipstream.wires import Wire


class Collective(Protocol):
    """Sums flat tensors over the ranks of a group that it was built with.

    name, wire: how plans call it, and what travels; layout_invariant: whether an element gets the
    same bits whatever lies beside it in the tensor.

    On CPUs a call blocks until the result is there (the GIL is free meanwhile); on a CUDA device it
    enqueues on the current stream. Every rank of the group must make the same calls in the same
    order, with tensors of the same length and dtype.
    """

    name: str
    layout_invariant: bool

    @property
    def wire(self) -> Wire:
        """What travels."""
        ...

    def sum_(self, flat: torch.Tensor, divisor: int = 1) -> None:
        """Replaces `flat` (1-D, contiguous, floating point, mutated) by its sum over the ranks.

        The sum is formed in 32 bits or more, divided by `divisor`, which is 1 or the number of
        ranks, and then rounded to the dtype; with a 16-bit wire, also before it travels on.
        Afterwards all ranks hold the same bits. Raises whatever the backend raises when a rank does
        not come.
        """
        ...

    def begin(self, flat: torch.Tensor, divisor: int = 1) -> Any:
        """Begins `sum_` on a CPU without blocking, where the backend does all of it by itself.

        Returns the backend's torch.distributed.Work, or None, having done nothing, where it cannot.
        Until the work has ended no other operation may be begun in the group.
        """
        ...


class Halves(Protocol):
    """The two halves of an all-reduce, each moving half of its bytes.

    Blocking, streams and the duties of the ranks are as with `Collective`. A matrix has one row a
    rank; both halves take it flat: [world size * row], contiguous.
    """

    name: str

    def reduce_scatter(self, matrix: torch.Tensor, row: torch.Tensor, divisor: int = 1) -> None:
        """Writes the sum over ranks of this rank's row of `matrix` into `row` (1-D, mutated).

        The sum is formed in 32 bits or more, divided by `divisor`, and then rounded to the dtype.
        `matrix` (left as it is) and `row` have one dtype and must not overlap.
        """
        ...

    def all_gather(self, row: torch.Tensor, matrix: torch.Tensor) -> None:
        """Writes every rank's `row` (1-D) into its row of `matrix` (mutated, same bits everywhere).

        They have one dtype. `row` may be this rank's own row of `matrix`; otherwise they must not
        share memory.
        """
        ...
