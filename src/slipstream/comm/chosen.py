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
from slipstream.comm.torch_comm import backend_of
from slipstream.errors import PlanError
from slipstream.wires import DENSE_WIRES, Wire, wires_of


class Collectives:
    """Makes each collective when it is first asked for, and then gives the same one again.

    group: None for a world of one rank. cluster: on which nodes its ranks are.
    """

    def __init__(self, group: dist.ProcessGroup | None, cluster: Cluster) -> None:
        self._group = group
        self._cluster = cluster
        self._made: dict[tuple[str, Wire], Collective] = {}

    def get(self, name: str = "native", wire: Wire = "float32") -> Collective:
        """Raises PlanError for what there is not, here or with this group's backend."""
        if (name, wire) not in self._made:
            check(name, wire, self._cluster)
            self._made[name, wire] = self._make(name, wire)
        return self._made[name, wire]

    def _make(self, name: str, wire: Wire) -> Collective:
        group = self._group
        if group is None:
            return Alone()
        if name == "native":
            return Native(group)
        backend = backend_of(group, torch.device("cpu"))
        if backend != "gloo":
            raise PlanError(
                f"The collective {name!r} is made of messages between ranks over Gloo on CPUs, and "
                f"this group has {backend}; plan with 'native'."
            )
        assert isinstance(wire, str)
        if name in ALGORITHMS:
            return Flat(name, group, wire)
        kind = Torus if name == "torus" else Hierarchical
        return kind(group, self._cluster, wire)


def check(name: str, wire: Wire, cluster: Cluster) -> None:
    """Raises PlanError for a collective that there is not, or not with this wire or cluster."""
    wires = wires_of(name)
    if not wires:
        raise PlanError(f"The engine has no collective {name!r}; it has {', '.join(DENSE_WIRES)}.")
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
