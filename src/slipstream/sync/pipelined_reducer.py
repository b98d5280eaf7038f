"""Carries out a plan in two halves: averages are scattered in backward, gathered in the forward.

    begin, ready, seal    as in `reducer`, but a bucket is reduce-scattered: afterwards this rank
                          holds its piece of every parameter's average, and `p.grad` is None
    norm                  one small message, where somebody asks for the norm of the averages
    gather                every gather bucket goes onto the channel, in the plan's order
    take                  one of them is back: its averages become `p.grad`

`finish` does the last two at once, where somebody wants the averages before the next forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from slipstream.errors import UnsupportedModel
from slipstream.plan import Plan
from slipstream.sync.buffers import nan_unless_finite
from slipstream.sync.incoming import Divisors, unusable, warn_sparse
from slipstream.sync.means import Means
from slipstream.sync.norms import Norms
from slipstream.sync.pieces import GatherBucket, Piece, ReduceBucket
from slipstream.sync.sections import lay_out
from slipstream.sync.tickets import Finished


class PipelinedReducer:
    """The buckets of one plan that gathers, over the parameters of one model.

    in_flight: a round was begun whose averages are not all in `p.grad`; gathering: they are on
    their way there. hold: buckets wait for the end of backward. waited_seconds: how long this round
    has kept the training thread waiting. Memory: as `lay_out` says.
    """

    def __init__(self, plan: Plan, means: Means) -> None:
        world_size = means.peers.world_size
        self.plan = plan
        self._layout = lay_out(plan, means.params, means.strides, means.peers.rank, world_size)
        self.buffers = self._layout.reduce
        self.gathers = self._layout.gather
        self.slots = self._layout.pieces
        self.in_flight = False
        self.gathering = False
        self.hold = False
        self.waited_seconds = 0.0
        device = self.buffers[0].row.device if self.buffers else torch.device("cpu")
        self._norms = Norms(device, means.collectives.get(), means.peers.rank, world_size)
        self._means = means
        self._world_size = world_size
        self._divisors = Divisors(world_size)
        self._next = 0

    @property
    def started(self) -> bool:
        """Whether a bucket of this round has gone out."""
        return self._next > 0

    def release(self) -> None:
        """Lets go of all memory; gradients that are views keep theirs. Nothing may be in flight."""
        for piece in self.slots.values():
            piece.drop_spent()
        self._layout.release()

    def begin(self) -> None:
        """Opens a round. The one before must have been finished."""
        self._next = 0
        self.hold = False
        self.in_flight = True
        self.waited_seconds = 0.0
        for bucket in self.buffers:
            bucket.begin()
        for gather in self.gathers:
            gather.ticket = None

    def before(self, name: str, timeout_seconds: float) -> None:
        """A gradient is about to be added to this parameter's, which must not be a spent one."""
        piece = self.slots.get(name)
        if piece is not None:
            piece.drop_spent()

    def keep(self, name: str) -> None:
        """Takes note of a gradient that was accumulated without synchronising, in `p.grad`."""
        self.slots[name].kept = True

    def ready(self, name: str) -> None:
        """Takes a gradient that has just been accumulated; sends its bucket if that is complete.

        Sets `p.grad` to None: what was in it is in the bucket.
        """
        piece = self.slots[name]
        bucket = piece.reduce
        if piece.contributed and bucket.ticket is not None:
            raise _came_twice(name)
        grad = piece.param.grad
        if piece.contributed:
            self._take_pending(bucket)
            self._absorb(piece, grad)
            return
        if piece.is_small and grad is not None and bucket.missing > 1:
            bucket.pending.append((piece, grad))  # as in `Reducer`
            piece.param.grad = None
            piece.contributed = True
        else:
            self._absorb(piece, grad)
        bucket.missing -= 1
        if bucket.missing == 0:
            self._take_pending(bucket)
            bucket.ready_seconds = time.perf_counter()
            if not self.hold:
                self._send_ready()

    @torch.no_grad()
    def seal(self) -> None:
        """Closes the round: missing gradients count as zero, and every bucket goes out."""
        for bucket in self.buffers:
            if bucket.missing:
                self._take_pending(bucket)
                for piece in bucket.slots:
                    if not piece.contributed:
                        self._fill(piece)
                bucket.missing = 0
                bucket.ready_seconds = time.perf_counter()
        self._send_ready()

    def norm(self, norm_type: float) -> torch.Tensor:
        """The norm of all averages (0-d, float64); waits. By all ranks alike, before `gather`."""
        rows = [bucket.averages for bucket in self.buffers if bucket.averages.numel()]
        self._await(self._norms.send(self._means.channel, rows, norm_type))
        return self._norms.total(norm_type)

    def scale(self, factor: torch.Tensor) -> None:
        """Multiplies this rank's pieces, which must have been reduced, before they are gathered."""
        for bucket in self.buffers:
            bucket.averages.mul_(factor)

    def await_reduced(self) -> None:
        """Returns when this rank's pieces and all flags are there."""
        for bucket in self.buffers:
            self._await(bucket.ticket)

    def gather(self) -> None:
        """Sends every gather bucket."""
        halves = self._means.halves
        for bucket in self.gathers:

            def travel(bucket: GatherBucket = bucket) -> None:
                bucket.fill()
                halves.all_gather(bucket.row, bucket.flat)

            bucket.ready_seconds = time.perf_counter()
            bucket.ticket = self._means.channel.submit(travel)
        self.gathering = True

    @torch.no_grad()
    def take(self, index: int) -> list[Piece]:
        """Waits for a gather bucket and makes its averages `p.grad`; returns what is in it.

        A parameter that nobody used keeps its gradient.
        """
        bucket = self.gathers[index]
        self._await(bucket.ticket)
        bucket.unpack()
        for piece in bucket.pieces:
            piece.kept = False
            if piece.reduce.used(piece):
                piece.spent = None
                piece.lend()
        return bucket.pieces

    def finish(self, timeout_seconds: float) -> float:
        """Gathers everything now; returns the seconds that the round has waited in all."""
        if not self.gathering:
            self.gather()
        for index in range(len(self.gathers)):
            self.take(index)
        self.end()
        return self.waited_seconds

    def drop(self) -> None:
        """Forgets the averages of a round that was not stepped with, once nothing is in flight."""
        self.await_reduced()
        for piece in self.slots.values():
            piece.kept = False
        self.end()

    def end(self) -> None:
        """The round is over."""
        self.in_flight = self.gathering = False

    def first_failed(self) -> int:
        """The index of the first bucket of this round that failed or has not come back."""
        for index, bucket in enumerate(self.buffers):
            if bucket.ticket is None or bucket.ticket.error is not None:
                return index
        return len(self.buffers) - 1

    def _await(self, ticket: Finished | None) -> None:
        """Waits for a ticket of this round; raises its error."""
        assert ticket is not None
        started = time.perf_counter()
        try:
            ticket.wait(self._means.timeout_seconds)
        finally:
            self.waited_seconds += time.perf_counter() - started

    def _take_pending(self, bucket: ReduceBucket) -> None:
        """Small gradients that had to wait for the last of their bucket."""
        for piece, grad in bucket.pending:
            self._move(piece, grad, piece.put)
        bucket.pending.clear()

    def _absorb(self, piece: Piece, grad: torch.Tensor | None) -> None:
        """Moves the gradient into its bucket."""
        # Runs in a hook, where autograd is off and caches are cold.
        if grad is not None:
            self._move(piece, grad, piece.add if piece.contributed else piece.put)
            piece.param.grad = None
        elif not piece.contributed:
            piece.put_nothing()
        piece.contributed = True

    def _move(
        self, piece: Piece, grad: torch.Tensor, how: Callable[[torch.Tensor, Divisors | None], None]
    ) -> None:
        grad = _usable(piece, grad)
        if self._means.check_finite and grad.numel():
            flag = piece.reduce.local_flags[piece.index]
            flag.add_(nan_unless_finite(grad, self._world_size).to(flag.dtype))
        how(grad, self._divisors if piece.reduce.divides_first else None)

    def _fill(self, piece: Piece) -> None:
        """What travels for a gradient whose hook did not fire in this round."""
        piece.drop_spent()
        grad = piece.param.grad
        if piece.kept and grad is not None:
            self._absorb(piece, grad)
            return
        piece.reduce.local_flags[piece.index] = 0.0
        if grad is None:
            piece.put_nothing()
        else:
            divisors = self._divisors if piece.reduce.divides_first else None
            piece.put(_usable(piece, grad), divisors)

    def _send_ready(self) -> None:
        while self._next < len(self.buffers) and self.buffers[self._next].missing == 0:
            self._send(self.buffers[self._next])
            self._next += 1

    def _send(self, bucket: ReduceBucket) -> None:
        bucket.complete()
        scatter, flat, row = self._means.halves.reduce_scatter, bucket.flat, bucket.row
        divisor = 1 if bucket.divides_first else self._world_size
        bucket.ticket = self._means.channel.submit(lambda: scatter(flat, row, divisor))


def _usable(piece: Piece, grad: torch.Tensor) -> torch.Tensor:
    if grad.requires_grad or grad.dtype is not piece.view.dtype:
        raise unusable(piece, grad)
    if grad.layout is torch.strided:
        return grad
    warn_sparse(piece)
    return grad.to_dense()


def _came_twice(name: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"Parameter {name!r} received gradient twice in one backward, the second time after its "
        "bucket had been sent (reentrant checkpointing of a shared module does this), which a "
        "pipelined plan cannot average; use checkpoint(..., use_reentrant=False) or another "
        "planner."
    )
