"""Messages between ranks of one process, without a network: for more ranks than a machine carries.

A message is copied when both sides have come and not before, as a network may do it: who changes
what it has sent before its work has ended sends something else.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_LIMIT_SECONDS = 60.0


class _Side:
    """One side of a message; its work, as a backend's."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._ended = threading.Event()

    def end(self) -> None:
        self._ended.set()

    def wait(self) -> None:
        if not self._ended.wait(_LIMIT_SECONDS):
            raise RuntimeError("a message did not come")


class _Network:
    """What was sent and not received, and the other way round, by (source, destination, tag)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: defaultdict[tuple[int, int, int], deque[_Side]] = defaultdict(deque)
        self._awaited: defaultdict[tuple[int, int, int], deque[_Side]] = defaultdict(deque)

    def post(self, key: tuple[int, int, int], side: _Side, *, is_sent: bool) -> _Side:
        with self._lock:
            mine, theirs = self._sent, self._awaited
            if not is_sent:
                mine, theirs = theirs, mine
            if not theirs[key]:
                mine[key].append(side)
                return side
            other = theirs[key].popleft()
            source, target = (side, other) if is_sent else (other, side)
            assert source.tensor.dtype == target.tensor.dtype
            target.tensor.copy_(source.tensor)
            source.end()
            target.end()
            return side


class SimulatedGroup:
    """What collectives that are made of messages need of a process group."""

    def __init__(self, network: _Network, rank: int, size: int) -> None:
        self._network, self._rank, self._size = network, rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> _Side:
        key = (self._rank, destination, tag)
        return self._network.post(key, _Side(tensors[0]), is_sent=True)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> _Side:
        key = (source, self._rank, tag)
        return self._network.post(key, _Side(tensors[0]), is_sent=False)


def run_simulated(fn: Callable[[Any], T], world_size: int) -> list[T]:
    """Runs `fn(group)` once per rank, in threads; the results in rank order."""
    network, outcomes = _Network(), list[Any]([None] * world_size)

    def body(rank: int) -> None:
        try:
            outcomes[rank] = fn(SimulatedGroup(network, rank, world_size))
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _LIMIT_SECONDS)
        assert not thread.is_alive(), "a simulated rank hangs"
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes
