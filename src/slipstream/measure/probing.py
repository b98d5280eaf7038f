"""The cluster's costs, measured: collectives by size, and links -> ClusterSpec."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from slipstream.cluster import Cluster
from slipstream.comm import Native
from slipstream.comm.peers import Peers
from slipstream.costs import ClusterSpec, Links, MeasuredCost
from slipstream.errors import CostError, RanksDiffer
from slipstream.measure.links import measure_links
from slipstream.measure.spread import median_and_spread
from slipstream.measure.timing import FLOAT_BYTES, Bench, Sweep
from slipstream.words import size as size_words

SIZES = tuple(2**power for power in range(10, 29))
"""1 KiB to 256 MiB, doubling."""
_LINK_SHARE = 0.2
_LARGEST_MESSAGE_BYTES = 4 * 2**20


def probe(
    group: dist.ProcessGroup,
    cluster: Cluster,
    *,
    sizes: Sequence[int] = SIZES,
    seconds: float = 60.0,
    device: torch.device | None = None,
    store: Store | None = None,
    timeout_seconds: float = 600.0,
    clock: Callable[[], float] = time.perf_counter,
    tell: Callable[[str], None] = lambda _: None,
) -> ClusterSpec:
    """Measures what all-reduces and links cost on the cluster; all ranks call it alike.

    group: all ranks of the cluster, unused meanwhile. sizes: of buckets in bytes, increasing
    multiples of 4; the largest ones are left out where the time does not suffice, and the smallest
    is always measured. seconds: about what it may take, by rank 0's clock. device: where gradients
    live, by default the CPU. tell: takes sentences about the progress.

    Returns the same on every rank: the table with medians and interquartile ranges over the
    repetitions, each that of its slowest rank, and the links inside and between nodes.

    Raises CostError for settings that cannot be measured, RanksDiffer on all ranks when theirs
    differ, RankFailure when one does not come.
    """
    bench = _bench(group, cluster, sizes, seconds, device, store, timeout_seconds, clock, tell)
    cost = _all_reduce(group, bench, sizes, seconds * (1 - _LINK_SHARE))
    assert cost.points is not None
    large_bytes = min(_LARGEST_MESSAGE_BYTES, max(cost.points[-1][0], 2048))
    links = measure_links(group, cluster, bench, large_bytes)
    return _spec(group, cluster, bench, cost, sizes, links)


def probe_budgeted(
    group: dist.ProcessGroup,
    cluster: Cluster,
    sizes: Sequence[int],
    seconds: float,
    *,
    device: torch.device | None = None,
    store: Store | None = None,
    timeout_seconds: float = 600.0,
    clock: Callable[[], float] = time.perf_counter,
) -> ClusterSpec:
    """`probe` of all-reduces alone, for a job that has little time and knows its sizes."""
    bench = _bench(
        group, cluster, sizes, seconds, device, store, timeout_seconds, clock, lambda _: None
    )
    cost = _all_reduce(group, bench, sizes, seconds)
    return _spec(group, cluster, bench, cost, sizes, None)


def _bench(
    group: dist.ProcessGroup,
    cluster: Cluster,
    sizes: Sequence[int],
    seconds: float,
    device: torch.device | None,
    store: Store | None,
    timeout_seconds: float,
    clock: Callable[[], float],
    tell: Callable[[str], None],
) -> Bench:
    """Checks what is asked, on this rank and against the others."""
    peers = Peers(group, store, timeout_seconds, device or torch.device("cpu"))
    mine = {
        "sizes": list(sizes),
        "seconds": seconds,
        "ranks of each node": list(cluster.ranks_per_node),
        "device type": (device or torch.device("cpu")).type,
    }
    everyone = peers.gather(mine, "comparing what to measure")
    for rank, other in enumerate(everyone[1:], start=1):
        for name, value in everyone[0].items():
            if other[name] != value:
                raise RanksDiffer(
                    f"Ranks differ: the probe's {name} are {value} on rank 0 and {other[name]} on "
                    f"rank {rank}. Probe with the same settings on every rank."
                )
    _check(cluster, peers.world_size, sizes, seconds)
    return Bench(peers, device or torch.device("cpu"), clock, tell)


def _check(cluster: Cluster, world_size: int, sizes: Sequence[int], seconds: float) -> None:
    if cluster.world_size != world_size:
        raise CostError(
            f"The cluster has {cluster.world_size} ranks and the group that measures it "
            f"{world_size}; they are the same ranks."
        )
    if world_size < 2:
        raise CostError("A single rank has no one to exchange gradients with; probe with two.")
    if not sizes or any(size < FLOAT_BYTES or size % FLOAT_BYTES for size in sizes):
        raise CostError(f"Sizes to probe are multiples of {FLOAT_BYTES} bytes, not {list(sizes)}.")
    if any(after <= before for before, after in pairwise(sizes)):
        raise CostError(f"Sizes to probe increase: {list(sizes)} do not.")
    if not (math.isfinite(seconds) and seconds > 0):
        raise CostError(f"A probe takes a finite time above 0, not {seconds} s.")


def _all_reduce(
    group: dist.ProcessGroup, bench: Bench, sizes: Sequence[int], seconds: float
) -> MeasuredCost:
    native = Native(group)
    with torch.no_grad():
        times = Sweep(native.sum_, bench, sizes, seconds).run()
    found = {size: median_and_spread(repetitions) for size, repetitions in times.items()}
    return MeasuredCost(
        collective="native",
        points=tuple((size, median) for size, (median, _) in found.items()),
        spread_seconds=tuple(spread for _, spread in found.values()),
    )


def _spec(
    group: dist.ProcessGroup,
    cluster: Cluster,
    bench: Bench,
    cost: MeasuredCost,
    sizes: Sequence[int],
    links: Links | None,
) -> ClusterSpec:
    assert cost.points is not None
    largest = cost.points[-1][0]
    note = "Medians over repetitions back to back, each of its slowest rank."
    if largest < sizes[-1]:
        note += f" Sizes above {size_words(largest)} took longer than there was time for."
    counts = set(cluster.ranks_per_node)
    return ClusterSpec(
        backend=_backend(group, bench.device),
        nodes=cluster.nodes,
        ranks_per_node=counts.pop() if len(counts) == 1 else cluster.ranks_per_node,
        links=links,
        costs=(cost,),
        note=note,
    )


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend's name, also of a group that torch.distributed has not registered."""
    name: str = group._get_backend(device).name()
    return name
