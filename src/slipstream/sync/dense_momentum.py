"""Momentum of the gradients that are sent in full, where the optimizer must not have any.

With momentum correction what sparse buckets give out has its momentum already, so the optimizer is
plain; what dense buckets give out gets it here, after it was averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from slipstream.comm.sparse import Kept
from slipstream.sparsify import Momentum, Velocity
from slipstream.sync.buffers import BucketBuffer, places_of, unused_of
from slipstream.sync.owed import Owed, Places, laid_out, taken_apart


@dataclass
class _Bucket:
    """velocity: the same on all ranks; due: float32 [numel], owed by sparse buckets of before."""

    buffer: BucketBuffer
    places: Places
    numel: int
    velocity: Velocity
    due: torch.Tensor


class DenseMomentum:
    """The velocities of dense buckets, the same on every rank. Of them rank 0 speaks.

    total: replaces a tensor by its sum over ranks. loss_scale: of the round under way.
    """

    def __init__(
        self,
        buffers: Sequence[BucketBuffer],
        momentum: Momentum,
        total: Callable[[torch.Tensor], None],
        *,
        is_first_rank: bool,
    ) -> None:
        self.loss_scale = 1.0
        self._momentum = momentum
        self._total = total
        self._is_first_rank = is_first_rank
        self._buckets = [_bucket(buffer, momentum) for buffer in buffers]

    def owed(self) -> Iterator[Owed]:
        """The velocities, and what is still due; on rank 0 alone, as all ranks have the same."""
        for bucket in self._buckets if self._is_first_rank else ():
            yield from taken_apart(Kept(0, bucket.velocity.velocity, "velocity"), bucket.places)
            yield from taken_apart(Kept(0, bucket.due), bucket.places)

    def take_over(self, owed: dict[str, list[Owed]]) -> None:
        """Makes what is owed to these buckets' parameters theirs, and takes it out of `owed`.

        All ranks call it; it communicates.
        """
        for bucket in self._buckets:
            flats = laid_out(owed, bucket.places, bucket.numel)
            due = flats["residual"].add_(flats["second"])
            for mine, theirs in ((bucket.velocity.velocity, flats["velocity"]), (bucket.due, due)):
                self._total(theirs)
                mine.copy_(theirs)
            for name, _ in bucket.places:
                owed.pop(name, None)

    def clip(self, buffer: BucketBuffer, world_size: int) -> None:
        """Local clipping of every gradient that this rank contributes to a bucket (mutated)."""
        if self._momentum.clip_norm is None:
            return
        most = self._momentum.clip_norm * self.loss_scale / math.sqrt(world_size)
        for slot in buffer.slots:
            if slot.contributed:
                limit = most / world_size if slot.divided else most
                norm = torch.linalg.vector_norm(slot.flat, dtype=torch.float32)
                slot.flat.mul_((limit / norm).clamp_(max=1.0).nan_to_num_(nan=1.0))

    def apply(self) -> None:
        """The averages of a round become updates. Parameters that no rank used stay as they are."""
        for bucket in self._buckets:
            averages = bucket.buffer.flat[: bucket.numel]
            updates = bucket.velocity.add(averages.float())
            averages.copy_(updates + bucket.due)
            unused = list(unused_of(bucket.buffer))
            rest = [bucket.due[start:stop].clone() for start, stop in unused]
            bucket.due.zero_()
            for (start, stop), due in zip(unused, rest, strict=True):
                bucket.velocity.undo_elements(start, stop)
                bucket.due[start:stop] = due

    def scale(self, factor: float) -> None:
        """Multiplies velocities and what is due: the loss scale has changed."""
        for bucket in self._buckets:
            bucket.velocity.velocity.mul_(factor)
            bucket.due.mul_(factor)


def _bucket(buffer: BucketBuffer, momentum: Momentum) -> _Bucket:
    places = places_of(buffer)
    numel = sum(count for _, count in places)
    return _Bucket(
        buffer, places, numel, Velocity(numel, momentum, can_undo=True), torch.zeros(numel)
    )
