"""What commands share whose work is done by ranks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar

import typer

from slipstream.errors import SlipstreamError

Result = TypeVar("Result")


def on_own_ranks(work: Callable[[], Result]) -> Result:
    """The result of work that starts ranks here; a signal ends the command with its exit code."""
    from slipstream.train.launch.interruption import Interrupted

    try:
        return work()
    except Interrupted as stop:
        print(f"slipstream: {stop}", file=sys.stderr)
        raise typer.Exit(128 + stop.signal_number) from stop


def as_rank(work: Callable[[], Result], rank: int) -> Result:
    """The result of work done as a rank of the job around; a rank that fails leaves at once."""
    try:
        return work()
    except Exception as error:
        _leave_failed(error, rank)


def _leave_failed(error: Exception, rank: int) -> NoReturn:
    """Say what ended this rank, to the user and to its starter, and end the process."""
    # Another rank that ended with the same error makes torchrun end this one: not before it has
    # spoken. It leaves by itself in a moment.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not isinstance(error, SlipstreamError):
        traceback.print_exception(error)
    from slipstream.train.launch.failure import attributed, write_error

    print(f"slipstream: {attributed(rank, str(error))}", file=sys.stderr, flush=True)
    write_error(error)
    # Threads that still wait for a peer would keep a failed rank, and so the job, alive.
    os._exit(1)
