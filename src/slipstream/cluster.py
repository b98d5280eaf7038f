"""The shape of a cluster: which ranks live on which node.

Ranks are numbered node by node, as torchrun does: node 0 holds ranks 0 .. r0 - 1, node 1 the next
r1, and so on. Nodes may hold different numbers of ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from slipstream.errors import SlipstreamError


@dataclass(frozen=True)
class Cluster:
    """Nodes and the number of ranks on each of them (one entry a node).

    Raises SlipstreamError when there is no node, or a node without ranks.
    """

    ranks_per_node: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ranks_per_node:
            raise SlipstreamError("A cluster needs at least one node.")
        for node, ranks in enumerate(self.ranks_per_node):
            if ranks < 1:
                raise SlipstreamError(
                    f"Node {node} has {ranks} ranks; every node needs at least one."
                )

    def __str__(self) -> str:
        """In words: "4 nodes with 2 ranks each"."""
        counts = self.ranks_per_node
        nodes = "1 node" if len(counts) == 1 else f"{len(counts)} nodes"
        if len(set(counts)) > 1:
            return f"{nodes} with {', '.join(map(str, counts))} ranks"
        ranks = "1 rank" if counts[0] == 1 else f"{counts[0]} ranks"
        return f"{nodes} with {ranks}{' each' if len(counts) > 1 else ''}"

    @classmethod
    def regular(cls, nodes: int, ranks_per_node: int) -> Cluster:
        """A cluster whose nodes all hold the same number of ranks."""
        return cls((ranks_per_node,) * nodes)

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.ranks_per_node)

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes together."""
        return sum(self.ranks_per_node)

    def node_of(self, rank: int) -> int:
        """The node on which a rank lives."""
        self._check(rank)
        return bisect_right(list(accumulate(self.ranks_per_node)), rank)

    def local_rank_of(self, rank: int) -> int:
        """A rank's number among the ranks of its own node."""
        return rank - self.ranks_of_node(self.node_of(rank)).start

    def ranks_of_node(self, node: int) -> range:
        """The ranks of one node, in order."""
        if not 0 <= node < self.nodes:
            raise SlipstreamError(f"There is no node {node} among {self.nodes} nodes.")
        first = sum(self.ranks_per_node[:node])
        return range(first, first + self.ranks_per_node[node])

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise SlipstreamError(f"There is no rank {rank} among {self.world_size} ranks.")
