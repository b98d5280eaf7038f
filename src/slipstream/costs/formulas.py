"""What collectives cost by formula, from the links of a cluster: for what nobody has measured.

alpha is a link's latency (seconds a message), beta its seconds per byte, gamma the seconds in
which a rank adds one byte; N is the number of ranks, m that of nodes, k that of ranks on one.
Ring: table 1 of "MG-WFBP" (Shi, Chu and Li, INFOCOM'19) and the public simulator of its authors:

    ring   all-reduce        a = 2 (N-1) alpha    b = 2 (N-1)/N beta + (N-1)/N gamma
           reduce-scatter    a =   (N-1) alpha    b =   (N-1)/N (beta + gamma)
           all-gather        a =   (N-1) alpha    b =   (N-1)/N beta

A ring over ranks numbered node by node crosses each node's card once in either direction, so its
steps go at the pace of the slowest link on it. The others follow by counting rounds, and the bytes
that a rank sends inside its node and a node's card sends for all ranks of the node together:

    direct              2 rounds; a card sends k (N-k)/N of the bytes in each
    recursive doubling  log2 N rounds with all bytes; a card sends them k times
    halving-doubling    2 log2 N rounds; the largest pieces go farthest
    hierarchical        2 rounds in the node, with all bytes of k-1 ranks; a ring over nodes
    torus               2 rounds in the node, 2 across, each with its row; the stages' times add up,
                        although chunks overlap them

and of the sparse ones (HiTopKComm: Shi et al., MLSys 2021), that send a share rho of the elements
as values of s bytes with indices of 4, so q = rho (s+4)/4 bytes for each byte in memory:

    hitopk              2 rounds in the node, the second with what is smaller of a row and its m
                        selections; one across, in which a card sends (m-1) q
    naive_topk          a ring over all ranks, in which each sends (N-1) q
    a2a_topk            as hitopk, with 2 rounds across, in which a card sends 2 (m-1)/m q

and the time in which a rank selects from its row (naive_topk: from everything).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, log2

from slipstream.cluster import Cluster
from slipstream.costs.cluster_file import Link, Links, Operation
from slipstream.costs.curves import Line
from slipstream.errors import CostError
from slipstream.wires import WIRE_BYTES, Density

_FREE = Link(latency_seconds=0.0, seconds_per_byte=0.0)


def slowest_link(links: Links, cluster: Cluster) -> Link:
    """The link at whose pace a ring over all ranks goes, number by number the worst of its links.

    Raises CostError when a link that the ring needs is not known.
    """
    used = [link for link in _used(links, cluster) if link is not _FREE]
    return Link(
        latency_seconds=max(link.latency_seconds for link in used),
        seconds_per_byte=max(link.seconds_per_byte for link in used),
        reduce_seconds_per_byte=max(link.reduce_seconds_per_byte for link in used),
    )


def ring(links: Links, cluster: Cluster, operation: Operation, wire_share: float = 1.0) -> Line:
    """The ring's line for a cluster; nothing for a single rank.

    wire_share: bytes that travel for each byte in memory, 0.5 for a 16-bit wire.
    Raises CostError when a link that the ring needs is not known.
    """
    ranks = cluster.world_size
    if ranks == 1:
        return Line(0.0, 0.0)
    link = slowest_link(links, cluster)
    sends = 2 if operation == "all_reduce" else 1
    adds = 0 if operation == "all_gather" else 1
    share = (ranks - 1) / ranks
    return Line(
        startup_seconds=sends * (ranks - 1) * link.latency_seconds,
        seconds_per_byte=share
        * (sends * link.seconds_per_byte * wire_share + adds * link.reduce_seconds_per_byte),
    )


def direct(links: Links, cluster: Cluster, wire_share: float) -> Line:
    """An all-reduce in which all ranks exchange rows at once."""
    intra, inter = _used(links, cluster)
    ranks, most = cluster.world_size, max(cluster.ranks_per_node)
    inside = (most - 1) / ranks * intra.seconds_per_byte
    outside = most * (ranks - most) / ranks * inter.seconds_per_byte
    return Line(
        startup_seconds=2 * max(intra.latency_seconds, inter.latency_seconds),
        seconds_per_byte=2 * wire_share * max(inside, outside)
        + (ranks - 1) / ranks * _gamma(intra, inter),
    )


def recursive_doubling(links: Links, cluster: Cluster, wire_share: float) -> Line:
    """An all-reduce in log2 N rounds with all bytes; two more where N is no power of two."""
    intra, inter = _used(links, cluster)
    inside, outside = _rounds(cluster)
    most = max(cluster.ranks_per_node)
    carried = inside * intra.seconds_per_byte + outside * most * inter.seconds_per_byte
    return Line(
        startup_seconds=inside * intra.latency_seconds + outside * inter.latency_seconds,
        seconds_per_byte=wire_share * carried + (inside + outside) * _gamma(intra, inter),
    )


def halving_doubling(links: Links, cluster: Cluster, wire_share: float) -> Line:
    """An all-reduce in 2 log2 N rounds; two more, with all bytes, where N is no power of two."""
    intra, inter = _used(links, cluster)
    inside, outside = _rounds(cluster)
    ranks, most = cluster.world_size, max(cluster.ranks_per_node)
    far = most * (1 - most / ranks) * inter.seconds_per_byte
    near = (most - 1) / ranks * intra.seconds_per_byte
    folds = 0 if ranks & (ranks - 1) == 0 else 1
    worst = max(intra.seconds_per_byte, most * inter.seconds_per_byte)
    return Line(
        startup_seconds=2 * (inside * intra.latency_seconds + outside * inter.latency_seconds),
        seconds_per_byte=2 * wire_share * (far + near + folds * worst)
        + (ranks - 1) / ranks * _gamma(intra, inter),
    )


def hierarchical(links: Links, cluster: Cluster, wire_share: float) -> Line:
    """An all-reduce over the first ranks of the nodes, which gather and spread inside them.

    wire_share: between nodes; inside one, values travel as they are.
    """
    intra, inter = _used(links, cluster)
    nodes, others = cluster.nodes, max(cluster.ranks_per_node) - 1
    share = (nodes - 1) / nodes
    return Line(
        startup_seconds=2 * min(1, others) * intra.latency_seconds
        + 2 * (nodes - 1) * inter.latency_seconds,
        seconds_per_byte=2 * others * intra.seconds_per_byte
        + 2 * share * inter.seconds_per_byte * wire_share
        + (others + share) * _gamma(intra, inter),
    )


def torus(links: Links, cluster: Cluster, wire_share: float) -> Line:
    """An all-reduce across nodes by all ranks of a node at once, each with its row.

    wire_share: between nodes. Raises CostError where nodes differ in size.
    """
    if len(set(cluster.ranks_per_node)) > 1:
        raise CostError(f"The torus needs as many ranks on every node, and there are {cluster}.")
    intra, inter = _used(links, cluster)
    nodes, ranks = cluster.nodes, cluster.ranks_per_node[0]
    inside, across = (ranks - 1) / ranks, (nodes - 1) / nodes
    return Line(
        startup_seconds=2 * (intra.latency_seconds + inter.latency_seconds),
        seconds_per_byte=2 * inside * intra.seconds_per_byte
        + 2 * across * inter.seconds_per_byte * wire_share
        + (inside + across / ranks) * _gamma(intra, inter),
    )


ALL_REDUCES: Mapping[str, Callable[[Links, Cluster, float], Line]] = {
    "native": lambda links, cluster, share: ring(links, cluster, "all_reduce", share),
    "ring": lambda links, cluster, share: ring(links, cluster, "all_reduce", share),
    "direct": direct,
    "recursive_doubling": recursive_doubling,
    "halving_doubling": halving_doubling,
    "hierarchical": hierarchical,
    "torus": torus,
}
"""The line of an all-reduce, from links, cluster and the share of bytes that travel."""


def hitopk(links: Links, cluster: Cluster, wire: Density) -> Line:
    """A sparse all-reduce of rows across nodes. Raises CostError where nodes differ in size."""
    return _of_rows(links, cluster, wire, rounds=1, share=cluster.nodes - 1)


def a2a_topk(links: Links, cluster: Cluster, wire: Density) -> Line:
    """As `hitopk`, with a round to the owner of each part of a row before the one to all."""
    share = 2 * (cluster.nodes - 1) / cluster.nodes
    return _of_rows(links, cluster, wire, rounds=2, share=share)


def naive_topk(links: Links, cluster: Cluster, wire: Density) -> Line:
    """All ranks' selections around a ring over all ranks."""
    others = cluster.world_size - 1
    if others == 0:
        return Line(0.0, 0.0)
    link = slowest_link(links, cluster)
    return Line(
        startup_seconds=others * link.latency_seconds,
        seconds_per_byte=others * _selected(wire) * link.seconds_per_byte
        + links.select_seconds_per_byte,
    )


def _of_rows(links: Links, cluster: Cluster, wire: Density, *, rounds: int, share: float) -> Line:
    """share: bytes that a card sends for each selected one."""
    if len(set(cluster.ranks_per_node)) > 1:
        raise CostError(
            f"hitopk and a2a_topk need as many ranks on every node, and there are {cluster}."
        )
    intra, inter = _used(links, cluster)
    ranks = cluster.ranks_per_node[0]
    inside, selected = (ranks - 1) / ranks, _selected(wire)
    gathered = inside * min(1.0, cluster.nodes * selected)
    return Line(
        startup_seconds=2 * intra.latency_seconds + rounds * inter.latency_seconds,
        seconds_per_byte=(inside + gathered) * intra.seconds_per_byte
        + share * selected * inter.seconds_per_byte
        + inside * _gamma(intra, inter)
        + links.select_seconds_per_byte / ranks,
    )


def _selected(wire: Density) -> float:
    """Bytes of a selection for each byte of float32 gradient."""
    return wire.density * (WIRE_BYTES[wire.values] + 4) / 4


SPARSE_SUMS: Mapping[str, Callable[[Links, Cluster, Density], Line]] = {
    "hitopk": hitopk,
    "naive_topk": naive_topk,
    "a2a_topk": a2a_topk,
}
"""The line of a sparse all-reduce, per byte of the bucket in memory."""


def break_even_density(cluster: Cluster, values: str = "float32") -> float:
    """Above this density hitopk's bytes between nodes are more than those of a dense torus.

    2s / (m (s+4)) with values of s bytes on m nodes: it shrinks as nodes are added, since what all
    nodes have selected reaches all others. Infinite on a single node, where nothing is between.
    """
    size = WIRE_BYTES[values]  # type: ignore[index]
    nodes = cluster.nodes
    return 2 * size / (nodes * (size + 4)) if nodes > 1 else float("inf")


def _used(links: Links, cluster: Cluster) -> tuple[Link, Link]:
    """The links inside and between nodes; one that the cluster does not have costs nothing.

    Raises CostError when one that it has is not known.
    """
    intra = inter = _FREE
    if max(cluster.ranks_per_node) > 1:
        if links.intra is None:
            raise CostError("The cluster's links lack `intra`, and nodes hold several ranks.")
        intra = links.intra
    if cluster.nodes > 1:
        if links.inter is None:
            raise CostError("The cluster's links lack `inter`, and there are several nodes.")
        inter = links.inter
    return intra, inter


def _gamma(intra: Link, inter: Link) -> float:
    return max(intra.reduce_seconds_per_byte, inter.reduce_seconds_per_byte)


def _rounds(cluster: Cluster) -> tuple[float, float]:
    """Rounds of doubling inside nodes and between them; a fold at both ends counts as two."""
    ranks, most = cluster.world_size, max(cluster.ranks_per_node)
    core = 1 << (ranks.bit_length() - 1)
    rounds = log2(core) + (0 if core == ranks else 2)
    inside = float(min(rounds, ceil(log2(most)))) if cluster.nodes > 1 else rounds
    return inside, rounds - inside
