"""Slipstream's collectives for those who keep torch DDP: a communication hook.

state = slipstream.DDPHookState("torus", wire="bfloat16", cluster=slipstream.Cluster((2, 2)))
ddp.register_comm_hook(state, slipstream.ddp_hook)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket

from slipstream.cluster import Cluster
from slipstream.comm import Collectives
from slipstream.comm.peers import Peers
from slipstream.comm.torch_comm import destroy_group, own_group
from slipstream.errors import CheckpointError, RanksDiffer, SlipstreamError, UnsupportedModel
from slipstream.plan.sparsity import Sparsity
from slipstream.sync.channel import ThreadChannel
from slipstream.sync.hook_sums import HookSums
from slipstream.sync.owed_state import ResidualState, owed_of_state, state_of
from slipstream.sync.wrapping import check_group, check_timeout, cluster_of
from slipstream.wires import DenseWire


class DDPHookState:
    """By which collective, and what travels; buckets go one after the other, in DDP's order.

    collective, wire: as in plans. sparsity: which gradients may be sent sparsely instead, all the
    same whether that is faster; then model is needed, bare or in its DDP, whose parameters have
    names. What was not sent is kept, and added to the next gradients. cluster: the nodes on which
    DDP's ranks are; None means one. group: one that nothing else uses; None makes one over all
    ranks, which all of them do alike. timeout_seconds: limit of every wait in a group made here.

    It can be saved with torch.save, as checkpoints of DDP's hooks are, and torch.load reads it as
    it reads weights. What is saved is the setting, and what this rank has kept: with `sparsity`
    every rank saves its own between two steps, loads its own, and calls `of` with the model. A
    group is made when the hook runs for the first time afterwards. `close` ends its thread and
    group. After an error, which names the rank that did not come, every further bucket fails.

    Where a step has a gradient that is not finite, what it sent is kept again: it will be left out.
    With DDP's find_unused_parameters=True what was kept of a parameter may be lost in a step in
    which no rank uses it, as DDP drops its average; `GradientSync` keeps it.

    Raises PlanError for what there is not, SlipstreamError for a cluster of other ranks and for a
    sparsity without a model, RanksDiffer where ranks say different things.
    """

    _group: dist.ProcessGroup | None

    def __init__(
        self,
        collective: str = "native",
        wire: DenseWire = "float32",
        *,
        sparsity: Sparsity | None = None,
        model: nn.Module | None = None,
        cluster: Cluster | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        check_group(group)
        self._set(collective, wire, sparsity, cluster, timeout_seconds)
        self._group = group
        if model is not None:
            self.of(model)
        elif sparsity is not None:
            raise SlipstreamError(
                "What is not sent is kept by the names of parameters: with sparsity give the "
                "model, too, as in DDPHookState(sparsity=slipstream.Sparsity(0.01), model=ddp)."
            )
        if group is not None or dist.is_initialized():
            self._connect()

    def _set(
        self,
        collective: str,
        wire: DenseWire,
        sparsity: Sparsity | None,
        cluster: Cluster | None,
        timeout_seconds: float,
    ) -> None:
        """The setting, with nothing made yet. Raises SlipstreamError for an impossible limit."""
        check_timeout(timeout_seconds)
        self.collective, self.wire, self.sparsity = collective, wire, sparsity
        self.cluster, self.timeout_seconds = cluster, timeout_seconds
        self._group = None
        self._owns_group = self._closed = False
        self._channel: ThreadChannel | None = None
        self._collectives: Collectives | None = None
        self._peers: Peers | None = None
        self._failure: SlipstreamError | None = None
        self._names: dict[int, str] = {}
        self._numels: dict[str, int] = {}
        self._sums: HookSums | None = None
        self._loaded: ResidualState = {}
        self._steps = 0

    def of(self, model: nn.Module) -> DDPHookState:
        """Says whose gradients come, bare or in its DDP; returns itself.

        Raises CheckpointError where what was loaded does not fit.
        """
        bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        params = dict(bare.named_parameters())
        self._names = {id(param): name for name, param in params.items()}
        self._numels = {name: param.numel() for name, param in params.items()}
        owed_of_state(self._loaded, self._numels)
        return self

    def average(self, flat: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Replaces `flat` (1-D) by its mean over ranks; the future holds it, or the error.

        All of it travels, whatever may be sent sparsely.
        """
        self._ready_for(flat)
        return self._travel(flat, lambda: self._average_in_full(flat))

    def average_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """As `average`, with one of DDP's buckets, sparsely where that is permitted."""
        flat = bucket.buffer()
        if self.sparsity is None:
            return self.average(flat)
        names = [self._names.get(id(param)) for param in bucket.parameters()]
        gradients = dict(zip(names, bucket.gradients(), strict=True))
        if None in gradients:
            raise SlipstreamError(
                "A bucket of DDP has a parameter that is none of the model's; call of(model) with "
                "the model that DDP trains, after loading this state and after changing the model."
            )
        self._ready_for(flat)
        sums = self._sums
        assert sums is not None
        is_first, is_last = bucket.index() == 0, bucket.is_last()
        return self._travel(
            flat,
            lambda: sums.average_(
                flat,
                gradients,  # type: ignore[arg-type]  # no None in it
                is_first=is_first,
                is_last=is_last,
            ),
        )

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

    def _ready_for(self, flat: torch.Tensor) -> None:
        if flat.device.type != "cpu":
            raise UnsupportedModel(
                f"The hook averages gradients on CPUs, and these are on {flat.device}; leave the "
                "hook out there."
            )
        if self._closed:
            raise SlipstreamError("This state of the hook has been closed; make another one.")
        if self._channel is None:
            self._connect()

    def _travel(
        self, flat: torch.Tensor, work: Callable[[], None]
    ) -> torch.futures.Future[torch.Tensor]:
        """Queues the work that replaces `flat`; the future holds that, or the error."""
        channel, peers = self._channel, self._peers
        assert channel is not None and peers is not None
        ended: torch.futures.Future[SlipstreamError | None] = torch.futures.Future()

        def travel() -> None:
            try:
                if self._failure is None:
                    work()
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

        channel.submit(travel)
        return ended.then(outcome)

    def _average_in_full(self, flat: torch.Tensor) -> None:
        assert self._collectives is not None and self._group is not None
        ranks = self._group.size()
        divides_first = self.wire == "float32" and flat.dtype in (torch.float32, torch.float64)
        if divides_first:  # as DDP does it: sums cannot overflow
            flat.div_(ranks)
        collective = self._collectives.get(self.collective, self.wire)
        collective.sum_(flat, 1 if divides_first else ranks)

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
        self._agree(cluster)
        if self.sparsity is not None:
            self._sums = HookSums(
                self.sparsity,
                self._collectives,
                self._group.size(),
                self._average_in_full,
                owed=owed_of_state(self._loaded, self._numels),
                steps=self._steps,
            )
        self._channel = ThreadChannel()

    def _agree(self, cluster: Cluster) -> None:
        """Raises RanksDiffer where ranks would send other messages, or draw other numbers."""
        assert self._peers is not None
        mine = f"{self.collective} with {self.wire} on {cluster}"
        if self.sparsity is not None:
            mine += f", {self.sparsity} after {self._steps} steps"
        everyone = self._peers.gather(mine, "agreeing on what DDP's hook sends")
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise RanksDiffer(
                    f"Ranks differ: DDP's hook has {everyone[0]} on rank 0 and {theirs} on rank "
                    f"{rank}. Make it alike on every rank, or load what every rank has saved."
                )

    def __getstate__(self) -> dict[str, Any]:
        nodes = None if self.cluster is None else list(self.cluster.ranks_per_node)
        saved: dict[str, Any] = {
            "collective": self.collective,
            "wire": self.wire,
            "ranks_per_node": nodes,
            "timeout_seconds": self.timeout_seconds,
        }
        if self.sparsity is not None:
            fields = asdict(self.sparsity)
            sums = self._sums
            saved |= {
                "sparsity": {**fields, "dense": list(fields["dense"])},
                "steps": sums.steps if sums else self._steps,
                "residuals": state_of(sums.owed()) if sums else dict(self._loaded),
            }
        return saved

    def __setstate__(self, saved: dict[str, Any]) -> None:
        nodes, fields = saved["ranks_per_node"], saved.get("sparsity")
        sparsity = None
        if fields is not None:
            sparsity = _sparsity_of(fields)
        self._set(
            saved["collective"],
            saved["wire"],
            sparsity,
            None if nodes is None else Cluster(tuple(nodes)),
            saved["timeout_seconds"],
        )
        self._loaded, self._steps = dict(saved.get("residuals", {})), int(saved.get("steps", 0))


def _sparsity_of(fields: dict[str, Any]) -> Sparsity:
    """Raises CheckpointError for what is none, PlanError for impossible values."""
    try:
        return Sparsity(**{**fields, "dense": tuple(fields.get("dense", ()))})
    except TypeError as error:
        raise CheckpointError(
            f"What DDP's hook has saved cannot be read: {error}. Make a new state, and lose what "
            "was not sent."
        ) from error


torch.serialization.add_safe_globals([DDPHookState])


def ddp_hook(state: DDPHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For `DistributedDataParallel.register_comm_hook`: averages one of DDP's buckets."""
    return state.average_bucket(bucket)


# torch compares annotations with its types, and here they are texts
ddp_hook.__annotations__.clear()
