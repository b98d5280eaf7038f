"""The memory of a plan that gathers: how gradients are cut among the ranks, and where they lie.

The buckets of the backward and those of the forward hold different parameters, so no bucket as a
whole can belong to a rank. What two of them have in common can: a section, the parameters that are
in the same bucket of the backward and in the same bucket of the forward. A plan of m and n buckets
in opposite orders has about m + n sections, however many parameters. Each is cut in one part a
rank, of equal size, the last ones filled up with zeros.

A parameter's average is lent from where it arrives, in a row of the gather bucket; one that is cut
by the rows of several sections is copied into memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from slipstream.plan import Bucket, Plan
from slipstream.sync.buffers import Strides, real_dtype
from slipstream.sync.pieces import GatherBucket, Piece, ReduceBucket


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


@dataclass
class _Section:
    """Parameters that travel together in both halves, one behind the other.

    gather: the index of its gather bucket; mine: [size], this rank's part in the reduced row.
    """

    gather: int
    world_size: int
    pieces: list[Piece] = field(default_factory=list)
    mine: torch.Tensor = field(init=False)

    @property
    def size(self) -> int:
        """Elements of the part of a rank."""
        return -(-sum(piece.width for piece in self.pieces) // self.world_size)

    def offsets(self) -> Iterator[tuple[Piece, int]]:
        """The pieces with the elements that lie before them."""
        offset = 0
        for piece in self.pieces:
            yield piece, offset
            offset += piece.width


def lay_out(
    plan: Plan,
    params: Mapping[str, nn.Parameter],
    strides: Mapping[str, Strides],
    rank: int,
    world_size: int,
) -> Layout:
    """The memory for a plan that gathers.

    Twice the gradients (the matrices of both halves), one row of every bucket of the backward, and
    the parameters that are cut by rows once more.
    """
    assert plan.gather is not None
    names = [name for bucket in plan.reduce for name in bucket.gradients]
    pieces = {name: Piece(name, params[name], strides[name]) for name in names}
    coming = {name: at for at, bucket in enumerate(plan.gather) for name in bucket.gradients}
    reduce, sections = [], list[_Section]()
    for bucket in plan.reduce:
        found = _sections(bucket, pieces, coming, world_size)
        reduce.append(_reduce_bucket(bucket, found, world_size))
        sections += found
    gather = []
    for index, bucket in enumerate(plan.gather):
        members = [section for section in sections if section.gather == index]
        made = _gather_bucket(bucket, members, rank, world_size)
        made.pieces = [pieces[name] for name in bucket.gradients]
        gather.append(made)
    return Layout(reduce, gather, pieces)


def _sections(
    bucket: Bucket, pieces: Mapping[str, Piece], coming: Mapping[str, int], world_size: int
) -> list[_Section]:
    """The sections of a bucket of the backward."""
    found: dict[int, _Section] = {}
    for name in bucket.gradients:
        index = coming[name]
        found.setdefault(index, _Section(index, world_size)).pieces.append(pieces[name])
    return list(found.values())


def _reduce_bucket(bucket: Bucket, sections: Sequence[_Section], world_size: int) -> ReduceBucket:
    """A bucket of the backward; its pieces and sections learn where they lie in it."""
    pieces = [piece for section in sections for piece in section.pieces]
    length = world_size * (sum(section.size for section in sections) + len(pieces))
    flat = _zeros(length, pieces[0].param)
    made = ReduceBucket(bucket, flat, world_size, pieces)
    for index, piece in enumerate(pieces):
        piece.reduce, piece.index = made, index
    start = 0
    for section in sections:
        columns = flat.view(world_size, -1)[:, start : start + section.size]
        section.mine = made.row[start : start + section.size]
        for piece, offset in section.offsets():
            piece.place(columns, offset)
        filled = sum(piece.width for piece in section.pieces)
        made.padding += [part for part in _behind(columns, filled) if part.numel()]
        start += section.size
    return made


def _gather_bucket(
    bucket: Bucket, sections: Sequence[_Section], rank: int, world_size: int
) -> GatherBucket:
    """A bucket of the forward; its pieces learn from where `p.grad` is lent."""
    width = sum(section.size for section in sections)
    flat = _zeros(world_size * width, sections[0].pieces[0].param)
    matrix = flat.view(world_size, width)
    made = GatherBucket(bucket, flat, matrix[rank])
    start = 0
    for section in sections:
        columns = matrix[:, start : start + section.size]
        made.parts.append(section.mine)
        for piece, offset in section.offsets():
            made.copies += piece.receive(columns, offset)
        start += section.size
    return made


def _behind(columns: torch.Tensor, offset: int) -> Iterator[torch.Tensor]:
    """What lies behind an element of the columns: the end of its row, and whole rows."""
    if columns.numel() > offset:
        row, column = divmod(offset, columns.shape[1])
        yield columns[row, column:]
        yield columns[row + 1 :]


def _zeros(length: int, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(length, dtype=real_dtype(like.dtype), device=like.device)
