"""Slipstream's collectives for those who keep torch DDP: a communication hook.

state = slipstream.DDPHookState("torus", wire="bfloat16", cluster=slipstream.Cluster((2, 2)))
ddp.register_comm_hook(state, slipstream.ddp_hook)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from slipstream.cluster import Cluster
from slipstream.comm import Collectives
from slipstream.comm.peers import Peers
from slipstream.comm.torch_comm import destroy_group, own_group
from slipstream.errors import SlipstreamError, UnsupportedModel
from slipstream.sync.channel import ThreadChannel
from slipstream.sync.wrapping import check_group, check_timeout, cluster_of
from slipstream.wires import DenseWire


class DDPHookState:
    """By which collective, and what travels; buckets go one after the other, in DDP's order.

    collective, wire: as in plans. cluster: the nodes on which DDP's ranks are; None means one.
    group: one that nothing else uses; None makes one over all ranks, which all of them do alike.
    timeout_seconds: limit of every wait in a group that is made here.

    It can be saved with torch.save, as checkpoints of DDP's hooks are, and torch.load reads it as
    it reads weights. What is saved is the setting; a group is made when the hook runs for the first
    time afterwards. `close` ends its thread and group. After an error, which names the rank that
    did not come, every further bucket fails with it.

    Raises PlanError for what there is not, SlipstreamError for a cluster of other ranks.
    """

    _group: dist.ProcessGroup | None

    def __init__(
        self,
        collective: str = "native",
        wire: DenseWire = "float32",
        *,
        cluster: Cluster | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        check_group(group)
        self._set(collective, wire, cluster, timeout_seconds)
        self._group = group
        if group is not None or dist.is_initialized():
            self._connect()

    def _set(
        self, collective: str, wire: DenseWire, cluster: Cluster | None, timeout_seconds: float
    ) -> None:
        """The setting, with nothing made yet. Raises SlipstreamError for an impossible limit."""
        check_timeout(timeout_seconds)
        self.collective, self.wire = collective, wire
        self.cluster, self.timeout_seconds = cluster, timeout_seconds
        self._group = None
        self._owns_group = self._closed = False
        self._channel: ThreadChannel | None = None
        self._collectives: Collectives | None = None
        self._peers: Peers | None = None
        self._failure: SlipstreamError | None = None

    def average(self, flat: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Replaces `flat` (1-D) by its mean over ranks; the future holds it, or the error."""
        if flat.device.type != "cpu":
            raise UnsupportedModel(
                f"The hook averages gradients on CPUs, and these are on {flat.device}; leave the "
                "hook out there."
            )
        if self._closed:
            raise SlipstreamError("This state of the hook has been closed; make another one.")
        if self._channel is None:
            self._connect()
        assert self._channel is not None and self._collectives is not None
        assert self._group is not None and self._peers is not None
        peers = self._peers
        collective = self._collectives.get(self.collective, self.wire)
        ranks = self._group.size()
        ended: torch.futures.Future[SlipstreamError | None] = torch.futures.Future()
        divides_first = self.wire == "float32" and flat.dtype in (torch.float32, torch.float64)

        def travel() -> None:
            try:
                if self._failure is None:
                    if divides_first:  # as DDP does it: sums cannot overflow
                        flat.div_(ranks)
                    collective.sum_(flat, 1 if divides_first else ranks)
            except BaseException as error:
                self._failure = peers.failure(error, "averaging a bucket in DDP's hook")
            ended.set_result(self._failure)

        def outcome(ended: torch.futures.Future[SlipstreamError | None]) -> torch.Tensor:
            # what is raised here reaches DDP as an error; it would take an exception that the
            # first future is given for the tensor
            error = ended.value()
            if error is not None:
                raise error
            return flat

        self._channel.submit(travel)
        return ended.then(outcome)

    def close(self) -> None:
        """Ends what was made here, after what is under way. Nothing can be averaged afterwards."""
        self._closed = True
        if self._channel is not None:
            self._channel.close(self.timeout_seconds)
        if self._collectives is not None and self._failure is None:
            self._collectives.close()
        if self._owns_group and self._group is not None:
            destroy_group(self._group)
        self._group, self._owns_group = None, False

    def _connect(self) -> None:
        if self._group is None:
            if not dist.is_initialized():
                raise SlipstreamError(
                    "torch.distributed is not initialised; call init_process_group first."
                )
            self._group, self._owns_group = own_group(self.timeout_seconds), True
        self._peers = Peers(self._group, None, self.timeout_seconds, torch.device("cpu"))
        cluster = cluster_of(self.cluster, self._group.size())
        self._collectives = Collectives(self._group, cluster, torch.device("cpu"))
        self._collectives.get(self.collective, self.wire)
        self._channel = ThreadChannel()

    def __getstate__(self) -> dict[str, Any]:
        nodes = None if self.cluster is None else list(self.cluster.ranks_per_node)
        return {
            "collective": self.collective,
            "wire": self.wire,
            "ranks_per_node": nodes,
            "timeout_seconds": self.timeout_seconds,
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        nodes = saved["ranks_per_node"]
        self._set(
            saved["collective"],
            saved["wire"],
            None if nodes is None else Cluster(tuple(nodes)),
            saved["timeout_seconds"],
        )


torch.serialization.add_safe_globals([DDPHookState])


def ddp_hook(state: DDPHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For `DistributedDataParallel.register_comm_hook`: averages one of DDP's buckets."""
    return state.average(bucket.buffer())


# torch compares annotations with its types, and here they are texts
ddp_hook.__annotations__.clear()
