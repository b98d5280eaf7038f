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
            raise RankFailure(f"A collective has not ended within {timeout_seconds:g} s.")
        if self.error is not None:
            raise self.error


class BegunTicket:
    """An operation that the backend carries out, as `Ticket`."""

    __slots__ = ("_work", "end_seconds", "error", "start_seconds")

    def __init__(self, work: Any, start_seconds: float) -> None:
        self._work = work
        self.start_seconds = start_seconds
        self.end_seconds = 0.0
        self.error: BaseException | None = None
        work.get_future().add_done_callback(self._ended)

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.end_seconds > 0.0

    def wait(self, timeout_seconds: float) -> None:
        """As that of `Ticket`."""
        try:
            self._work.wait(timedelta(seconds=timeout_seconds + _GRACE_SECONDS))
        except RuntimeError as error:
            if not self.done:
                raise RankFailure(
                    f"A collective has not ended within {timeout_seconds:g} s."
                ) from error
            raise

    def wait_for_end(self) -> None:
        """Blocks until it has ended, well or badly: the group's own limit is the backend's."""
        with contextlib.suppress(RuntimeError):
            self._work.wait()

    def _ended(self, future: torch.futures.Future[Any]) -> None:
        # in the backend's thread, before those who wait are woken
        try:
            future.value()
        except Exception as error:
            self.error = error
        self.end_seconds = time.perf_counter()
