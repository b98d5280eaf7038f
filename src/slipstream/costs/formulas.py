"""What collectives cost by formula, from the links of a cluster: for what nobody has measured.

alpha is a link's latency (seconds a message), beta its seconds per byte, gamma the seconds in
which a rank adds one byte; N is the number of ranks. Table 1 of "MG-WFBP" (Shi, Chu and Li,
INFOCOM'19) and the public simulator of its authors:

    ring   all-reduce        a = 2 (N-1) alpha    b = 2 (N-1)/N beta + (N-1)/N gamma
           reduce-scatter    a =   (N-1) alpha    b =   (N-1)/N (beta + gamma)
           all-gather        a =   (N-1) alpha    b =   (N-1)/N beta

A ring over ranks numbered node by node crosses each node's card once in either direction, so its
steps go at the pace of the slowest link on it.
"""

from __future__ import annotations

from slipstream.cluster import Cluster
from slipstream.costs.cluster_file import Link, Links, Operation
from slipstream.costs.curves import Line
from slipstream.errors import CostError


def slowest_link(links: Links, cluster: Cluster) -> Link:
    """The link at whose pace a ring over all ranks goes, number by number the worst of its links.

    Raises CostError when a link that the ring needs is not known.
    """
    used: list[Link] = []
    if max(cluster.ranks_per_node) > 1:
        if links.intra is None:
            raise CostError("The cluster's links lack `intra`, and nodes hold several ranks.")
        used.append(links.intra)
    if cluster.nodes > 1:
        if links.inter is None:
            raise CostError("The cluster's links lack `inter`, and there are several nodes.")
        used.append(links.inter)
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
