"""Gradients that are averaged in two halves: one's places in both, and the buckets of both.

    reduce bucket                               gather bucket
    rank 0 | part 0 of A | part 0 of B | flags  rank 0 | part 0 of B | part 0 of C
    rank 1 | part 1 of A | part 1 of B | flags  rank 1 | part 1 of B | part 1 of C

A bucket is a matrix, a row a rank, a column a section (A, B, C; see `sections`). Of a reduce bucket
rank r ends with row r: its part of every section's averages, and a flag a parameter, as in
`buffers`: a rank sends its flags in every row, so that each one receives their sums without a
message of their own. To a gather bucket rank r gives its parts of those sections, and ends with the
whole matrix.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from slipstream.plan import Bucket
from slipstream.sync.buffers import SIXTEEN_BIT, SMALL_BYTES, Strides, in_layout, view_of
from slipstream.sync.incoming import Divisors
from slipstream.sync.tickets import Finished

Region = tuple[tuple[int, ...], tuple[int, ...], int]
"""Size, strides and offset of a part of a flat gradient."""


class Piece:
    """One parameter's places in both halves, and what happened to it in the current round.

    stride: the agreed strides; width: its real elements; reduce, index: the bucket of the backward
    that it is in, and which of its flags is this one's. view: its average, in its own form.
    target: its place in the reduce bucket in its own form, where one rank's row holds all of it;
    targets: the parts of it that rows hold, and their places there.
    is_small: copying it takes no longer than finding out that it must be copied.
    contributed: its hook fired in this round; kept: `p.grad` was accumulated without synchronising
    and waits for the next round; spent: the average with which the optimizer has been stepped,
    which the next gradient replaces. told_sparse: the user knows that it is sparse.
    """

    def __init__(self, name: str, param: nn.Parameter, stride: Strides) -> None:
        self.name = name
        self.param = param
        self.index = 0
        self.stride = stride
        self.width = param.numel() * (2 if param.is_complex() else 1)
        self.is_small = param.nbytes <= SMALL_BYTES
        self.reduce: ReduceBucket
        self.view: torch.Tensor
        self.target: torch.Tensor | None = None
        self.targets: list[tuple[Region, torch.Tensor]] = []
        self.contributed = False
        self.kept = False
        self.spent: torch.Tensor | None = None
        self.told_sparse = False

    def place(self, matrix: torch.Tensor, offset: int) -> None:
        """Notes where it lies in its section's columns of the reduce bucket, [ranks, size]."""
        self.targets = list(rows_of(matrix, offset, self.width))
        if len(self.targets) == 1 and self.targets[0][1].dim() == 1 and not self.param.is_complex():
            self.target = view_of(self.targets[0][1], self.param, self.stride)

    def receive(self, matrix: torch.Tensor, offset: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Notes where it lies in its section's columns of the gather bucket, [ranks, size].

        Returns the copies that make its average whole, where it is not in one place.
        """
        parts = list(rows_of(matrix, offset, self.width))
        if matrix.is_contiguous():
            average = matrix.reshape(-1)[offset : offset + self.width]
            parts = []
        elif len(parts) == 1 and parts[0][1].dim() == 1 and not self.param.is_complex():
            average = parts.pop()[1]
        else:
            average = torch.zeros(self.width, dtype=matrix.dtype, device=matrix.device)
        self.view = view_of(average, self.param, self.stride)
        self.stride = self.view.stride()
        return [(at(average, where), part) for where, part in parts]

    def put(self, gradient: torch.Tensor, divisors: Divisors | None) -> None:
        """Copies the gradient into the reduce bucket, divided if asked."""
        for source, target in self._paired(gradient):
            if divisors is None:
                target.copy_(source)
            else:
                divisors.divide(source, out=target)

    def add(self, gradient: torch.Tensor, divisors: Divisors | None) -> None:
        """Adds one more gradient to what is in the reduce bucket."""
        for source, target in self._paired(gradient):
            if divisors is None:
                target.add_(source)
            else:
                share = torch.empty_like(source)
                divisors.divide(source, out=share)
                target.add_(share)

    def put_nothing(self) -> None:
        """What travels for a parameter that this rank has no gradient for."""
        for _, target in self.targets:
            target.zero_()

    def lend(self) -> None:
        """Makes `param.grad` the average, as a copy where the parameter has a layout of its own."""
        if self.param.stride() == self.stride:
            self.param.grad = self.view.detach()
        else:
            self.param.grad = torch.empty_like(self.param).copy_(self.view)

    def has_gradient(self) -> bool:
        """Whether `p.grad` is there and was not made by an update that is done."""
        return self.param.grad is not None and self.param.grad is not self.spent

    def drop_spent(self) -> None:
        """Takes back what the optimizer has used: the next gradient is not added to it."""
        if self.spent is not None:
            if self.param.grad is self.spent:
                self.param.grad = None
            self.spent = None

    def _paired(self, gradient: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The parts of the gradient, in the agreed layout, with their places in the bucket."""
        if self.target is not None:
            yield gradient, self.target
            return
        if gradient.is_complex():
            flat = torch.view_as_real(gradient.resolve_conj().contiguous())
        else:
            flat = in_layout(gradient, self.stride)
        for where, target in self.targets:
            yield at(flat, where), target


class ReduceBucket:
    """A bucket of the backward. flat: the matrix, [world * row]; row: this rank's, reduced.

    averages, flags: the two parts of the row; local_flags: what this rank sends as its flags.
    divides_first: gradients are divided by the number of ranks before they travel. padding: what
    belongs to no gradient. pending: gradients of this round that are still to be copied in.
    """

    def __init__(
        self, bucket: Bucket, flat: torch.Tensor, world_size: int, slots: list[Piece]
    ) -> None:
        self.bytes = bucket.bytes
        self.flat = flat
        self.row = torch.zeros(flat.numel() // world_size, dtype=flat.dtype, device=flat.device)
        self.slots = slots
        self.averages, self.flags = self.row.tensor_split([self.row.numel() - len(slots)])
        self.local_flags = torch.ones_like(self.flags)
        self._sent_flags = flat.view(world_size, self.row.numel())[:, self.averages.numel() :]
        # 16-bit gradients would lose small values: the halves divide their wide sums instead
        self.divides_first = flat.dtype not in SIXTEEN_BIT
        self.padding: list[torch.Tensor] = []
        self.missing = 0
        self.pending: list[tuple[Piece, torch.Tensor]] = []
        self.ready_seconds = 0.0
        self.ticket: Finished | None = None
        self._used: list[bool] | None = None

    def begin(self) -> None:
        """Starts a round: nothing contributed, nothing sent."""
        self.missing = len(self.slots)
        self.pending.clear()
        self.ticket = None
        self.local_flags.fill_(1.0)
        self._used = None
        for piece in self.slots:
            piece.contributed = False

    def complete(self) -> None:
        """Makes the bucket fit to travel, once every gradient is in it."""
        self._sent_flags.copy_(self.local_flags)
        for rest in self.padding:
            rest.zero_()

    def used(self, piece: Piece) -> bool:
        """Whether some rank contributed to this one, once the bucket is back.

        On a GPU this waits where this rank did not.
        """
        if piece.contributed:
            return True
        if self._used is None:
            self._used = [flag != 0.0 for flag in self.flags.tolist()]
        return self._used[piece.index]


class GatherBucket:
    """A bucket of the forward. flat: the matrix; row: this rank's, which is sent.

    pieces: of the parameters that come with it; parts: where the row comes from, this rank's parts
    of the reduced sections, in the order of the columns. copies: of averages that are cut by the
    matrix's rows: the memory from which `p.grad` is lent, and what belongs there.
    """

    def __init__(self, bucket: Bucket, flat: torch.Tensor, row: torch.Tensor) -> None:
        self.bytes = bucket.bytes
        self.flat = flat
        self.row = row
        self.pieces: list[Piece] = []
        self.parts: list[torch.Tensor] = []
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.ready_seconds = 0.0
        self.ticket: Finished | None = None

    def fill(self) -> None:
        """Makes the row fit to travel, once this rank's parts have been reduced."""
        torch.cat(self.parts, out=self.row)

    def unpack(self) -> None:
        """Makes the averages whole that are cut by the matrix's rows."""
        for target, source in self.copies:
            target.copy_(source)


def rows_of(matrix: torch.Tensor, offset: int, width: int) -> Iterator[tuple[Region, torch.Tensor]]:
    """The parts of `width` elements from `offset` on in a matrix, and their places there.

    At most three: the end of a row, whole rows, the beginning of one.
    """
    size, done = matrix.shape[1], 0
    while done < width:
        row, column = divmod(offset + done, size)
        rows = (width - done) // size if column == 0 else 0
        if rows > 1:
            yield ((rows, size), (size, 1), done), matrix[row : row + rows]
            done += rows * size
        else:
            length = min(size - column, width - done)
            yield ((length,), (1,), done), matrix[row, column : column + length]
            done += length


def at(flat: torch.Tensor, where: Region) -> torch.Tensor:
    """The part of a gapless tensor, taken as flat."""
    size, stride, offset = where
    return flat.as_strided(size, stride, flat.storage_offset() + offset)
