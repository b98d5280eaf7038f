"""The collectives of one group by the names that plans give them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from slipstream.cluster import Cluster
from slipstream.comm.alone import Alone
from slipstream.comm.base import Collective
from slipstream.comm.flat import ALGORITHMS, Flat
from slipstream.comm.native import Native
from slipstream.comm.nodes import Hierarchical, Torus
from slipstream.comm.pieces import PIECES
from slipstream.comm.sparse import TopK
from slipstream.comm.subgroups import Make, Subgroups
from slipstream.comm.torch_comm import backend_of
from slipstream.errors import PlanError
from slipstream.sparsify import Momentum
from slipstream.wires import DENSE_WIRES, SPARSE_COLLECTIVES, Wire, wires_of


class Collectives:
    """Makes each collective when it is first asked for, and then gives the same one again.

    group: None for a world of one rank. cluster: on which nodes its ranks are. device: where the
    tensors are; None takes the CPU where the group has a backend for it, else what it has one for.
    make: see `Subgroups`.

    On Gloo and CPUs they are made of messages between two ranks, on NCCL of its own pieces. Some
    of those need groups over parts of the ranks: so all ranks ask for the same collectives in the
    same order, and `close` ends what was made.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        cluster: Cluster,
        device: torch.device | None = None,
        *,
        make: Make | None = None,
    ) -> None:
        self._group = group
        self._cluster = cluster
        self._made: dict[tuple[str, Wire], Collective] = {}
        if group is not None:
            self._device = device or _device_of(group)
            self._subgroups = Subgroups(group, self._device, make)

    def get(self, name: str = "native", wire: Wire = "float32") -> Collective:
        """A dense collective. Raises PlanError for what there is not, here or with this backend.

        Raises RankFailure when a rank does not come to make a group with the others.
        """
        if (name, wire) not in self._made:
            check(name, wire, self._cluster)
            self._made[name, wire] = self._make(name, wire)
        return self._made[name, wire]

    def for_bucket(
        self, name: str, wire: Wire, numel: int, momentum: Momentum | None = None
    ) -> Collective:
        """As `get`, for a bucket with so many elements of gradients: a sparse one keeps residuals.

        momentum: of momentum correction, where it is sparse. On a single rank everything stays in
        place, whatever the wire.
        """
        if isinstance(wire, str):
            return self.get(name, wire)
        check(name, wire, self._cluster)
        if self._group is None or self._group.size() == 1:
            return Alone()
        check_backend(name, backend_of(self._group, self._device), self._device.type)
        return TopK(name, self._group, self._cluster, numel, wire, can_undo=True, momentum=momentum)

    def close(self) -> None:
        """Ends the groups that were made here; nothing may be under way in them."""
        self._made.clear()
        if self._group is not None:
            self._subgroups.close()

    def _make(self, name: str, wire: Wire) -> Collective:
        group, cluster = self._group, self._cluster
        if group is None:
            return Alone()
        if name == "native":
            return Native(group)
        assert isinstance(wire, str)
        backend = backend_of(group, self._device)
        check_backend(name, backend, self._device.type)
        if backend == "nccl":
            return PIECES[name](self._subgroups, cluster, wire)  # type: ignore[index]
        if name in ALGORITHMS:
            return Flat(name, group, wire)
        kind = Torus if name == "torus" else Hierarchical
        return kind(group, cluster, wire)


def check(name: str, wire: Wire, cluster: Cluster) -> None:
    """Raises PlanError for a collective that there is not, or not with this wire or cluster."""
    if name in SPARSE_COLLECTIVES:
        _check_sparse(name, wire, cluster)
        return
    wires = wires_of(name)
    if not wires:
        raise PlanError(
            f"The engine has no collective {name!r}; it has {', '.join(DENSE_WIRES)}, and sparse "
            f"ones: {', '.join(SPARSE_COLLECTIVES)}."
        )
    if wire not in wires:
        raise PlanError(
            f"The collective {name!r} sends {' or '.join(wires)}, not {wire!r}; plan with one of "
            "these wires, or with another collective."
        )
    if name == "torus" and len(set(cluster.ranks_per_node)) > 1:
        raise PlanError(
            f"The torus needs as many ranks on every node, and there are {cluster}; plan with "
            "another collective, such as hierarchical, ring or direct."
        )


def _check_sparse(name: str, wire: Wire, cluster: Cluster) -> None:
    if isinstance(wire, str):
        raise PlanError(
            f"The collective {name!r} sends a share of the elements, not all of them as {wire}; "
            "give its wire a density, or plan another collective."
        )
    if name != "naive_topk" and len(set(cluster.ranks_per_node)) > 1:
        raise PlanError(
            f"{name} needs as many ranks on every node, and there are {cluster}; plan with "
            "naive_topk, or with a dense collective."
        )


def check_backend(name: str, backend: str, device_type: str) -> None:
    """Raises PlanError for a collective that there is not with this backend on such a device."""
    if name == "native" or (backend == "gloo" and device_type == "cpu"):
        return
    if name in SPARSE_COLLECTIVES:
        raise PlanError(
            f"The collective {name!r} exists over Gloo on CPUs, and this group has {backend} on "
            f"{device_type}; plan with a dense one."
        )
    if backend != "nccl":
        raise PlanError(
            f"The collective {name!r} exists over Gloo on CPUs and over NCCL on GPUs, and this "
            f"group has {backend} on {device_type}; plan with 'native'."
        )
    if name not in PIECES:
        raise PlanError(
            f"There is no collective {name!r} over NCCL: its own all-reduce, 'native', takes a "
            f"ring or a tree as suits the size. Plan with 'native' or with {' or '.join(PIECES)}."
        )


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Where a group's tensors are, as far as its backends tell."""
    cpu = torch.device("cpu")
    devices = group._device_types
    return cpu if cpu in devices or not devices else devices[0]
