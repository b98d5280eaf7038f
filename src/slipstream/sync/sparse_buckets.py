"""The sparse buckets of a reducer, and what is owed to the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slipstream.comm import Collectives
from slipstream.comm.sparse import TopK
from slipstream.sparsify import Momentum
from slipstream.sync.buffers import BucketBuffer, places_of, unused_of
from slipstream.sync.dense_momentum import DenseMomentum
from slipstream.sync.owed import Owed, by_parameter, laid_out, merged, taken_apart


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

    momentum: of momentum correction, which then is the engine's in dense buckets, too. What is owed
    to parameters in dense buckets is added to their gradients once; with momentum correction to
    their updates, in which no velocity multiplies it.
    """

    def __init__(
        self,
        buffers: Sequence[BucketBuffer],
        collectives: Collectives,
        momentum: Momentum | None,
        *,
        is_first_rank: bool,
    ) -> None:
        self._buffers = buffers
        self._sparse = [
            (buffer, buffer.collective) for buffer in buffers if isinstance(buffer.collective, TopK)
        ]
        self._dense = [b for b in buffers if not isinstance(b.collective, TopK)]
        self._momentum: DenseMomentum | None = None
        if momentum is not None:
            total = collectives.get().sum_
            self._momentum = DenseMomentum(
                self._dense, momentum, total, is_first_rank=is_first_rank
            )
        self._waiting: dict[str, list[Owed]] = {}
        self._added: dict[str, list[Owed]] = {}

    def __bool__(self) -> bool:
        return bool(self._sparse or self._waiting or self._added or self._momentum)

    def owed(self) -> list[Owed]:
        """What this rank owes, to be read before the next round. Values are those kept, no copies.

        Elements of which nothing is owed are left out where a whole parameter has none.
        """
        found = [piece for pieces in self._waiting.values() for piece in pieces]
        for buffer, collective in self._sparse:
            for kept in collective.kept():
                found += taken_apart(kept, places_of(buffer))
        if self._momentum is not None:
            found += self._momentum.owed()
        return [piece for piece in found if bool(piece.values.any())]

    def take_over(self, owed: Iterable[Owed]) -> None:
        """Distributes what is owed over these buckets; all ranks call it, and it communicates.

        What is owed of parameters in none of the buckets, which are frozen, waits for another plan.
        Velocities are dropped where there is no momentum correction any more.
        """
        has_velocities = self._momentum is not None
        left = by_parameter(p for p in owed if has_velocities or p.kind != "velocity")
        for buffer, collective in self._sparse:
            places = places_of(buffer)
            collective.take_over(laid_out(left, places, collective.numel))
            for name, _ in places:
                left.pop(name, None)
        if self._momentum is not None:
            self._momentum.take_over(left)
        self._waiting = by_parameter(merged(p for pieces in left.values() for p in pieces))

    def begin(self, step: int, loss_scale: float) -> None:
        """A round begins. step: by which selectors that draw at random draw, as in every run."""
        for _, collective in self._sparse:
            collective.draw = step
        if self._momentum is not None:
            self._momentum.loss_scale = loss_scale

    def before_sending(self, buffer: BucketBuffer, world_size: int) -> None:
        """Clips a bucket's gradients; to a dense one's adds what is owed to them.

        Mutates the bucket, which is about to be sent. Added is what is owed to gradients to which
        this rank contributes.
        """
        if self._momentum is not None:
            self._momentum.clip(buffer, world_size)
            return
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
                for start, stop in unused_of(buffer):
                    collective.undo_elements(start, stop)
            if self._momentum is not None:
                self._momentum.apply()
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
            for kept in collective.kept():
                kept.values.mul_(factor)
        if self._momentum is not None:
            self._momentum.scale(factor)
        for pieces in self._waiting.values():
            for piece in pieces:
                piece.values.mul_(factor)

    def _all_finite(self) -> bool:
        """Of the averages, which are the same on all ranks; sparse buckets have looked already."""
        if any(collective.saw_nonfinite for _, collective in self._sparse):
            return False
        return all(bool(buffer.flat.isfinite().all()) for buffer in self._dense)
