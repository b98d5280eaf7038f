"""The one channel on which a rank's buckets go out, strictly one after the other.

Gloo runs two operations of a group at once, so a small one can overtake a large one; and a blocking
collective must not hold up backward. One thread that blocks in each collective (the GIL is free
meanwhile) gives both order and overlap, for every collective, however many rounds it has.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from slipstream.errors import RankFailure, UnsupportedModel
from slipstream.sync.stream_channel import StreamChannel

_GRACE_SECONDS = 5.0


class Finished(Protocol):
    """An operation that was submitted; its moments are in seconds of time.perf_counter()."""

    error: BaseException | None

    @property
    def start_seconds(self) -> float:
        """When it began; meaningful once it has ended."""
        ...

    @property
    def end_seconds(self) -> float:
        """When it had ended."""
        ...

    def wait(self, timeout_seconds: float) -> None:
        """Returns when its result may be used; raises its error."""
        ...


class Channel(Protocol):
    """Where operations go, one after the other."""

    def submit(self, operation: Callable[[], None]) -> Finished:
        """Queues an operation and returns at once."""
        ...

    def close(self, timeout_seconds: float) -> None:
        """Ends the channel after what is queued."""
        ...


class Ticket:
    """One submitted operation: when it started and ended, and whether it failed."""

    __slots__ = ("_done", "end_seconds", "error", "start_seconds")

    def __init__(self) -> None:
        self._done = threading.Event()
        self.start_seconds = 0.0
        self.end_seconds = 0.0
        self.error: BaseException | None = None

    def run(self, operation: Callable[[], None], failed: BaseException | None) -> None:
        """Runs the operation, unless one before it has failed; keeps its error."""
        self.start_seconds = time.perf_counter()
        self.error = failed
        try:
            if failed is None:
                operation()
        except BaseException as error:
            self.error = error
        finally:
            self.end_seconds = time.perf_counter()
            self._done.set()

    def wait(self, timeout_seconds: float) -> None:
        """Blocks until the operation has ended; raises its error.

        Raises RankFailure when it has not ended a few seconds after its own limit.
        """
        if not self._done.wait(timeout_seconds + _GRACE_SECONDS):
            raise RankFailure(f"A collective has not ended within {timeout_seconds:g} s.")
        if self.error is not None:
            raise self.error


Queue = queue.SimpleQueue["tuple[Callable[[], None], Ticket] | None"]


class ThreadChannel:
    """Runs operations in the order of submission in a thread of its own, started at first use.

    After an operation has failed all later ones fail with the same error: their peers are gone.
    """

    def __init__(self) -> None:
        self._queue: Queue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._finalizer = weakref.finalize(self, self._queue.put, None)

    def submit(self, operation: Callable[[], None]) -> Ticket:
        """Queues an operation and returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._queue,), name="slipstream-channel", daemon=True
            )
            self._thread.start()
        ticket = Ticket()
        self._queue.put((operation, ticket))
        return ticket

    def close(self, timeout_seconds: float) -> None:
        """Ends the thread after what is queued; gives up waiting for it after the limit."""
        self._finalizer()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            self._thread = None


class InlineChannel:
    """Runs each operation at once, in the caller's thread: for a world of one rank."""

    def submit(self, operation: Callable[[], None]) -> Ticket:
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
