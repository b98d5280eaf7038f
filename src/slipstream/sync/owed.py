"""What sparse buckets have not sent yet, element by element of each parameter's gradient.

A rank owes what it has kept (hitopk: of its row of a bucket, for its whole node). The sum over all
ranks is what is missing in the averages that were given out so far, so it does not matter which
rank owes an element: another plan, a checkpoint or a dense bucket may shift it about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from slipstream.comm.sparse import Kept, TopK
from slipstream.sync.buffers import BucketBuffer, Slot


@dataclass(frozen=True)
class Owed:
    """What a rank owes of one parameter: of its gradient's elements from `start` on.

    Elements are counted as they lie in memory, in the layout that ranks have agreed on. values:
    float32 [n], in units of the average; with a loss scale, of the scaled one. second: see
    `comm.sparse.Kept`.
    """

    parameter: str
    start: int
    values: torch.Tensor
    second: bool = False


@dataclass
class SparseTotals:
    """Sums over steps of what sparse buckets took on this rank.

    sent_bytes: to ranks of other nodes, without headers and flags; memory_bytes: of the elements
    that were selected from, as float32; selected_bytes: of what was selected of them, with indices.
    """

    steps: int = 0
    selection_seconds: float = 0.0
    sent_bytes: int = 0
    memory_bytes: float = 0.0
    selected_bytes: float = 0.0


class SparseBuckets:
    """The sparse ones among a reducer's buckets, and what is owed to the dense ones among them.

    What is owed to parameters in dense buckets is added to their gradients once.
    """

    def __init__(self, buffers: Sequence[BucketBuffer]) -> None:
        self._buffers = buffers
        self._sparse = [
            (buffer, buffer.collective) for buffer in buffers if isinstance(buffer.collective, TopK)
        ]
        self._waiting: dict[str, list[Owed]] = {}
        self._added: dict[str, list[Owed]] = {}

    def __bool__(self) -> bool:
        return bool(self._sparse or self._waiting or self._added)

    def owed(self) -> list[Owed]:
        """What this rank owes, to be read before the next round. Values are those kept, no copies.

        Elements of which nothing is owed are left out where a whole parameter has none.
        """
        found = [piece for pieces in self._waiting.values() for piece in pieces]
        for buffer, collective in self._sparse:
            for kept in collective.residuals():
                found += _by_parameter(buffer, kept)
        return [piece for piece in found if bool(piece.values.any())]

    def take_over(self, owed: Iterable[Owed]) -> None:
        """Distributes what is owed over these buckets; all ranks call it, and it communicates.

        What is owed of parameters in none of the buckets, which are frozen, waits for another plan.
        """
        by_parameter = _grouped(owed)
        for buffer, collective in self._sparse:
            flats = torch.zeros(collective.numel), torch.zeros(collective.numel)
            for start, slot in _starts(buffer):
                for piece in by_parameter.pop(slot.name, ()):
                    first = start + piece.start
                    flats[piece.second][first : first + piece.values.numel()] += piece.values
            collective.take_over(*flats)
        left = merged(piece for pieces in by_parameter.values() for piece in pieces)
        self._waiting = _grouped(left)

    def add_waiting(self, buffer: BucketBuffer, world_size: int) -> None:
        """Adds what is owed to a dense bucket's gradients, of those to which this rank contributes.

        Mutates the bucket, which is about to be sent.
        """
        for slot in buffer.slots:
            if not slot.contributed or slot.name not in self._waiting:
                continue
            pieces = self._added[slot.name] = self._waiting.pop(slot.name)
            flat = slot.flat
            for piece in pieces:
                part = flat[piece.start : piece.start + piece.values.numel()]
                part += piece.values if slot.divided else piece.values * world_size

    def settle(self) -> None:
        """The round is over: what was not used of it is owed again.

        Where something is not finite the step will be left out, so all of it is undone; where no
        rank used a parameter, what was sent of it.
        """
        if not self._all_finite():
            for _, collective in self._sparse:
                collective.undo()
            self._waiting |= self._added
        else:
            for buffer, collective in self._sparse:
                for start, slot in _starts(buffer):
                    if not slot.contributed and slot.flag.item() == 0.0:
                        collective.undo_elements(start, start + slot.flat.numel())
        self._added = {}

    def add_to(self, totals: SparseTotals) -> None:
        """Adds the round that has just finished (`totals` is mutated)."""
        totals.steps += 1
        for _, collective in self._sparse:
            totals.selection_seconds += collective.selection_seconds
            totals.sent_bytes += collective.sent_bytes
            totals.memory_bytes += collective.memory_bytes
            totals.selected_bytes += collective.selected_bytes

    def scale(self, factor: float) -> None:
        """Multiplies all that is owed by a factor: the loss scale has changed."""
        for _, collective in self._sparse:
            for kept in collective.residuals():
                kept.residual.mul_(factor)
        for pieces in self._waiting.values():
            for piece in pieces:
                piece.values.mul_(factor)

    def _all_finite(self) -> bool:
        """Of the averages, which are the same on all ranks; sparse buckets have looked already."""
        if any(collective.saw_nonfinite for _, collective in self._sparse):
            return False
        dense = (b for b in self._buffers if not isinstance(b.collective, TopK))
        return all(bool(buffer.flat.isfinite().all()) for buffer in dense)


def merged(owed: Iterable[Owed]) -> list[Owed]:
    """The same with one piece a parameter: what came from several ranks is added."""
    return [
        _sum_of(name, pieces) if len(pieces) > 1 else pieces[0]
        for name, pieces in _grouped(owed).items()
    ]


def _sum_of(name: str, pieces: Sequence[Owed]) -> Owed:
    first = min(piece.start for piece in pieces)
    values = torch.zeros(max(p.start + p.values.numel() for p in pieces) - first)
    for piece in pieces:
        values[piece.start - first : piece.start - first + piece.values.numel()] += piece.values
    return Owed(name, first, values)


def _grouped(owed: Iterable[Owed]) -> dict[str, list[Owed]]:
    found: dict[str, list[Owed]] = {}
    for piece in owed:
        found.setdefault(piece.parameter, []).append(piece)
    return found


def _starts(buffer: BucketBuffer) -> Iterator[tuple[int, Slot]]:
    start = 0
    for slot in buffer.slots:
        yield start, slot
        start += slot.flat.numel()


def _by_parameter(buffer: BucketBuffer, kept: Kept) -> Iterator[Owed]:
    """The parts of what a rank has kept of a bucket."""
    start, residual = kept.start, kept.residual
    stop = start + residual.numel()
    for first, slot in _starts(buffer):
        low, high = max(start, first), min(stop, first + slot.flat.numel())
        if low < high:
            part = residual[low - start : high - start]
            yield Owed(slot.name, low - first, part, kept.second)
