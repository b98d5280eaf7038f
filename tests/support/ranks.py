"""Ranks as threads: real Gloo groups, one per thread, over an in-memory store.

`run_ranks(fn, world_size)` calls `fn(Rank)` in one thread per rank and returns their results in
rank order. The error that is raised is the first one that is not a mere consequence (a connection
that another rank's failure closed).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

T = TypeVar("T")

_CONSEQUENCES = ("Connection closed", "Connection reset", "Broken pipe", "Socket closed")


@dataclass(frozen=True)
class Rank:
    """What a test's rank knows: its number, the world size, a Gloo group and the store under it."""

    rank: int
    world_size: int
    group: dist.ProcessGroup
    store: Store
    timeout_seconds: float = 10.0
    made: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def hold(self, at_most_seconds: float) -> None:
        """Keeps this rank alive, and so its connections open, until another rank has ended."""
        self.ended.wait(at_most_seconds)

    def new_group(self) -> dist.ProcessGroup:
        """One more group over the same ranks; made in the same order on every rank."""
        self.made.append("group")
        store = PrefixStore(f"group {len(self.made)}", self.store)
        return gloo_group(store, self.rank, self.world_size, self.timeout_seconds)


def gloo_group(
    store: Store, rank: int, world_size: int, timeout_seconds: float
) -> dist.ProcessGroup:
    """A Gloo group that is no process-wide state: wrapped, so that every collective works on it."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=timeout_seconds)
    options._threads = 2
    backend = ProcessGroupGloo(store, rank, world_size, options)
    group = dist.ProcessGroup(store, rank, world_size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def run_ranks(
    fn: Callable[[Rank], T], world_size: int, *, timeout_seconds: float = 10.0
) -> list[T]:
    """Runs `fn` once per rank in threads; returns the results in rank order.

    Raises the cause where ranks fail, and an AssertionError where a rank has not ended after six
    times the group's time limit.
    """
    outcomes = run_ranks_settled(fn, world_size, timeout_seconds=timeout_seconds)
    errors = [o for o in outcomes if isinstance(o, BaseException)]
    if errors:
        causes = [e for e in errors if not any(c in str(e) for c in _CONSEQUENCES)]
        raise (causes or errors)[0]
    return outcomes


def run_ranks_settled(
    fn: Callable[[Rank], Any], world_size: int, *, timeout_seconds: float = 10.0
) -> list[Any]:
    """Like `run_ranks`, but an error takes its rank's place in the result."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=timeout_seconds))
    outcomes: list[Any] = [None] * world_size
    ended = threading.Event()

    def body(rank: int) -> None:
        try:
            group = gloo_group(PrefixStore("group", store), rank, world_size, timeout_seconds)
            outcomes[rank] = fn(Rank(rank, world_size, group, store, timeout_seconds, [], ended))
        except BaseException as error:
            outcomes[rank] = error
        finally:
            ended.set()

    threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    for rank, thread in enumerate(threads):
        thread.join(6 * timeout_seconds)
        assert not thread.is_alive(), f"rank {rank} hangs"
    return outcomes
