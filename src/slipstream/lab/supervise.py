"""The job while it runs: who failed first, who is told to end, and who is made to."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.lab.control import Control
from slipstream.lab.job import Member
from slipstream.lab.network import Network
from slipstream.lab.settings import LabSettings, node_name

TIMED_OUT = 124
"""The exit code of a command that exceeded its limit, as that of timeout(1)."""

_SIGNAL_BASE = 128
_LAST_SECONDS = 5.0
_TAIL_BYTES = 4000


@dataclass(frozen=True)
class Failure:
    """The process that failed first. exit_code: as in a shell, 128 and a signal's number."""

    node: int
    rank: int
    exit_code: int


@dataclass(frozen=True)
class JobEnd:
    """How the job ended. exit_code: 0, or that of the first failure, the signal, or the limit."""

    exit_code: int
    seconds: float
    failure: Failure | None
    cut_seconds: float | None


def say(text: str) -> None:
    """Print a line of the lab's own, beside what the command prints."""
    print(f"lab: {text}", file=sys.stderr, flush=True)


class Supervisor:
    """Watches the processes of a job to the end of the last one.

    A signal goes on to all of them; once one failed, those on its node are told to end, as by
    torchrun, and the others are left to notice. After ``grace_seconds`` all are told to end, 5 s
    later killed. A second signal kills at once.
    """

    def __init__(
        self,
        members: Sequence[Member],
        network: Network,
        settings: LabSettings,
        control: Control,
    ) -> None:
        self._running = {os.pidfd_open(member.process.pid): member for member in members}
        self._network = network
        self._settings = settings
        self._control = control
        self._start = time.monotonic()
        self._plan: list[tuple[float, Callable[[], None]]] = []
        self._failure: Failure | None = None
        self._exit_code = 0
        self._cut_seconds: float | None = None
        if settings.cut is not None:
            self._later(settings.cut.after_seconds, self._cut)
        if settings.limit_seconds is not None:
            self._later(settings.limit_seconds, self._time_out)

    def run(self) -> JobEnd:
        """Wait until every process has ended, by itself or killed."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control.pipe, selectors.EVENT_READ)
            for descriptor in self._running:
                selector.register(descriptor, selectors.EVENT_READ)
            while self._running:
                for key, _ in selector.select(self._seconds_to_next()):
                    if key.fd == self._control.pipe:
                        self._obey()
                    else:
                        selector.unregister(key.fd)
                        self._reap(key.fd)
                self._act()
        seconds = time.monotonic() - self._start
        return JobEnd(self._exit_code, seconds, self._failure, self._cut_seconds)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._plan.append((time.monotonic() + seconds, action))

    def _seconds_to_next(self) -> float | None:
        if not self._plan:
            return None
        return max(0.0, min(when for when, _ in self._plan) - time.monotonic())

    def _act(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        due = [action for when, action in self._plan if when <= now]
        self._plan = [(when, action) for when, action in self._plan if when > now]
        for action in due:
            action()

    def _obey(self) -> None:
        """Hand a signal on; kill all at the second, or when the user's side is gone."""
        for number in self._control.read():
            if len(self._control.signals) > 1:
                self._signal(signal.SIGKILL)
                continue
            if not self._exit_code:
                self._exit_code = _SIGNAL_BASE + number
            self._signal(number)
            self._later(self._settings.grace_seconds, self._kill)
        if self._control.owner_gone:
            self._signal(signal.SIGKILL)
            sys.exit(1)

    def _reap(self, descriptor: int) -> None:
        """Take note of a process that ended."""
        member = self._running.pop(descriptor)
        os.close(descriptor)
        code = member.process.wait()
        if code and not self._exit_code:
            self._fail(member, code if code > 0 else _SIGNAL_BASE - code)

    def _fail(self, member: Member, exit_code: int) -> None:
        """The first failure: tell it, end its node, and give the others time to notice."""
        start = member.start
        self._exit_code = exit_code
        self._failure = Failure(start.node, start.rank, exit_code)
        say(f"{_describe(member)} ended with exit code {exit_code}")
        if member.log is not None:
            sys.stderr.write(_tail(member))
        self._signal(signal.SIGTERM, start.node)
        self._later(self._settings.grace_seconds, self._tell_late)

    def _tell_late(self) -> None:
        names = ", ".join(_describe(member) for member in self._running.values())
        grace = self._settings.grace_seconds
        say(f"{names} did not notice within {grace:g} s and will be ended")
        self._signal(signal.SIGTERM)
        self._later(_LAST_SECONDS, self._kill)

    def _time_out(self) -> None:
        say(f"the command runs longer than {self._settings.limit_seconds:g} s and will be ended")
        if not self._exit_code:
            self._exit_code = TIMED_OUT
        self._signal(signal.SIGTERM)
        self._later(_LAST_SECONDS, self._kill)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _cut(self) -> None:
        assert self._settings.cut is not None
        node = self._settings.cut.node
        self._network.cut(node)
        self._cut_seconds = time.monotonic() - self._start
        say(f"the link of {node_name(node)} is down")

    def _signal(self, number: int, node: int | None = None) -> None:
        """Send a signal to the processes that still run, of one node or of all."""
        for member in self._running.values():
            if node is None or member.start.node == node:
                member.process.send_signal(number)


def _describe(member: Member) -> str:
    where = node_name(member.start.node)
    return where if member.start.name == where else f"rank {member.start.rank} on {where}"


def _tail(member: Member) -> str:
    """The last that a process printed to its file."""
    assert member.log is not None
    with member.log.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
        text = log.read().decode(errors="replace")
    if not text.strip():
        return ""
    return f"lab: {_describe(member)} printed last:\n{text.rstrip()}\n"
