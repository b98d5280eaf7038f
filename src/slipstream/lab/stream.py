"""Plain TCP streams over the lab's links, as fast as they go.

Each end is a process that copies data as any program does, so the streams cost about the processor
time of a transport that does nothing else.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.errors import LabError
from slipstream.lab.network import MTU_BYTES, Network, burst_bytes
from slipstream.lab.settings import node_address, node_name
from slipstream.words import percent

_CHUNK_BYTES = 256 * 1024
_MEASURE_SECONDS = 0.5
_MIN_MEASURED_BYTES = 100 * MTU_BYTES
_SLOWEST_SHARE = 0.05
_CONNECT_SECONDS = 10.0
_LOOK_EVERY_SECONDS = 0.1
_RATE = struct.Struct("d")


class Interrupted(Exception):
    """The lab was told to stop before its command had started."""


@dataclass(frozen=True)
class Streams:
    """Streams that ran at the same time.

    bits_per_second: payload that each moved. busiest: the largest share of one core that an end of
    a stream used. own_share, others_share: of the time of all cores, what the streams took (with
    the kernel's work for the network), and what other programs took meanwhile.
    """

    bits_per_second: tuple[float, ...]
    busiest: float
    own_share: float
    others_share: float


@dataclass
class _Ends:
    """Processes at the ends of streams; killed and reaped together."""

    started: dict[int, float] = field(default_factory=dict)

    def start(self, task: Callable[[], None]) -> None:
        """Run ``task`` in a process of its own; should it end, its pipe's end tells."""
        pid = os.fork()
        if pid == 0:
            try:
                task()
            finally:
                os._exit(0)
        self.started[pid] = time.monotonic()

    def kill(self) -> list[tuple[float, float]]:
        """End them; the processor time that each took, and the time that it lived, in seconds."""
        spent = []
        for pid, started in self.started.items():
            os.kill(pid, signal.SIGKILL)
            usage = os.wait4(pid, 0)[2]
            spent.append((usage.ru_utime + usage.ru_stime, time.monotonic() - started))
        self.started.clear()
        return spent


@dataclass(frozen=True)
class _CoreTime:
    """What all cores together have done since the system started, in seconds."""

    all: float
    idle: float
    interrupts: float

    @classmethod
    def read(cls) -> _CoreTime:
        line = Path("/proc/stat").read_text().split("\n", 1)[0]
        user, nice, system, idle, io, hard, soft, steal = map(int, line.split()[1:9])
        ticks = os.sysconf("SC_CLK_TCK")
        passed = user + nice + system + idle + io + hard + soft + steal
        return cls(passed / ticks, (idle + io) / ticks, (hard + soft) / ticks)


def measure_streams(
    network: Network,
    pairs: Sequence[tuple[int, int]],
    rate_bits_per_second: float,
    stop: Callable[[], bool],
) -> Streams:
    """Send from the first to the second node of each pair, all at once, and measure at the rate.

    What the token bucket lets through at once is left out. Takes about half a second, longer below
    15 Mbit/s. ``stop`` is asked meanwhile; where it says yes the streams end and Interrupted is
    raised. Raises LabError when a stream breaks, or moves less than a twentieth of its rate.
    """
    skipped = 2 * burst_bytes(rate_bits_per_second)
    measured = max(_MIN_MEASURED_BYTES, int(rate_bits_per_second / 8 * _MEASURE_SECONDS))
    limit_seconds = (skipped + measured) * 8 / rate_bits_per_second / _SLOWEST_SHARE
    ends, results = _Ends(), []
    before = _CoreTime.read()
    try:
        for pair in pairs:
            results.append(_start_stream(network, pair, ends, skipped, measured))
        rates = []
        deadline = time.monotonic() + limit_seconds
        for pair, result in zip(pairs, results, strict=True):
            rates.append(_await_rate(result, pair, deadline, stop))
    finally:
        spent = ends.kill()
        for result in results:
            os.close(result)
    return _summary(rates, spent, before, _CoreTime.read())


def _summary(
    rates: Sequence[float],
    spent: Sequence[tuple[float, float]],
    before: _CoreTime,
    after: _CoreTime,
) -> Streams:
    passed = max(after.all - before.all, 1e-3)
    own = sum(used for used, _ in spent) + after.interrupts - before.interrupts
    busy = passed - (after.idle - before.idle)
    return Streams(
        bits_per_second=tuple(rates),
        busiest=max(used / max(lived, 1e-3) for used, lived in spent),
        own_share=min(1.0, own / passed),
        others_share=max(0.0, (busy - own) / passed),
    )


def _start_stream(
    network: Network, pair: tuple[int, int], ends: _Ends, skipped: int, measured: int
) -> int:
    """Start both ends of a stream; the pipe from which its rate can be read."""
    try:
        with _connected(network, *pair) as (source, sink):
            ends.start(lambda: _send(source))
            result, answer = os.pipe()
            try:
                ends.start(lambda: _receive(sink, answer, skipped, measured))
            finally:
                os.close(answer)
    except OSError as error:
        raise LabError(f"{_name(pair)} cannot be started: {error}") from error
    return result


@contextmanager
def _connected(
    network: Network, sender: int, receiver: int
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection between two nodes: the sender's socket and the receiver's."""
    with network.entered(receiver):
        listener = socket.create_server((node_address(receiver), 0))
    with listener:
        listener.settimeout(_CONNECT_SECONDS)
        with network.entered(sender):
            source = socket.create_connection(listener.getsockname(), _CONNECT_SECONDS)
        with source:
            sink, _ = listener.accept()
            with sink:
                source.settimeout(None)
                sink.settimeout(None)
                yield source, sink


def _send(source: socket.socket) -> None:
    """Send until killed."""
    chunk = bytes(_CHUNK_BYTES)
    while True:
        source.sendall(chunk)


def _receive(sink: socket.socket, answer: int, skipped: int, measured: int) -> None:
    """Receive until killed; answer with the bits a second of the bytes after those skipped."""
    buffer = bytearray(_CHUNK_BYTES)
    received = 0
    while received < skipped:
        received += _take(sink, buffer)
    first, start = received, time.perf_counter()
    while received < first + measured:
        received += _take(sink, buffer)
    os.write(answer, _RATE.pack((received - first) * 8 / (time.perf_counter() - start)))
    while True:
        _take(sink, buffer)


def _take(sink: socket.socket, buffer: bytearray) -> int:
    taken = sink.recv_into(buffer)
    if taken == 0:
        raise ConnectionError("the sender is gone")
    return taken


def _await_rate(
    result: int, pair: tuple[int, int], deadline: float, stop: Callable[[], bool]
) -> float:
    while not select.select([result], [], [], _LOOK_EVERY_SECONDS)[0]:
        if stop():
            raise Interrupted
        if time.monotonic() > deadline:
            raise LabError(
                f"{_name(pair)} moves less than {percent(_SLOWEST_SHARE, 0)} of its rate"
            )
    answer = os.read(result, _RATE.size)
    if len(answer) < _RATE.size:
        raise LabError(f"{_name(pair)} broke")
    rate: float = _RATE.unpack(answer)[0]
    return rate


def _name(pair: tuple[int, int]) -> str:
    return (
        f"the lab's check of itself: the stream from {node_name(pair[0])} to {node_name(pair[1])}"
    )
