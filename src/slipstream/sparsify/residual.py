"""Error feedback: what was not sent is kept, and added to the next gradient."""

from __future__ import annotations

import numpy as np
import torch

from slipstream.sparsify.selection import Adding, Selection, Selector, check

GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ErrorFeedback:
    """A flat gradient's residual, and the selection of what is sent of their sum.

    residual: float32 [numel], on the CPU, zero at first. It may be read and overwritten (a
    checkpoint, a new layout) between two calls; it is never NaN or infinite by itself.
    values: the dtype in which the sent values travel. can_undo: keeps the residual of before the
    last call, which takes the memory of another one and a quarter more time.

    After each call, for every element, bit for bit:

        sent + residual == float32(gradient + the residual before)

    An element whose sum is not finite is the exception: its residual stays as it was, and as
    selectors take what is not finite first, at least one such value is sent for all ranks to see.
    The other elements are treated as ever; who leaves the step out calls `undo`.
    """

    def __init__(
        self,
        numel: int,
        selector: Selector,
        *,
        values: torch.dtype = torch.float32,
        can_undo: bool = False,
    ) -> None:
        if values not in GRADIENT_DTYPES:
            raise ValueError(f"Values cannot travel as {values}.")
        from slipstream.sparsify import kernels  # here, as they are compiled when they are imported

        self._kernels = kernels
        self.selector = selector
        self.values = values
        self.residual = torch.zeros(numel)
        self.num_nonfinite = 0
        self._before = torch.zeros(numel) if can_undo else None
        self._undoable = False
        self._sums = np.empty(kernels.CHUNK, np.float32)

    def select(self, gradient: torch.Tensor, k: int, draw: int = 0) -> Selection:
        """Adds `gradient` (float [numel], on the CPU; left as it is) and takes out k elements.

        The selection's values have the dtype in which they travel. Values beyond the range of a
        16-bit dtype are sent as its largest number, and the rest stays. `num_nonfinite` tells how
        many sums were not finite. draw: see `Selector`. Raises ValueError for a gradient or k of
        another kind; the residual is then as it was.
        """
        if gradient.dtype in GRADIENT_DTYPES:
            gradient = gradient.detach().float()
        check(gradient, k)
        if gradient.numel() != self.residual.numel():
            raise ValueError(
                f"The gradient has {gradient.numel():,} elements and the residual "
                f"{self.residual.numel():,}."
            )
        old = self.residual
        if self._before is not None:
            self.residual, self._before = self._before, old
            self._undoable = True
        self.num_nonfinite = 0
        written, indices = self._add(gradient, old, k)
        if written < gradient.numel():
            return self._send_nonfinite(gradient, old, written, k, draw)
        if indices is None:
            indices = self.selector.select(self.residual, k, draw).indices
        return self._send(indices)

    def undo(self) -> None:
        """Makes the residual what it was before the last call of `select`, bit for bit.

        Raises RuntimeError if it is not kept, or was given back already.
        """
        if self._before is None or not self._undoable:
            raise RuntimeError("No residual of before is kept: see can_undo, and undo only once.")
        self.residual, self._before = self._before, self.residual
        self._undoable = False

    def undo_elements(self, start: int, stop: int) -> None:
        """As `undo`, of these elements alone; the others can still be undone afterwards."""
        if self._before is None or not self._undoable:
            raise RuntimeError("No residual of before is kept: see can_undo, and undo only once.")
        self.residual[start:stop] = self._before[start:stop]

    def _add(
        self, gradient: torch.Tensor, old: torch.Tensor, k: int
    ) -> tuple[int, torch.Tensor | None]:
        """The sums in `residual`: how many elements, and the selected ones if they are known."""
        if isinstance(self.selector, Adding) and k < gradient.numel():
            return self.selector.add_and_select(gradient, old, self.residual, k)
        written = self._kernels.add_residual(
            gradient.numpy(),
            old.numpy(),
            self.residual.numpy(),
            self._sums,
            self._sums.view(np.int32),
        )
        return written, None

    def _send(self, indices: torch.Tensor) -> Selection:
        """Takes the elements at the indices out of the residual."""
        taken = torch.empty(indices.numel())
        self._kernels.take_out(self.residual.numpy(), indices.numpy(), taken.numpy())
        if self.values == torch.float32:
            return Selection(indices, taken)
        sent = rounded(taken, self.values)
        rest = taken - sent.float()
        self.residual[indices] = torch.where(taken == 0, taken, rest)
        return Selection(indices, sent)

    def _send_nonfinite(
        self, gradient: torch.Tensor, old: torch.Tensor, written: int, k: int, draw: int
    ) -> Selection:
        """As `_send` where some sums are not finite: those from element `written` on are to do."""
        rest = gradient[written:] + old[written:]
        finite = rest.isfinite()
        sums = torch.cat([self.residual[:written], rest])
        torch.where(finite, rest, old[written:], out=self.residual[written:])
        self.num_nonfinite = rest.numel() - int(finite.sum())
        selection = self.selector.select(sums, k, draw)
        is_finite = selection.values.isfinite()
        sent = self._send(selection.indices[is_finite])
        values = selection.values.to(self.values)
        values[is_finite] = sent.values
        return Selection(selection.indices, values)


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` (finite float32 [k]) as they are sent in a 16-bit dtype: the nearest, and finite.

    Such that (value - sent) + sent is the value again, in float32: the difference of a number and
    its rounding is exact. Of values beyond the dtype's range the largest number is sent. That of
    float16 is 65504, whose difference to a multiple of 64 can lie halfway between two numbers; then
    it is 65472, a multiple of 64.
    """
    limit = torch.finfo(dtype).max
    sent = values.to(dtype).clamp(-limit, limit)
    wide = sent.float()
    if dtype == torch.float16:
        halfway = (values - wide) + wide != values
        sent = torch.where(halfway, wide.clamp(-65472, 65472).to(dtype), sent)
    return sent
