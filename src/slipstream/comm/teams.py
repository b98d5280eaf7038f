"""Ranks that exchange messages, and the memory that the messages need."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

Work = Any
_ALIGNED_BYTES = 64
"""A line of the processor's cache: no two messages share one."""
Steps = Generator[Sequence[Work], None, None]
"""A collective as its rank sees it: it yields what must have arrived before it can go on."""


class _Nothing:
    """The work of a message without content, which has ended."""

    def wait(self) -> None:
        pass


_NOTHING = _Nothing()


class Team:
    """Some ranks of a group in an order of their own, as one of them sees it.

    ranks: in the group; index: this rank's place among them. Members are called by their places.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.index = self.ranks.index(group.rank())
        self._group = group

    def send(self, tensor: torch.Tensor, member: int, tag: int) -> Work:
        """Begins to send; `tensor` (contiguous) must not change before the work has ended.

        Nothing travels where there is nothing in it.
        """
        if tensor.numel() == 0:
            return _NOTHING
        return self._group.send([tensor], self.ranks[member], tag)

    def receive(self, tensor: torch.Tensor, member: int, tag: int) -> Work:
        """Begins to receive into `tensor` (contiguous)."""
        if tensor.numel() == 0:
            return _NOTHING
        return self._group.recv([tensor], self.ranks[member], tag)

    def others(self) -> Iterator[int]:
        """The other members, beginning with the next: so no two begin with the same one."""
        for distance in range(1, self.size):
            yield (self.index + distance) % self.size


class Scratch:
    """Memory on the CPU for what arrives, used again by the next collective.

    Grows to what the largest one took. After one that failed nothing is released, as messages may
    still arrive: what follows gets memory behind it.
    """

    def __init__(self) -> None:
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._used_bytes = 0
        self._beside: list[torch.Tensor] = []

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel], not initialised, nobody else's until `release`."""
        start, size = self._used_bytes, numel * dtype.itemsize
        self._used_bytes += -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES
        if self._used_bytes <= self._arena.numel():
            return self._arena[start : start + size].view(dtype)
        self._beside.append(torch.empty(numel, dtype=dtype))
        return self._beside[-1]

    def release(self) -> None:
        """All that was taken may be taken again."""
        self._beside.clear()
        if self._used_bytes > self._arena.numel():
            self._arena = torch.empty(self._used_bytes, dtype=torch.uint8)
        self._used_bytes = 0


def carry_out(chunks: Iterable[Steps], at_once: int = 1) -> None:
    """Carries out several collectives, `at_once` of them side by side, each begun in its turn.

    What has arrived for one goes on while the messages of the others are on their way. Every rank
    must bring the same ones in the same order. Raises what the backend raises when a rank does not
    come.
    """
    coming = iter(chunks)
    active: deque[tuple[Steps, Sequence[Work]]] = deque()
    while True:
        while len(active) < at_once and (steps := next(coming, None)) is not None:
            active.append((steps, ()))
        if not active:
            return
        for _ in range(len(active)):
            steps, awaited = active.popleft()
            for work in awaited:
                work.wait()
            following = next(steps, None)
            if following is not None:
                active.append((steps, following))
