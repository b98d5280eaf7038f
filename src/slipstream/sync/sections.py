"""The memory of a plan that gathers: how gradients are cut among the ranks, and where they lie.

The buckets of the backward and those of the forward hold different parameters, so no bucket as a
whole can belong to a rank. What two of them have in common can: a section, the parameters that are
in the same bucket of the backward and in the same bucket of the forward. A plan of m and n buckets
in opposite orders has about m + n sections, however many parameters. Each is cut in one part a
rank, of equal size, the last ones filled up with zeros.

Both kinds of bucket lie in the same memory: nothing is gathered before everything is reduced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from slipstream.plan import Bucket, Plan
from slipstream.sync.buffers import Strides, real_dtype, view_of
from slipstream.sync.pieces import GatherBucket, Piece, ReduceBucket, Section


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
class _Members:
    """What a section will hold. coming: the index of its gather bucket."""

    coming: int
    world_size: int
    pieces: list[Piece] = field(default_factory=list)

    @property
    def width(self) -> int:
        return sum(piece.width for piece in self.pieces)

    @property
    def size(self) -> int:
        return -(-self.width // self.world_size)


def lay_out(
    plan: Plan, params: Mapping[str, nn.Parameter], strides: Mapping[str, Strides], world_size: int
) -> Layout:
    """The memory for a plan that gathers.

    Twice the gradients (the matrices, and what `p.grad` shows) plus one row of every bucket.
    """
    assert plan.gather is not None
    names = [name for bucket in plan.reduce for name in bucket.gradients]
    pieces = {name: Piece(name, params[name], strides[name]) for name in names}
    coming = {name: at for at, bucket in enumerate(plan.gather) for name in bucket.gradients}
    members = [_members(bucket, pieces, coming, world_size) for bucket in plan.reduce]
    memory: dict[torch.dtype, torch.Tensor] = {}
    reduce, sections = [], [list[Section]() for _ in plan.gather]
    lengths = [world_size * sum(m.size + len(m.pieces) for m in group) for group in members]
    matrices = _matrices(plan.reduce, lengths, params, memory)
    for bucket, group, flat in zip(plan.reduce, members, matrices, strict=True):
        made = ReduceBucket(bucket, flat, world_size, [p for m in group for p in m.pieces])
        for index, piece in enumerate(made.slots):
            piece.reduce, piece.index = made, index
        start = 0
        for part in group:
            columns = flat.view(world_size, -1)[:, start : start + part.size]
            mine = made.row[start : start + part.size]
            sections[part.coming].append(_section(part, columns, mine, made.padding))
            start += part.size
        reduce.append(made)
    lengths = [world_size * sum(section.size for section in group) for group in sections]
    gather = []
    matrices = _matrices(plan.gather, lengths, params, memory)
    for bucket, parts, flat in zip(plan.gather, sections, matrices, strict=True):
        gathers = GatherBucket(bucket, flat, parts)
        gathers.pieces = [pieces[name] for name in bucket.gradients]
        gather.append(gathers)
    return Layout(reduce, gather, pieces)


def _matrices(
    buckets: Sequence[Bucket],
    lengths: Sequence[int],
    params: Mapping[str, nn.Parameter],
    memory: dict[torch.dtype, torch.Tensor],
) -> list[torch.Tensor]:
    """The memory of buckets, 1-D, out of one tensor a dtype, which is made where it lacks.

    The second half finds that of the first, which is longer by the flags.
    """
    firsts = [params[bucket.gradients[0]] for bucket in buckets]
    dtypes = [real_dtype(param.dtype) for param in firsts]
    used = dict.fromkeys(dtypes, 0)
    found = []
    for length, dtype, param in zip(lengths, dtypes, firsts, strict=True):
        if dtype not in memory:
            total = sum(n for n, other in zip(lengths, dtypes, strict=True) if other is dtype)
            memory[dtype] = torch.zeros(total, dtype=dtype, device=param.device)
        start = used[dtype]
        used[dtype] += length
        found.append(memory[dtype][start : start + length])
    return found


def _members(
    bucket: Bucket, pieces: Mapping[str, Piece], coming: Mapping[str, int], world_size: int
) -> list[_Members]:
    """What the sections of a reduce bucket hold."""
    found: dict[int, _Members] = {}
    for name in bucket.gradients:
        index = coming[name]
        found.setdefault(index, _Members(index, world_size)).pieces.append(pieces[name])
    return list(found.values())


def _section(
    members: _Members, columns: torch.Tensor, mine: torch.Tensor, padding: list[torch.Tensor]
) -> Section:
    """A section, whose pieces learn where they lie; adds to `padding` what none of them fills."""
    averages = torch.zeros(columns.numel(), dtype=columns.dtype, device=columns.device)
    offset = 0
    for piece in members.pieces:
        piece.place(columns, offset)
        piece.view = view_of(averages[offset : offset + piece.width], piece.param, piece.stride)
        piece.stride = piece.view.stride()
        offset += piece.width
    padding += [part for part in _behind(columns, offset) if part.numel()]
    return Section(averages, mine)


def _behind(columns: torch.Tensor, offset: int) -> Iterator[torch.Tensor]:
    """What lies behind an element of the columns: the end of its row, and whole rows."""
    if columns.numel() > offset:
        row, column = divmod(offset, columns.shape[1])
        yield columns[row, column:]
        yield columns[row + 1 :]
