"""SIGTERM and SIGINT as a flag that the loop reads between two steps."""

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Self

# One Ctrl-C reaches a rank twice: from the terminal, and from the launcher that passes it on.
_SAME_REQUEST_SECONDS = 2.0


class StopSignal:
    """While entered, the first SIGTERM or SIGINT sets `requested`; a second one acts at once.

    "At once" is what the process did before: KeyboardInterrupt for SIGINT, death for SIGTERM.
    Signals within two seconds of the first count as the same request. Python can install handlers
    only in the main thread: entered elsewhere (ranks as threads), only `request` sets the flag.
    On exit the handlers from before are back.
    """

    def __init__(self, grace_seconds: float = 30.0) -> None:
        """grace_seconds: how long after a signal the process may live (cluster managers kill)."""
        self.grace_seconds = grace_seconds
        self.cause: str | None = None
        """Name of the first signal, such as "SIGTERM"."""
        self._requested_at: float | None = None
        self._previous: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self._requested_at is not None

    def remaining_seconds(self) -> float:
        """What is left of the grace time, never below 0; all of it before a signal."""
        if self._requested_at is None:
            return self.grace_seconds
        return max(0.0, self.grace_seconds - (time.monotonic() - self._requested_at))

    def request(self, cause: str) -> None:
        """Ask to stop without a signal (another rank got one); the grace time starts now."""
        if self._requested_at is None:
            self.cause, self._requested_at = cause, time.monotonic()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._requested_at is None:
            self.request(signal.Signals(number).name)
        elif time.monotonic() - self._requested_at > _SAME_REQUEST_SECONDS:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        for number, previous in self._previous.items():
            # None: a handler that was not installed from Python; it cannot be put back.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)  # type: ignore[arg-type]
        self._previous.clear()
