"""Collectives that spare the network between nodes: `hierarchical` and `torus`.

    hierarchical   every node's ranks send to its first, the firsts all-reduce, and send back
                   ("ImageNet in four minutes", Jia et al. 2018: few steps, all bytes of a node
                   through one rank)
    torus          rows are scattered within the node, all-reduced by the ranks of the same place
                   on all nodes, and gathered within the node ("2D torus": every rank's bytes
                   between nodes are those of its row). Chunk after chunk, each a stage behind the
                   one before, so that both kinds of links are busy

The wire format is that of the messages between nodes; within a node values travel as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from slipstream.cluster import Cluster
from slipstream.comm import doublings, exchanges
from slipstream.comm.adding import add
from slipstream.comm.formats import Format
from slipstream.comm.teams import Scratch, Steps, Team, carry_out
from slipstream.comm.widening import as_wide
from slipstream.wires import DenseWire

_DOUBLING_TO_BYTES = 2**15
"""Up to this size the nodes' first ranks exchange all they have, in few rounds."""
_RING_FROM_BYTES = 32 * 1024
"""Of a part of a chunk. Against `native` on 4 nodes of 2 ranks at 100 Mbit/s, 16 MiB in chunks of
1 MiB, whose parts have 128 KiB: 0.86 along a ring and 0.92 at once, where bytes alone allow 0.857;
for 256 KiB in one chunk 0.85 and 0.89. Chunks of 512 KiB to 4 MiB, two to eight at once, are within
2 % of one another."""
_CHUNK_BYTES = 2**20
_CHUNKS_AT_ONCE = 4
_TAGS_A_CHUNK = 2 * exchanges.GATHER_TAG


class Hierarchical:
    """All-reduce over the first ranks of groups of ranks. Follows `Collective`.

    cluster: its nodes are the groups, which may differ in size.
    """

    name = "hierarchical"
    layout_invariant = False

    def __init__(
        self, group: dist.ProcessGroup, cluster: Cluster, wire: DenseWire = "float32"
    ) -> None:
        self.wire = wire
        node = cluster.node_of(group.rank())
        self._node = Team(group, cluster.ranks_of_node(node))
        firsts = [cluster.ranks_of_node(n).start for n in range(cluster.nodes)]
        self._firsts = Team(group, firsts) if group.rank() in firsts else None
        self._scratch = Scratch()
        self._local = Format("float32", self._scratch)
        self._format = Format(wire, self._scratch)

    def sum_(self, flat: torch.Tensor, divisor: int = 1) -> None:
        """See `Collective.sum_`."""
        with as_wide(flat) as wide:
            carry_out([self._steps(wide, divisor)])
        self._scratch.release()

    def begin(self, flat: torch.Tensor, divisor: int = 1) -> None:
        """None: see `Flat.begin`."""

    def _steps(self, flat: torch.Tensor, divisor: int) -> Steps:
        node, first = self._node, 0
        if self._firsts is None:
            yield [node.send(flat, first, 0)]
            yield [node.receive(flat, first, exchanges.GATHER_TAG)]
            return
        arriving = [self._local.buffer(flat) for _ in node.others()]
        awaited = [
            node.receive(memory, member, 0)
            for memory, member in zip(arriving, node.others(), strict=True)
        ]
        for memory, work in zip(arriving, awaited, strict=True):
            yield [work]
            add(flat, memory, out=flat)
        if self._firsts.size > 1:
            small = flat.numel() * flat.element_size() <= _DOUBLING_TO_BYTES
            all_reduce = doublings.recursive_doubling if small else exchanges.ring
            yield from all_reduce(self._firsts, flat, self._format, 0, divisor)
        elif divisor != 1:
            flat.div_(divisor)
        yield [node.send(flat, member, exchanges.GATHER_TAG) for member in node.others()]


class Torus:
    """Scatter in the node, all-reduce across, gather in the node. Follows `Collective`.

    cluster: nodes with equal numbers of ranks. chunk_bytes: what goes through the stages at a time.
    """

    name = "torus"
    layout_invariant = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        cluster: Cluster,
        wire: DenseWire = "float32",
        *,
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        self.wire = wire
        rank = group.rank()
        place = cluster.local_rank_of(rank)
        self._node = Team(group, cluster.ranks_of_node(cluster.node_of(rank)))
        across = [cluster.ranks_of_node(node)[place] for node in range(cluster.nodes)]
        self._across = Team(group, across)
        self._chunk_bytes = chunk_bytes
        self._scratch = Scratch()
        self._local = Format("float32", self._scratch)
        self._format = Format(wire, self._scratch)

    def sum_(self, flat: torch.Tensor, divisor: int = 1) -> None:
        """See `Collective.sum_`."""
        with as_wide(flat) as wide:
            carry_out(self._chunks(wide, divisor), _CHUNKS_AT_ONCE)
        self._scratch.release()

    def begin(self, flat: torch.Tensor, divisor: int = 1) -> None:
        """None: see `Flat.begin`."""

    def _chunks(self, flat: torch.Tensor, divisor: int) -> Iterator[Steps]:
        size = flat.numel() * flat.element_size()
        count = max(1, min(-(-size // self._chunk_bytes), 2**8))
        for number, chunk in enumerate(flat.tensor_split(count)):
            yield self._chunk(chunk, number * _TAGS_A_CHUNK, divisor)

    def _chunk(self, chunk: torch.Tensor, tag: int, divisor: int) -> Steps:
        node, across = self._node, self._across
        in_node, between = 1, divisor
        if self._format.rounds and divisor != 1:  # what travels stays in the values' own range
            in_node, between = node.size, across.size
        rows = chunk.tensor_split(node.size)
        mine = rows[node.index]
        yield from exchanges.scatter_at_once(node, rows, self._local, tag, in_node)
        parts = mine.tensor_split(across.size)
        # of the chunk, which is the same on all ranks, where rows may differ by an element
        part_bytes = chunk.numel() * chunk.element_size() // (node.size * across.size)
        scatter: exchanges.Scatter = exchanges.scatter_at_once
        gather = exchanges.gather_at_once
        if part_bytes >= _RING_FROM_BYTES and self.wire != "float16":
            scatter, gather = exchanges.scatter_along_a_ring, exchanges.gather_along_a_ring
        gather_tag = tag + exchanges.GATHER_TAG
        yield from scatter(across, parts, self._format, tag, between)
        yield from gather(across, parts, self._format, gather_tag)
        yield from exchanges.gather_at_once(node, rows, self._local, gather_tag)
