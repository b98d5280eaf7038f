"""What a channel hands out for an operation: when it ran, whether it failed, and a way to wait."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch

from slipstream.errors import RankFailure

_GRACE_SECONDS = 5.0

Operation = Callable[[], None]
Begin = Callable[[], Any]
"""Begins an operation and returns the backend's torch.distributed.Work."""


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


class Ticket:
    """One submitted operation: when it started and ended, and whether it failed."""

    __slots__ = ("_after", "_done", "end_seconds", "error", "start_seconds")

    def __init__(self, after: BegunTicket | None = None) -> None:
        """after: what must have ended before."""
        self._after = after
        self._done = threading.Event()
        self.start_seconds = 0.0
        self.end_seconds = 0.0
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._done.is_set()

    def run(self, operation: Operation, failed: BaseException | None) -> None:
        """Runs the operation, unless one before it has failed; keeps its error."""
        try:
            if self._after is not None:
                self._after.wait_for_end()
                failed = self._after.error
            self.start_seconds = time.perf_counter()
            self.error = failed
            if failed is None:
                operation()
        except BaseException as error:
            self.error = error
        finally:
            self._after = None
            self.end_seconds = time.perf_counter()
            self._done.set()

    def wait(self, timeout_seconds: float) -> None:
        """Blocks until the operation has ended; raises its error.

        Raises RankFailure when it has not ended a few seconds after its own limit.
        """
        if not self._done.wait(timeout_seconds + _GRACE_SECONDS):
            raise _not_ended(timeout_seconds)
        if self.error is not None:
            raise self.error


class BegunTicket:
    """An operation that the backend carries out: as `Ticket`, but no thread of ours waits for it.

    It is begun by `come_after`, or by the end of the operation before it, in the backend's thread.
    """

    __slots__ = (
        "_before",
        "_begin",
        "_begun",
        "_following",
        "_lock",
        "_work",
        "end_seconds",
        "error",
        "start_seconds",
    )

    def __init__(self, begin: Begin) -> None:
        self._begin: Begin | None = begin
        self._begun = threading.Event()
        self._before: BegunTicket | None = None
        self._following: BegunTicket | None = None
        self._lock = threading.Lock()
        self._work: Any = None
        self.start_seconds = 0.0
        self.end_seconds = 0.0
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.end_seconds > 0.0

    def come_after(self, before: Ticket | BegunTicket | None) -> None:
        """Begins it, now or when `before`, of which nothing else comes after, has ended well.

        before: a `Ticket` is done. After one that failed it fails with the same error.
        """
        if isinstance(before, BegunTicket):
            self._before = before
            with before._lock:
                if not before.done:
                    before._following = self
                    return
        _go_on(self, before.error if before is not None else None)

    def wait(self, timeout_seconds: float) -> None:
        """As that of `Ticket`."""
        if not self._begun.is_set():
            self._wait_for_turn(timeout_seconds)
        if self._work is None:
            assert self.error is not None
            raise self.error
        try:
            self._work.wait(timedelta(seconds=timeout_seconds + _GRACE_SECONDS))
        except RuntimeError as error:
            if not self.done:
                raise _not_ended(timeout_seconds) from error
            raise

    def wait_for_end(self) -> None:
        """Blocks until it has ended, well or badly: the group's own limit is the backend's."""
        self._begun.wait()
        if self._work is not None:
            with contextlib.suppress(RuntimeError):
                self._work.wait()

    def _wait_for_turn(self, timeout_seconds: float) -> None:
        # the backend wakes those who wait for the work before it after it has begun this one
        before = self._before
        if before is not None:
            before.wait(timeout_seconds)
        if not self._begun.wait(timeout_seconds + _GRACE_SECONDS):
            raise _not_ended(timeout_seconds)

    def _try_to_begin(self, failed: BaseException | None) -> bool:
        """Whether it is on its way; otherwise its error is `failed`, or one of its own."""
        begin, self._begin, self._before = self._begin, None, None
        assert begin is not None
        self.start_seconds = time.perf_counter()
        try:
            if failed is None:
                self._work = begin()
                self._work.get_future().add_done_callback(self._ended)
                self._begun.set()
                return True
            self.error = failed
        except Exception as error:
            self.error = error
        return False

    def _end(self) -> BegunTicket | None:
        """Puts down that it has ended; returns what comes after it."""
        with self._lock:
            self.end_seconds = time.perf_counter()
            self._begun.set()
            following, self._following = self._following, None
            return following

    def _ended(self, future: torch.futures.Future[Any]) -> None:
        # in the backend's thread, before those who wait are woken
        try:
            future.value()
        except Exception as error:
            self.error = error
        following = self._end()
        if following is not None:
            _go_on(following, self.error)


def _go_on(ticket: BegunTicket, failed: BaseException | None) -> None:
    """Begins the first of a chain that can be begun; those before it fail."""
    following: BegunTicket | None = ticket
    while following is not None and not following._try_to_begin(failed):
        failed = following.error
        following = following._end()


def _not_ended(timeout_seconds: float) -> RankFailure:
    return RankFailure(f"A collective has not ended within {timeout_seconds:g} s.")
