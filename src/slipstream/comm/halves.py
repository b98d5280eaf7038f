"""`native` in two halves: reduce-scatter and all-gather, each with half of the all-reduce's bytes.

NCCL has both. Gloo's all-gather moves what it must, (n-1)/n of the matrix a rank; but its
reduce-scatter is an all-reduce of which most is thrown away. There each rank sends every other one
its row (`all_to_all_single`, (n-1)/n of the matrix again) and sums what it received by itself.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from slipstream.comm.torch_comm import all_gather_flat, backend_of, reduce_scatter_flat

_SIXTEEN_BIT = (torch.float16, torch.bfloat16)
_CHUNK = 2**14
"""Elements that are summed at a time: they stay in the cache, and below 2**15 torch adds in the
calling thread alone, which leaves the other cores to backward."""


class NativeHalves:
    """The halves of a process group's backend. Follows `Halves`.

    Holds, once used, memory for the largest matrix that was scattered (not with NCCL in 32 bits).
    Sums are formed in rank order, so an element's bits do not depend on what travels beside it.
    """

    name = "native"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def reduce_scatter(self, matrix: torch.Tensor, row: torch.Tensor, divisor: int = 1) -> None:
        """See `Halves.reduce_scatter`."""
        if row.numel() == 0:
            return
        if backend_of(self._group, matrix.device) == "nccl":
            _by_nccl(matrix, row, divisor, self._group)
            return
        received = self._received(matrix)
        dist.all_to_all_single(received, matrix, group=self._group)
        _sum_rows(received.view(self._group.size(), -1), row, divisor)

    def all_gather(self, row: torch.Tensor, matrix: torch.Tensor) -> None:
        """See `Halves.all_gather`."""
        if row.numel() > 0:
            all_gather_flat(matrix, row, self._group)

    def _received(self, matrix: torch.Tensor) -> torch.Tensor:
        """Memory like the matrix, used again by the next call."""
        scratch = self._scratch.get(matrix.dtype)
        if scratch is None or scratch.numel() < matrix.numel() or scratch.device != matrix.device:
            scratch = self._scratch[matrix.dtype] = torch.empty_like(matrix)
        return scratch[: matrix.numel()]


def _by_nccl(
    matrix: torch.Tensor, row: torch.Tensor, divisor: int, group: dist.ProcessGroup
) -> None:
    is_narrow = matrix.dtype in _SIXTEEN_BIT
    total = torch.empty_like(row, dtype=torch.float32) if is_narrow else row
    reduce_scatter_flat(total, matrix.float() if is_narrow else matrix, group)
    if divisor != 1:
        total.div_(divisor)
    if is_narrow:
        row.copy_(total)


def _sum_rows(rows: torch.Tensor, out: torch.Tensor, divisor: int) -> None:
    """Writes the sum of `rows` ([ranks, n], mutated), first row first, into `out` ([n])."""
    is_narrow = rows.dtype in _SIXTEEN_BIT
    for chunk, target in zip(rows.split(_CHUNK, dim=1), out.split(_CHUNK), strict=True):
        first, *others = chunk.unbind()
        total = first.float() if is_narrow else first
        for other in others:
            total.add_(other)
        if divisor != 1:
            total.div_(divisor)
        target.copy_(total)
