"""The one channel on which a rank's buckets go out, strictly one after the other.

Gloo runs two operations of a group at once, so a small one can overtake a large one; and a blocking
collective must not hold up backward. One thread that blocks in each collective (the GIL is free
meanwhile) gives both order and overlap, for every collective, however many rounds it has. Where
nothing is on the way, a collective that the backend carries out by itself is begun by the caller:
waking a thread for it takes longer than a small bucket's journey when all cores compute.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from slipstream.errors import UnsupportedModel
from slipstream.sync.stream_channel import StreamChannel
from slipstream.sync.tickets import BegunTicket, Finished, Operation, Ticket

Begin = Callable[[], Any]


class Channel(Protocol):
    """Where operations go, one after the other."""

    def submit(self, operation: Operation, begin: Begin | None = None) -> Finished:
        """Queues an operation and returns at once.

        begin: does the same without blocking and returns the backend's handle, or returns None and
        does nothing where it cannot; the channel uses it or `operation`.
        """
        ...

    def close(self, timeout_seconds: float) -> None:
        """Ends the channel after what is queued."""
        ...


Queue = queue.SimpleQueue["tuple[Operation, Ticket] | None"]


class ThreadChannel:
    """Carries operations out in the order of submission, in a thread of its own where it must.

    After an operation has failed all later ones fail with the same error: their peers are gone.
    """

    def __init__(self) -> None:
        self._queue: Queue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Ticket | BegunTicket | None = None
        self._finalizer = weakref.finalize(self, self._queue.put, None)

    def submit(self, operation: Operation, begin: Begin | None = None) -> Ticket | BegunTicket:
        """Begins an operation, or queues it behind another, and returns at once."""
        last = self._last
        if begin is not None and (last is None or (last.done and last.error is None)):
            start_seconds = time.perf_counter()
            try:
                work = begin()
            except Exception as error:
                self._last = Ticket()
                self._last.run(operation, error)
                return self._last
            if work is not None:
                self._last = BegunTicket(work, start_seconds)
                return self._last
        self._last = self._enqueue(operation, last if isinstance(last, BegunTicket) else None)
        return self._last

    def _enqueue(self, operation: Operation, after: BegunTicket | None) -> Ticket:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._queue,), name="slipstream-channel", daemon=True
            )
            self._thread.start()
        ticket = Ticket(after)
        self._queue.put((operation, ticket))
        return ticket

    def close(self, timeout_seconds: float) -> None:
        """Ends the thread after what is under way; gives up waiting for it after the limit."""
        self._finalizer()
        if isinstance(self._last, BegunTicket) and not self._last.done:
            with contextlib.suppress(Exception):
                self._last.wait(timeout_seconds)
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            self._thread = None


class InlineChannel:
    """Runs each operation at once, in the caller's thread: for a world of one rank."""

    def submit(self, operation: Operation, begin: Begin | None = None) -> Ticket:
        """Runs the operation and returns its ticket, done."""
        ticket = Ticket()
        ticket.run(operation, None)
        return ticket

    def close(self, timeout_seconds: float) -> None:
        """Nothing to end."""


def channel_for(device: torch.device, world_size: int) -> Channel:
    """The channel of a rank on this device. Raises UnsupportedModel for other than CPU and CUDA."""
    if device.type == "cuda":
        return StreamChannel(device, torch.cuda)
    if device.type != "cpu":
        raise UnsupportedModel(
            f"The model lives on a {device.type} device; gradients are averaged on CPUs and on "
            "CUDA devices. Move the model there first."
        )
    return InlineChannel() if world_size == 1 else ThreadChannel()


def _work(operations: Queue) -> None:
    """The thread's body: it holds the queue alone, so that a forgotten channel can be collected."""
    failed: BaseException | None = None
    with torch.no_grad():
        while (item := operations.get()) is not None:
            operation, ticket = item
            ticket.run(operation, failed)
            failed = ticket.error
            del item, operation, ticket
