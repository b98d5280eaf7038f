"""`native` in two halves: reduce-scatter and all-gather, each with half of the all-reduce's bytes.

NCCL has both. Gloo's reduce-scatter is an all-reduce of which most is thrown away, so here ranks
exchange their rows themselves: small ones all at once (`all_to_all_single`), large ones along a
ring. Both move (n-1)/n of the matrix a rank and give the same bits. Gloo's all-gather moves no more
than it must, but waits between its steps; large rows are gathered along a ring, too.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from slipstream.comm.adding import add
from slipstream.comm.exchanges import gather_along_a_ring, scatter_along_a_ring
from slipstream.comm.formats import Format
from slipstream.comm.teams import Scratch, Team, carry_out
from slipstream.comm.torch_comm import all_gather_flat, backend_of, reduce_scatter_flat
from slipstream.comm.widening import SIXTEEN_BIT

_RING_FROM_BYTES = 384 * 1024
"""Of a row. Measured on 4 nodes with links of 1 Gbit/s, reduce-scatter at once against the ring:
7.7 and 8.6 ms for rows of 256 KiB, 18.8 and 16.1 ms for 512 KiB, 85 and 55 ms for 2 MiB."""


class NativeHalves:
    """The halves of a process group's backend. Follows `Halves`.

    Holds, once used, memory for the largest matrix that was scattered (not with NCCL in 32 bits).
    The row of rank r is summed in the order of ranks from r+1 around to r, so an element's bits do
    not depend on what travels beside it.
    """

    name = "native"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._team = Team(group, range(group.size()))
        self._scratch = Scratch()
        self._format = Format("float32", self._scratch)

    def reduce_scatter(self, matrix: torch.Tensor, row: torch.Tensor, divisor: int = 1) -> None:
        """See `Halves.reduce_scatter`. Sixteen-bit rows are summed as float32."""
        if row.numel() == 0:
            return
        if backend_of(self._group, matrix.device) == "nccl":
            total = self._by_nccl(matrix, row)
        elif _goes_along_a_ring(row):
            total = self._along_a_ring(matrix, row)
        else:
            total = self._at_once(matrix)
        if divisor != 1:
            total.div_(divisor)
        if total is not row:
            row.copy_(total)
        self._scratch.release()

    def all_gather(self, row: torch.Tensor, matrix: torch.Tensor) -> None:
        """See `Halves.all_gather`."""
        if row.numel() == 0:
            return
        if _goes_along_a_ring(row):
            rows = matrix.view(self._team.size, -1).unbind()
            if not _overlap(row, matrix):
                rows[self._team.index].copy_(row)
            carry_out([gather_along_a_ring(self._team, rows, self._format, 0)])
        else:
            all_gather_flat(matrix, row.clone() if _overlap(row, matrix) else row, self._group)

    def _by_nccl(self, matrix: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        is_narrow = row.dtype in SIXTEEN_BIT
        total = torch.empty_like(row, dtype=torch.float32) if is_narrow else row
        reduce_scatter_flat(total, matrix.float() if is_narrow else matrix, self._group)
        return total

    def _along_a_ring(self, matrix: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        is_narrow = row.dtype in SIXTEEN_BIT
        total = self._scratch.take(row.numel(), torch.float32) if is_narrow else row
        rows = (matrix.float() if is_narrow else matrix).view(self._team.size, -1).unbind()
        carry_out([scatter_along_a_ring(self._team, rows, self._format, 0, 1, into=total)])
        return total

    def _at_once(self, matrix: torch.Tensor) -> torch.Tensor:
        if matrix.device.type == "cpu":
            received = self._scratch.take(matrix.numel(), matrix.dtype)
        else:
            received = torch.empty_like(matrix)
        dist.all_to_all_single(received, matrix, group=self._group)
        rank, size = self._team.index, self._team.size
        rows = received.view(size, -1)
        first = rows[(rank + 1) % size]
        total = first.float() if matrix.dtype in SIXTEEN_BIT else first
        for step in range(2, size + 1):
            add(total, rows[(rank + step) % size], out=total)
        return total


def _overlap(row: torch.Tensor, matrix: torch.Tensor) -> bool:
    return row.untyped_storage().data_ptr() == matrix.untyped_storage().data_ptr()


def _goes_along_a_ring(row: torch.Tensor) -> bool:
    """Large rows on CPUs: Gloo sends between two ranks from their memory alone."""
    return row.device.type == "cpu" and row.nbytes >= _RING_FROM_BYTES
