"""What ranks of a joined job tell each other before their process group exists.

One rank of the job or of a node does a thing once (makes the run folder, fetches the data) and
the others wait for its answer; its failure becomes theirs, with its rank named.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore

import slipstream.errors
from slipstream.errors import RankFailure, SlipstreamError
from slipstream.train.launch.arrival import (
    HEAR_FAILURE_SECONDS,
    await_all,
    of_this_attempt,
    open_store,
)
from slipstream.train.launch.joined import JoinedJob


class Meeting:
    """The job's store; the same server on which the process group is made later.

    Keep it until the process group is made. Raises LaunchError where the port is taken or rank 0
    cannot be reached within ``timeout_seconds``.
    """

    def __init__(self, job: JoinedJob, timeout_seconds: float) -> None:
        self._job = job
        self._point = job.meeting_point
        self._timeout_seconds = timeout_seconds
        store = open_store(self._point, timeout_seconds)
        self.port = store.port
        """Where rank 0 listens, also when the job left the choice to the system (port 0)."""
        self._store = of_this_attempt(store, self._point)

    def await_all(self) -> None:
        """Returns once every rank has called this; RankFailure names those who do not come."""
        await_all(PrefixStore("start", self._store), self._point, self._timeout_seconds)

    def from_rank_zero(self, what: str, action: Callable[[], str]) -> str:
        """The text that ``action`` gives on rank 0, on every rank."""
        return self._share(what, 0, self._job.world_size, action)

    def from_first_of_node(self, what: str, action: Callable[[], str]) -> str:
        """The text that ``action`` gives on the node's first rank, on every rank of the node."""
        job = self._job
        return self._share(
            f"{what}@{job.node}", job.rank - job.local_rank, job.local_world_size, action
        )

    def ranks_per_node(self) -> tuple[int, ...]:
        """How many ranks each node has, told by the first rank of each."""
        job = self._job
        if job.ranks_per_node:
            return job.ranks_per_node
        if job.local_rank == 0:
            self._store.set(f"ranks@{job.node}", str(job.local_world_size))
        keys = [f"ranks@{node}" for node in range(job.num_nodes)]
        self._wait(keys, "a node's first rank")
        return tuple(int(self._store.get(key)) for key in keys)

    def _share(self, what: str, doer: int, num_ranks: int, action: Callable[[], str]) -> str:
        if self._job.rank != doer:
            self._wait([what], f"rank {doer}")
            kind, _, text = self._store.get(what).decode().partition(":")
            self._store.add(f"{what}/heard", 1)
            if kind:
                raise getattr(slipstream.errors, kind)(f"rank {doer}: {text}")
            return text
        try:
            text = action()
        except SlipstreamError as error:
            self._store.set(what, f"{type(error).__name__}:{error}")
            self._let_others_hear(what, num_ranks - 1)
            raise
        self._store.set(what, f":{text}")
        return text

    def _let_others_hear(self, what: str, num_others: int) -> None:
        """Stay a little before failing: the store may end with this process."""
        end = time.monotonic() + HEAR_FAILURE_SECONDS
        while time.monotonic() < end and self._store.add(f"{what}/heard", 0) < num_others:
            time.sleep(0.05)

    def _wait(self, keys: list[str], whom: str) -> None:
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_seconds))
        except RuntimeError as error:
            raise RankFailure(
                f"{whom} did not come to the start of the job within {self._timeout_seconds:g} s"
                f" (sync.timeout_seconds); see what it printed"
            ) from error
