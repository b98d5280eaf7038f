"""Collectives made of a backend's own pieces: what there is beside `native` on NCCL.

    direct         all-to-all, sums in rank order, all-gather
    hierarchical   reduce to the node's first rank, all-reduce over the firsts, broadcast in the
                   node ("ImageNet in four minutes", Jia et al. 2018)
    torus          reduce-scatter in the node, all-reduce across by the ranks of the same place on
                   all nodes, all-gather in the node ("2D torus")

On a CUDA device every call enqueues on the current stream and returns: nothing waits on the host,
and scratch memory comes from torch's allocator of that stream. A torus is not cut in chunks here:
its stages are in two communicators, which must not be busy at once unless both fit on the device,
and NCCL pipelines inside each stage by itself. The same code runs over Gloo on CPUs; there the
messages of `flat` and `nodes` are faster.

The wire format is that of the bytes between nodes (`direct`: between ranks). The backend would add
16-bit values in 16 bits, so a 16-bit wire is always `direct`, which adds what arrives in 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from slipstream.cluster import Cluster
from slipstream.comm.alone import Alone
from slipstream.comm.base import Collective, Halves
from slipstream.comm.formats import TRAVELS_AS
from slipstream.comm.halves import NativeHalves
from slipstream.comm.native import Native
from slipstream.comm.subgroups import Subgroups
from slipstream.comm.torch_comm import all_gather_flat
from slipstream.comm.widening import as_wide
from slipstream.wires import CollectiveName, DenseWire


class DirectPieces:
    """All to all, and back: two rounds. Follows `Collective`.

    Every element is summed in rank order in 32 bits or more, wherever it lies.
    """

    name = "direct"
    layout_invariant = True

    def __init__(self, group: dist.ProcessGroup, wire: DenseWire = "float32") -> None:
        self.wire = wire
        self._group = group

    def sum_(self, flat: torch.Tensor, divisor: int = 1) -> None:
        """See `Collective.sum_`."""
        with as_wide(flat) as wide:
            if wide.numel():
                self._exchange(wide, divisor)

    def begin(self, flat: torch.Tensor, divisor: int = 1) -> None:
        """None: there are several rounds."""

    def _exchange(self, flat: torch.Tensor, divisor: int) -> None:
        size = self._group.size()
        travelling = _padded(flat.to(TRAVELS_AS.get(self.wire, flat.dtype)), size)
        arrived = torch.empty_like(travelling)
        dist.all_to_all_single(arrived, travelling, group=self._group)
        first, *rest = arrived.view(size, -1)
        total = first.to(flat.dtype)
        for row in rest:
            total.add_(row)
        if divisor != 1:
            total.div_(divisor)
        # what has been sent is not needed any more: the results arrive in its place, which is
        # `flat` itself where nothing had to be converted or padded
        all_gather_flat(travelling, total.to(travelling.dtype), self._group)
        _copy_back(travelling, flat)


class HierarchicalPieces:
    """All-reduce over the first ranks of the nodes, which may differ in size. Follows `Collective`.

    Raises what `Subgroups.mine` raises.
    """

    name = "hierarchical"
    layout_invariant = False

    def __init__(self, subgroups: Subgroups, cluster: Cluster, wire: DenseWire = "float32") -> None:
        self.wire = wire
        self._subgroups = subgroups
        nodes = [cluster.ranks_of_node(node) for node in range(cluster.nodes)]
        firsts = [ranks.start for ranks in nodes]
        self._node = subgroups.mine(nodes)
        self._is_first = subgroups.group.rank() in firsts
        between = subgroups.mine([firsts])
        self._between = None if between is None else _all_reduce(between, wire)

    def sum_(self, flat: torch.Tensor, divisor: int = 1) -> None:
        """See `Collective.sum_`."""
        with as_wide(flat) as wide:
            if wide.numel():
                with self._subgroups.failing_together():
                    self._reduce_and_send_back(wide, divisor)

    def begin(self, flat: torch.Tensor, divisor: int = 1) -> None:
        """None: see `DirectPieces.begin`."""

    def _reduce_and_send_back(self, flat: torch.Tensor, divisor: int) -> None:
        if self._node is not None:
            dist.reduce(flat, group=self._node, group_dst=0)
        if self._is_first and self._between is not None:
            self._between.sum_(flat, divisor)
        elif self._is_first and divisor != 1:
            flat.div_(divisor)
        if self._node is not None:
            dist.broadcast(flat, group=self._node, group_src=0)


class TorusPieces:
    """Scatter in the node, all-reduce across, gather in the node. Follows `Collective`.

    cluster: nodes with equal numbers of ranks. Raises what `Subgroups.mine` raises.
    """

    name = "torus"
    layout_invariant = False

    def __init__(self, subgroups: Subgroups, cluster: Cluster, wire: DenseWire = "float32") -> None:
        self.wire = wire
        self._subgroups = subgroups
        nodes = [cluster.ranks_of_node(node) for node in range(cluster.nodes)]
        node = subgroups.mine(nodes)
        across = subgroups.mine(list(zip(*nodes, strict=True)))
        self._shape = len(nodes[0]), cluster.nodes
        self._halves: Halves = Alone() if node is None else NativeHalves(node)
        self._between = Alone() if across is None else _all_reduce(across, wire)

    def sum_(self, flat: torch.Tensor, divisor: int = 1) -> None:
        """See `Collective.sum_`."""
        with as_wide(flat) as wide:
            if wide.numel():
                with self._subgroups.failing_together():
                    self._scatter_and_gather(wide, divisor)

    def begin(self, flat: torch.Tensor, divisor: int = 1) -> None:
        """None: see `DirectPieces.begin`."""

    def _scatter_and_gather(self, flat: torch.Tensor, divisor: int) -> None:
        in_node, between = self._divisors(divisor)
        matrix = _padded(flat, self._shape[0])
        row = matrix.new_empty(matrix.numel() // self._shape[0])
        self._halves.reduce_scatter(matrix, row, in_node)
        self._between.sum_(row, between)
        self._halves.all_gather(row, matrix)
        _copy_back(matrix, flat)

    def _divisors(self, divisor: int) -> tuple[int, int]:
        """By what each stage divides: once, or by its own size where what travels is rounded."""
        ranks, nodes = self._shape
        if divisor != 1 and self.wire != "float32":
            return ranks, nodes
        return (divisor, 1) if nodes == 1 else (1, divisor)


Build = Callable[[Subgroups, Cluster, DenseWire], Collective]
PIECES: Mapping[CollectiveName, Build] = {
    "direct": lambda subgroups, cluster, wire: DirectPieces(subgroups.group, wire),
    "hierarchical": HierarchicalPieces,
    "torus": TorusPieces,
}
"""What can be made of a backend's pieces."""


def _all_reduce(group: dist.ProcessGroup, wire: DenseWire) -> Collective:
    return Native(group) if wire == "float32" else DirectPieces(group, wire)


def _padded(flat: torch.Tensor, parts: int) -> torch.Tensor:
    """`flat` itself where it has `parts` equal parts, else a copy with zeros behind it."""
    missing = -flat.numel() % parts
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat


def _copy_back(padded: torch.Tensor, flat: torch.Tensor) -> None:
    """Into `flat` what was worked out in a copy of it."""
    if padded is not flat:
        flat.copy_(padded[: flat.numel()])
