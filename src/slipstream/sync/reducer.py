"""Carries out a plan: gradients into buckets, buckets onto the channel, averages into `p.grad`.

A round is one synchronised backward, in these phases:

    begin    every bucket waits for all of its gradients
    ready    a gradient is copied into its bucket; a full bucket goes out, in plan order
    seal     backward has ended: what is missing counts as zero, the remaining buckets go out
    finish   every bucket is back; gradients that only other ranks used are handed out
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping

import torch
from torch import nn

from slipstream.comm import Collectives
from slipstream.plan import Plan
from slipstream.sparsify import Momentum
from slipstream.sync.buffers import BucketBuffer, Slot, Strides, mark_finite
from slipstream.sync.channel import Channel
from slipstream.sync.incoming import Divisors, unusable, warn_sparse
from slipstream.sync.sparse_buckets import SparseBuckets


class Reducer:
    """The buckets of one plan over the parameters of one model.

    params: all trainable parameters by name; strides: the agreed ones by name. Gradients become
    views of the buckets (`p.grad` is replaced), except where a parameter's layout is another than
    the agreed one. Memory: the gradients once, plus one element per parameter.
    """

    def __init__(
        self,
        plan: Plan,
        params: Mapping[str, nn.Parameter],
        strides: Mapping[str, Strides],
        collectives: Collectives,
        channel: Channel,
        *,
        rank: int,
        world_size: int,
        check_finite: bool,
        momentum: Momentum | None = None,
    ) -> None:
        self.plan = plan
        self.buffers = [
            BucketBuffer(bucket, params, strides, collectives, momentum) for bucket in plan.reduce
        ]
        self.sparse = SparseBuckets(self.buffers, collectives, momentum, is_first_rank=rank == 0)
        self.slots = {slot.name: slot for buffer in self.buffers for slot in buffer.slots}
        self.in_flight = False
        self.hold = False
        self._always_hold = False
        self._next = 0
        self._late: list[BucketBuffer] = []
        self._channel = channel
        self._world_size = world_size
        self._divisors = Divisors(world_size)
        self._check_finite = check_finite

    @property
    def started(self) -> bool:
        """Whether a bucket of this round has gone out."""
        return self._next > 0

    def release(self) -> None:
        """Lets go of all memory; gradients that are views keep theirs. Nothing may be in flight."""
        for buffer in self.buffers:
            buffer.slots.clear()  # slots and buffers hold each other
        self.buffers.clear()
        self.slots.clear()

    def begin(self) -> None:
        """Opens a round. The one before must have been finished."""
        self._next = 0
        self._late = []
        self.hold = self._always_hold
        self.in_flight = True
        for buffer in self.buffers:
            buffer.begin()

    def keep(self, name: str) -> None:
        """Takes note of a gradient that was accumulated without synchronising."""
        slot = self.slots[name]
        self._absorb(slot, slot.param.grad, divide=False)
        slot.kept = True

    def ready(self, name: str) -> None:
        """Takes a gradient that has just been accumulated; sends its bucket if that is complete."""
        slot = self.slots[name]
        if slot.contributed:
            self._again(slot)
            return
        buffer = slot.buffer
        slot.contributed = True
        if slot.is_small and buffer.missing > 1:
            buffer.pending.append((slot, slot.param.grad))
        else:
            self._take(slot, slot.param.grad)
        buffer.missing -= 1
        if buffer.missing == 0:
            self._take_pending(buffer)
            buffer.ready_seconds = time.perf_counter()
            if not self.hold:
                self._send_ready()

    def before(self, name: str, timeout_seconds: float) -> None:
        """Makes the gradient's view fit to be added to: not in flight, and in a round undivided."""
        slot = self.slots.get(name)
        if slot is None or not self.in_flight:
            return
        if slot.buffer.ticket is not None:
            slot.buffer.ticket.wait(timeout_seconds)
        elif slot.divided and slot.contributed:
            slot.view.mul_(self._world_size)
            slot.divided = False

    def seal(self) -> None:
        """Closes the round: missing gradients count as zero, and every bucket goes out."""
        for buffer in self.buffers:
            if buffer.missing:
                self._take_pending(buffer)
                for slot in buffer.slots:
                    if not slot.contributed:
                        self._fill(slot)
                buffer.missing = 0
                buffer.ready_seconds = time.perf_counter()
        self._send_ready()
        for buffer in self._late:
            self._send(buffer)

    def finish(self, timeout_seconds: float) -> float:
        """Waits for every bucket and hands the averages out; returns the seconds spent waiting.

        Raises the error of the first bucket that failed.
        """
        started = time.perf_counter()
        for buffer in self.buffers:
            assert buffer.ticket is not None
            buffer.ticket.wait(timeout_seconds)
        waited = time.perf_counter() - started
        if self.sparse:
            self.sparse.settle()
        cleared = self._cleared()
        for buffer in self.buffers:
            for slot in buffer.slots:
                if slot.copy_back and slot.param.grad is not None:
                    slot.param.grad.copy_(slot.view)
                elif not slot.contributed:
                    self._settle(slot, cleared)
                slot.kept = False
        self.in_flight = False
        return waited

    def first_failed(self) -> int:
        """The index of the first bucket of this round that failed or has not come back."""
        for index, buffer in enumerate(self.buffers):
            if buffer.ticket is None or buffer.ticket.error is not None:
                return index
        return len(self.buffers) - 1

    def _take(self, slot: Slot, grad: torch.Tensor | None) -> None:
        """What a rank contributes to a round goes into its bucket."""
        self._absorb(slot, grad, divide=not self.hold)
        if self._check_finite:
            mark_finite(slot, self._world_size)

    def _take_pending(self, buffer: BucketBuffer) -> None:
        """Small gradients that had to wait for the last of their bucket.

        Copying a bias takes microseconds, but several times as long in a hook of its own, where
        nothing that it needs is in the processor's caches, as in a loop over them all.
        """
        for slot, grad in buffer.pending:
            self._take(slot, grad)
        buffer.pending.clear()

    def _absorb(self, slot: Slot, grad: torch.Tensor | None, *, divide: bool) -> None:
        """Moves the gradient into the bucket, divided if asked; `p.grad` becomes the view of it.

        Where `p.grad` is not `grad` any more, the user's own hook has put it aside: it stays so.
        Division rides along with the copy, which costs nothing; a pass of its own over the sums
        would cost as much as the copy.
        """
        # Runs once per parameter with cold caches, where each call and attribute counts. No
        # torch.no_grad(): autograd is off inside its own hooks.
        if grad is None or slot.holds(grad):
            return
        param, view = slot.param, slot.view
        if grad.requires_grad or grad.dtype is not view.dtype:
            raise unusable(slot, grad)
        dense = grad
        if grad.layout is not torch.strided:
            warn_sparse(slot)
            dense = grad.to_dense()
        if divide and slot.buffer.divides_first:
            self._divisors.divide(dense, out=view)
            slot.divided = True
        else:
            view.copy_(dense)
            slot.divided = False
        slot.copy_back = param.stride() != slot.stride
        if param.grad is grad and (not slot.copy_back or dense is not grad):
            slot.lend()

    def _again(self, slot: Slot) -> None:
        """A second gradient in one round, after its bucket may have gone out without it."""
        buffer = slot.buffer
        first_late = buffer.ticket is not None and buffer not in self._late
        if first_late:
            buffer.flags.fill_(1.0)
            for member in buffer.slots:
                member.divided = False  # they hold averages, of which the average is taken
        self._absorb(slot, slot.param.grad, divide=False)
        if self._check_finite:
            for member in buffer.slots if first_late else [slot]:
                mark_finite(member, self._world_size)
        if not first_late:
            return
        self._late.append(buffer)
        self.hold = self._always_hold = True
        warnings.warn(
            f"Parameter {slot.name!r} received gradient twice in one backward, the second time "
            "after its bucket had been sent (reentrant checkpointing of a shared module does "
            "this). The bucket is sent again, and from now on buckets wait for the end of "
            "backward; use_reentrant=False keeps the overlap.",
            stacklevel=2,
        )

    def _fill(self, slot: Slot) -> None:
        """What travels for a gradient whose hook did not fire in this round."""
        grad = slot.param.grad
        slot.had_gradient = grad is not None
        if slot.kept and grad is not None:
            self._absorb(slot, grad, divide=True)
            slot.contributed = True
            if self._check_finite:
                mark_finite(slot, self._world_size)
            return
        slot.flag.zero_()
        with torch.no_grad():
            if grad is None:
                slot.view.zero_()
                slot.divided = True
            elif slot.holds(grad):
                slot.saved = slot.view.clone()
            else:
                slot.view.copy_(grad)

    def _send_ready(self) -> None:
        while self._next < len(self.buffers) and self.buffers[self._next].missing == 0:
            self._send(self.buffers[self._next])
            self._next += 1

    def _send(self, buffer: BucketBuffer) -> None:
        if buffer.divides_first:
            with torch.no_grad():
                for slot in buffer.slots:
                    if not slot.divided:
                        self._divisors.divide(slot.view, out=slot.view)
                        slot.divided = True
        if self.sparse:
            self.sparse.before_sending(buffer, self._world_size)
        if self._check_finite:
            buffer.local_flags = buffer.flags.clone()
        collective, flat = buffer.collective, buffer.flat
        divisor = 1 if buffer.divides_first else self._world_size
        buffer.ticket = self._channel.submit(
            lambda: collective.sum_(flat, divisor), lambda: collective.begin(flat, divisor)
        )

    def _settle(self, slot: Slot, cleared: bool) -> None:
        """Hands out a gradient to which this rank contributed nothing, or leaves it as it was."""
        param = slot.param
        with torch.no_grad():
            if slot.flag.item() == 0.0:  # no rank used it
                if slot.saved is not None:
                    slot.view.copy_(slot.saved)
            elif not cleared and (param.grad is not None or not slot.had_gradient):
                slot.lend()
        slot.saved = None

    def _cleared(self) -> bool:
        """Whether the user dropped the gradients while they were in flight (GANs do)."""
        took_part = [slot for slot in self.slots.values() if slot.contributed]
        return bool(took_part) and all(slot.param.grad is None for slot in took_part)
