"""The job that a rank belongs to: what it reduces over, and how a lost rank is named."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from slipstream.cluster import Cluster
from slipstream.comm.peers import Peers
from slipstream.errors import LaunchError, SlipstreamError
from slipstream.train.launch.arrival import meet_all
from slipstream.train.launch.joined import find_meeting_point


@dataclass(frozen=True)
class Job:
    """A rank's place among the ranks that train together.

    group: for metrics, evaluation and agreements; None on a single rank, where all of these are
    the identity. gradient_group: for gradients alone; None lets the engine make one over all ranks.
    store: where failures are posted for other ranks to read. timeout_seconds: limit of every wait.
    """

    rank: int
    cluster: Cluster
    group: dist.ProcessGroup | None = None
    gradient_group: dist.ProcessGroup | None = None
    store: Store | None = None
    timeout_seconds: float = 600.0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    peers: Peers = field(init=False)

    def __post_init__(self) -> None:
        peers = Peers(self.group, self.store, self.timeout_seconds, self.device)
        object.__setattr__(self, "peers", peers)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.cluster.world_size

    def sum(self, tensor: Tensor, doing: str) -> Tensor:
        """Replaces `tensor` by its sum over ranks, in place, and returns it; all ranks call it.

        doing: what an error says was going on. Raises RankFailure when a rank does not come.
        """
        if self.group is not None:
            with self.named_failure(doing):
                dist.all_reduce(tensor, group=self.group)
        return tensor

    def on_rank_zero(self, action: Callable[[], None], doing: str) -> None:
        """Runs `action` on rank 0 while the others wait; its SlipstreamError is raised on all."""
        failure: SlipstreamError | None = None
        if self.rank == 0:
            try:
                action()
            except SlipstreamError as error:
                failure = error
        text = self.peers.gather(str(failure) if failure else None, doing)[0]
        if failure is not None:
            raise failure
        if text is not None:
            raise SlipstreamError(text)

    @contextmanager
    def named_failure(self, doing: str) -> Iterator[None]:
        """Turns the backend's error in a collective into one that names the missing ranks."""
        try:
            yield
        except RuntimeError as error:
            raise self.peers.failure(error, doing) from error

    @contextmanager
    def telling_peers(self, doing: str) -> Iterator[None]:
        """Posts an error of this rank, so that the others can say whose fault ended them."""
        try:
            yield
        except Exception as error:
            if self.group is not None:
                self.peers.post_failure(str(error), doing, cause=True)
            raise


@contextmanager
def join_job(cluster: Cluster, *, timeout_seconds: float) -> Iterator[Job]:
    """Joins the job that torchrun's variables describe; leaves it at the end.

    A single rank initialises nothing. Raises LaunchError when the variables contradict the cluster
    or the job's store cannot be reached, RankFailure that names the ranks that do not come in time.
    """
    rank = int(os.environ.get("RANK", "0"))
    announced = int(os.environ.get("WORLD_SIZE", "1"))
    if announced != cluster.world_size:
        raise LaunchError(
            f"WORLD_SIZE says {announced} ranks but the cluster has {cluster.world_size}; "
            "start as many ranks as nodes and ranks per node give."
        )
    if cluster.world_size == 1:
        yield Job(rank, cluster, timeout_seconds=timeout_seconds)
        return
    store = meet_all(find_meeting_point(os.environ), timeout_seconds)
    try:
        dist.init_process_group(
            "gloo",
            store=PrefixStore("default_pg", store),
            rank=rank,
            world_size=cluster.world_size,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"all {cluster.world_size} ranks came, but rank {rank} could not connect to each of "
            f"them within {timeout_seconds:g} s (sync.timeout_seconds): check that every node "
            f"reaches every other, and GLOO_SOCKET_IFNAME ({error})"
        ) from error
    group = dist.group.WORLD
    assert group is not None
    yield Job(
        rank,
        cluster,
        group=group,
        store=group.get_group_store(),
        timeout_seconds=timeout_seconds,
    )
    # Not after an error: peers may be gone, and leaving together would wait for them.
    dist.destroy_process_group()
