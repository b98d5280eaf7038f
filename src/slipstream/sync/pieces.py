"""The layout of gradients whose averaging is split in two halves.

The buckets of the backward and those of the forward hold different parameters, so no bucket as a
whole can belong to a rank. Each parameter does: it is cut in one piece a rank, of equal size, the
last ones filled up with zeros. A bucket is a matrix, a row a rank, a column of pieces a parameter:

    reduce bucket                             gather bucket
    rank 0 | piece 0 of a | of b | flags |    rank 0 | piece 0 of b | of c |
    rank 1 | piece 1 of a | of b | flags |    rank 1 | piece 1 of b | of c |

Of a reduce bucket rank r ends with row r: its piece of every parameter's average, and a flag a
parameter, as in `buffers`: a rank sends its flags in every row, so that each one receives their
sums without a message of their own. To a gather bucket rank r gives its pieces of those parameters,
and ends with the whole matrix.

Both kinds lie in the same memory: nothing is gathered before everything is reduced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from slipstream.plan import Bucket, Plan
from slipstream.sync.buffers import SIXTEEN_BIT, Strides, in_layout, real_dtype, view_of
from slipstream.sync.incoming import Divisors
from slipstream.sync.tickets import Finished

Region = tuple[tuple[int, ...], tuple[int, ...], int]
"""Size, strides and offset of a part of a flat gradient."""


class Piece:
    """One parameter's places in both halves, and what happened to it in the current round.

    stride: the agreed strides; width: its real elements; size: those of the piece of one rank;
    mine: [size], this rank's piece of the average; reduce, index: the bucket of the backward that
    it is in, and which of its flags is this one's.
    average: flat memory for the whole of it, `view` in the form of the parameter.
    contributed: its hook fired in this round; kept: `p.grad` was accumulated without synchronising
    and waits for the next round; spent: the average with which the optimizer has been stepped,
    which the next gradient replaces. told_sparse: the user knows that it is sparse.
    """

    def __init__(self, name: str, param: nn.Parameter, stride: Strides) -> None:
        self.name = name
        self.param = param
        self.index = 0
        self.stride = stride
        self.width = _width(param)
        self.size = 0
        self.reduce: ReduceBucket
        self.mine: torch.Tensor
        self.average: torch.Tensor
        self.view: torch.Tensor
        self.targets: list[tuple[Region, torch.Tensor]] = []
        self.padding: list[torch.Tensor] = []
        self.contributed = False
        self.kept = False
        self.spent: torch.Tensor | None = None
        self.told_sparse = False

    def put(self, gradient: torch.Tensor, divisors: Divisors | None) -> None:
        """Copies the gradient into the reduce bucket, divided if asked."""
        for source, target in self._paired(gradient):
            if divisors is None:
                target.copy_(source)
            else:
                divisors.divide(source, out=target)
        for rest in self.padding:
            rest.zero_()

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
        for rest in self.padding:
            rest.zero_()

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
        if gradient.is_complex():
            flat = torch.view_as_real(gradient.resolve_conj().contiguous())
        else:
            flat = in_layout(gradient, self.stride)
        for where, target in self.targets:
            yield _at(flat, where), target


class ReduceBucket:
    """A bucket of the backward. flat: the matrix, [world * row]; row: this rank's, reduced.

    averages, flags: the two parts of the row; local_flags: what this rank sends as its flags.
    divides_first: gradients are divided by the number of ranks before they travel.
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
        self.missing = 0
        self.ready_seconds = 0.0
        self.ticket: Finished | None = None
        self._used: list[bool] | None = None

    def begin(self) -> None:
        """Starts a round: nothing contributed, nothing sent."""
        self.missing = len(self.slots)
        self.ticket = None
        self.local_flags.fill_(1.0)
        self._used = None
        for piece in self.slots:
            piece.contributed = False

    def put_flags(self) -> None:
        """Makes the bucket fit to travel, once every piece is in it."""
        self._sent_flags.copy_(self.local_flags)

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
    """A bucket of the forward. flat: the matrix; copies: from it into the averages, by piece."""

    def __init__(self, bytes_: int, flat: torch.Tensor) -> None:
        self.bytes = bytes_
        self.flat = flat
        self.pieces: list[Piece] = []
        self.copies: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        self.ready_seconds = 0.0
        self.ticket: Finished | None = None

    def unpack(self) -> None:
        """Writes the averages into the memory from which `p.grad` is lent."""
        for copies in self.copies:
            for target, source in copies:
                target.copy_(source)


@dataclass(frozen=True)
class Layout:
    """The buckets of both halves and the pieces in them, by name."""

    reduce: list[ReduceBucket]
    gather: list[GatherBucket]
    pieces: dict[str, Piece]

    def release(self) -> None:
        """Lets go of all memory; gradients that are views keep theirs."""
        for bucket in self.reduce:
            bucket.slots.clear()  # pieces and buckets hold each other
        self.reduce.clear()
        self.gather.clear()
        self.pieces.clear()


def lay_out(
    plan: Plan, params: Mapping[str, nn.Parameter], strides: Mapping[str, Strides], world_size: int
) -> Layout:
    """The memory for a plan that gathers.

    Twice the gradients (the matrices, and what `p.grad` shows) plus one row of every bucket.
    """
    assert plan.gather is not None
    names = [name for bucket in plan.reduce for name in bucket.gradients]
    pieces = {name: Piece(name, params[name], strides[name]) for name in names}
    for piece in pieces.values():
        piece.size = -(-piece.width // world_size)
    memory: dict[torch.dtype, torch.Tensor] = {}
    reduce = []
    for bucket, flat in _matrices(plan.reduce, pieces, world_size, memory, with_flags=True):
        slots = [pieces[name] for name in bucket.gradients]
        made = ReduceBucket(bucket, flat, world_size, slots)
        for index, (piece, region, start) in enumerate(_columns(slots, flat, world_size)):
            _place(piece, region)
            piece.mine = made.row[start : start + piece.size]
            piece.reduce, piece.index = made, index
        reduce.append(made)
    _make_averages(list(pieces.values()))
    gather = []
    for bucket, flat in _matrices(plan.gather, pieces, world_size, memory, with_flags=False):
        gathers = GatherBucket(bucket.bytes, flat)
        gathers.pieces = [pieces[name] for name in bucket.gradients]
        for piece, region, _ in _columns(gathers.pieces, flat, world_size):
            parts = _parts(piece, region)
            gathers.copies.append([(_at(piece.average, where), part) for where, part in parts])
        gather.append(gathers)
    return Layout(reduce, gather, pieces)


def _matrices(
    buckets: Sequence[Bucket],
    pieces: Mapping[str, Piece],
    world_size: int,
    memory: dict[torch.dtype, torch.Tensor],
    *,
    with_flags: bool,
) -> Iterator[tuple[Bucket, torch.Tensor]]:
    """Each bucket with its memory, out of one tensor a dtype, which is made where it lacks."""
    flag = int(with_flags)
    lengths = [world_size * sum(pieces[n].size + flag for n in b.gradients) for b in buckets]
    params = [pieces[bucket.gradients[0]].param for bucket in buckets]
    dtypes = [real_dtype(param.dtype) for param in params]
    used = dict.fromkeys(dtypes, 0)
    for dtype, param in zip(dtypes, params, strict=True):
        if dtype not in memory:
            total = sum(n for n, other in zip(lengths, dtypes, strict=True) if other is dtype)
            memory[dtype] = torch.zeros(total, dtype=dtype, device=param.device)
    for bucket, length, dtype in zip(buckets, lengths, dtypes, strict=True):
        start = used[dtype]
        used[dtype] += length
        yield bucket, memory[dtype][start : start + length]


def _columns(
    pieces: Sequence[Piece], flat: torch.Tensor, world_size: int
) -> Iterator[tuple[Piece, torch.Tensor, int]]:
    """Each piece of a bucket, its columns ([world, size]) and the first of them."""
    matrix, start = flat.view(world_size, flat.numel() // world_size), 0
    for piece in pieces:
        yield piece, matrix[:, start : start + piece.size], start
        start += piece.size


def _place(piece: Piece, region: torch.Tensor) -> None:
    """Where in the reduce bucket the gradient goes, and what of its columns is padding."""
    piece.targets = _parts(piece, region)
    if piece.size == 0:
        return
    full, rest = divmod(piece.width, piece.size)
    spare = [region[full, rest:], region[full + 1 :]] if full < len(region) else []
    piece.padding = [part for part in spare if part.numel()]


def _parts(piece: Piece, region: torch.Tensor) -> list[tuple[Region, torch.Tensor]]:
    """The whole rows and the begun one of a parameter's columns, with their places in it."""
    if piece.size == 0:
        return []
    full, rest = divmod(piece.width, piece.size)
    parts: list[tuple[Region, torch.Tensor]] = []
    if full:
        parts.append((((full, piece.size), (piece.size, 1), 0), region[:full]))
    if rest:
        parts.append((((rest,), (1,), full * piece.size), region[full, :rest]))
    return parts


def _make_averages(pieces: Sequence[Piece]) -> None:
    """One tensor a dtype, from which every `p.grad` is lent."""
    totals: dict[torch.dtype, int] = {}
    for piece in pieces:
        dtype = real_dtype(piece.param.dtype)
        totals[dtype] = totals.get(dtype, 0) + piece.width
    memory = {
        dtype: torch.zeros(total, dtype=dtype, device=pieces[0].param.device)
        for dtype, total in totals.items()
    }
    starts = dict.fromkeys(totals, 0)
    for piece in pieces:
        dtype = real_dtype(piece.param.dtype)
        start = starts[dtype]
        starts[dtype] += piece.width
        piece.average = memory[dtype][start : start + piece.width]
        piece.view = view_of(piece.average, piece.param, piece.stride)
        piece.stride = piece.view.stride()


def _at(flat: torch.Tensor, where: Region) -> torch.Tensor:
    """The part of a gapless tensor, taken as flat."""
    size, stride, offset = where
    return flat.as_strided(size, stride, flat.storage_offset() + offset)


def _width(param: nn.Parameter) -> int:
    return param.numel() * (2 if param.is_complex() else 1)
