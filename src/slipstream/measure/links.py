"""The links inside and between nodes, by messages from one rank to another.

    latency            half of a small message's way there and back
    seconds per byte   large messages one after the other in one direction: from the arrival of the
                       first, which drains the links' token buckets, to that of the last
    reduction          adding one array to another in memory, in one thread of every rank at once

Pairs are measured one after the other, and the slowest pair of each kind counts: a collective goes
at its pace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from slipstream.cluster import Cluster
from slipstream.costs import Link, Links
from slipstream.measure.spread import median_and_spread
from slipstream.measure.timing import FLOAT_BYTES, Bench

_SMALL_BYTES = 1024
_ROUND_TRIPS = 10
_STREAMED = 4  # messages, of which the first counts for nothing
_STREAMS = 3  # of which the first counts for nothing
_LEAST_STREAMED_BYTES = 2**19  # the lab's token buckets hold half of it, those of clouds as little
_MAX_PAIRS = 8
_REDUCED_BYTES = 4 * 2**20
_REDUCTIONS = 9
_PIECE = 2**14  # elements: torch adds so few of them in one thread

Pair = tuple[int, int]


def measure_links(
    group: dist.ProcessGroup, cluster: Cluster, bench: Bench, large_bytes: int
) -> Links:
    """The slowest link inside a node and the slowest between two; None for a kind there is not.

    All ranks call it. large_bytes: of the messages that tell the rate; 512 KiB at the least. At
    most 8 pairs of each kind are measured, spread evenly over the cluster.
    Raises RankFailure when a rank does not come.
    """
    reduce_seconds = _reduction(bench)
    large_bytes = max(large_bytes, _LEAST_STREAMED_BYTES)
    found = {
        kind: _slowest(group, pairs, bench, large_bytes, reduce_seconds)
        for kind, pairs in (("intra", inner_pairs(cluster)), ("inter", outer_pairs(cluster)))
    }
    return Links(intra=found["intra"], inter=found["inter"])


def inner_pairs(cluster: Cluster) -> list[Pair]:
    """The first two ranks of each node that has two."""
    nodes = [cluster.ranks_of_node(node) for node in range(cluster.nodes)]
    return _thinned([(ranks[0], ranks[1]) for ranks in nodes if len(ranks) > 1])


def outer_pairs(cluster: Cluster) -> list[Pair]:
    """The first rank of each node with the next node's, around the ring."""
    firsts = [cluster.ranks_of_node(node)[0] for node in range(cluster.nodes)]
    if len(firsts) < 2:
        return []
    around = zip(firsts, [*firsts[1:], firsts[0]], strict=True)
    return _thinned(list(around))


def _thinned(pairs: list[Pair]) -> list[Pair]:
    step = -(-len(pairs) // _MAX_PAIRS)
    return pairs[::step] if pairs else []


def _slowest(
    group: dist.ProcessGroup,
    pairs: list[Pair],
    bench: Bench,
    large_bytes: int,
    reduce_seconds: float,
) -> Link | None:
    if not pairs:
        return None
    measured = [_pair(group, pair, bench, large_bytes) for pair in pairs]
    return Link(
        latency_seconds=max(latency for latency, _ in measured),
        seconds_per_byte=max(per_byte for _, per_byte in measured),
        reduce_seconds_per_byte=reduce_seconds,
    )


def _pair(
    group: dist.ProcessGroup, pair: Pair, bench: Bench, large_bytes: int
) -> tuple[float, float]:
    """Latency and seconds per byte of one pair, on every rank; the others only wait.

    Both by the clock of one rank: trips by the sender's, arrivals by the receiver's.
    """
    sender, receiver = pair
    bench.tell(f"the link from rank {sender} to rank {receiver}")
    doing = f"measuring the link from rank {sender} to rank {receiver}"
    mine: list[float] = []
    if bench.peers.rank in pair:
        small, large = (
            torch.zeros(num_bytes // FLOAT_BYTES, device=bench.device)
            for num_bytes in (_SMALL_BYTES, large_bytes)
        )
        sends = bench.peers.rank == sender
        arrivals: list[float] = []

        def arrived() -> None:
            bench.settle()
            arrivals.append(bench.clock())

        there_and_back = _exchange(group, pair, sends, [small], small)
        stream = _exchange(group, pair, sends, [large] * _STREAMED, small, arrived)
        bench.seconds(there_and_back, 1, doing)  # connects
        trips = bench.seconds(there_and_back, _ROUND_TRIPS, doing)
        bench.seconds(stream, _STREAMS, doing)
        mine = trips if sends else arrivals[_STREAMED:]
    everyone = bench.peers.gather(mine, doing)
    latency = median_and_spread(everyone[sender])[0] / 2
    return latency, seconds_per_byte(everyone[receiver], _STREAMED, large_bytes)


def seconds_per_byte(arrivals: Sequence[float], num_messages: int, message_bytes: int) -> float:
    """The median over streams of so many messages, which arrived at these moments, in seconds.

    What a link lets through at once after a pause has gone with the first message of each stream;
    pauses between messages, which fill the bucket anew, are part of the time that is measured.
    """
    streams = [
        arrivals[start : start + num_messages] for start in range(0, len(arrivals), num_messages)
    ]
    return median_and_spread(
        [(stream[-1] - stream[0]) / ((num_messages - 1) * message_bytes) for stream in streams]
    )[0]


def _exchange(
    group: dist.ProcessGroup,
    pair: Pair,
    sends: bool,
    messages: list[torch.Tensor],
    answer: torch.Tensor,
    arrived: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """Sends (or takes) the messages, then takes (or sends) the answer.

    arrived: called by who takes them, after each message.
    """
    sender, receiver = pair

    def run() -> None:
        for message in messages:
            if sends:
                group.send([message], receiver, 0).wait()
            else:
                group.recv([message], sender, 0).wait()
                arrived()
        if sends:
            group.recv([answer], receiver, 0).wait()
        else:
            group.send([answer], sender, 0).wait()

    return run


def _reduction(bench: Bench) -> float:
    """Seconds in which the slowest rank adds one byte, all ranks at once.

    Piece by piece, as collectives do it: in one thread, however many this process may use.
    """
    total, part = (
        torch.zeros(_REDUCED_BYTES // FLOAT_BYTES, device=bench.device) for _ in range(2)
    )
    pieces = list(zip(total.split(_PIECE), part.split(_PIECE), strict=True))

    def add() -> None:
        for mine, theirs in pieces:
            mine.add_(theirs)

    doing = "measuring the addition of gradients"
    times = bench.seconds(add, 1 + _REDUCTIONS, doing)[1:]
    everyone = bench.peers.gather(times, doing)
    return max(median_and_spread(times)[0] for times in everyone) / _REDUCED_BYTES
