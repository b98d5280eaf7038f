"""The cluster's costs, measured: collectives by size, and links -> ClusterSpec."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from slipstream.cluster import Cluster
from slipstream.comm import Collectives, NativeHalves
from slipstream.comm.chosen import check
from slipstream.comm.peers import Peers
from slipstream.comm.torch_comm import backend_of
from slipstream.costs import ClusterSpec, Links, MeasuredCost
from slipstream.costs.cluster_file import Operation
from slipstream.errors import CostError, PlanError, RanksDiffer
from slipstream.measure.contest import Contest
from slipstream.measure.halves import GatherHalf, ScatterHalf
from slipstream.measure.links import measure_links
from slipstream.measure.sparse import SparseSum
from slipstream.measure.spread import median_and_spread
from slipstream.measure.timing import FLOAT_BYTES, Bench, Sweep
from slipstream.wires import DENSE_WIRES, CollectiveName, DenseWire, Wire
from slipstream.words import size as size_words

SIZES = tuple(2**power for power in range(10, 29))
"""1 KiB to 256 MiB, doubling."""
OPERATIONS: tuple[Operation, ...] = ("all_reduce", "reduce_scatter", "all_gather")
"""What can be measured: all-reduces, and the two halves of which pipelined plans consist."""
Way = tuple[CollectiveName, Wire]
"""A collective and what it sends, all elements or a share of them."""
NATIVE: tuple[Way, ...] = (("native", "float32"),)
_LINK_SHARE = 0.2
_LARGEST_MESSAGE_BYTES = 4 * 2**20


def probe(
    group: dist.ProcessGroup,
    cluster: Cluster,
    *,
    sizes: Sequence[int] = SIZES,
    seconds: float = 60.0,
    operations: Sequence[Operation] = ("all_reduce",),
    ways: Sequence[Way] = NATIVE,
    device: torch.device | None = None,
    store: Store | None = None,
    timeout_seconds: float = 600.0,
    clock: Callable[[], float] = time.perf_counter,
    tell: Callable[[str], None] = lambda _: None,
) -> ClusterSpec:
    """Measures what collectives and links cost on the cluster; all ranks call it alike.

    group: all ranks of the cluster, unused meanwhile. sizes: of buckets in bytes, increasing
    multiples of 4; the largest ones are left out where the time does not suffice, and the smallest
    is always measured. seconds: about what it may take, by rank 0's clock. operations: out of
    OPERATIONS, which share the time. ways: the collectives and wires of all-reduces; halves are
    measured of the native one. device: where gradients live, by default the CPU. tell: takes
    sentences about the progress.

    Returns the same on every rank: the table with medians and interquartile ranges over the
    repetitions, each that of its slowest rank, and the links inside and between nodes.

    Raises CostError for settings that cannot be measured, RanksDiffer on all ranks when theirs
    differ, RankFailure when one does not come.
    """
    asked = _Asked(sizes, seconds, operations, ways)
    bench = _bench(group, cluster, asked, device, store, timeout_seconds, clock, tell)
    costs = _costs(group, cluster, bench, asked, seconds * (1 - _LINK_SHARE))
    large_bytes = min(_LARGEST_MESSAGE_BYTES, max(_largest(costs), 2048))
    links = measure_links(group, cluster, bench, large_bytes)
    return _spec(group, cluster, bench, costs, sizes, links)


def probe_budgeted(
    group: dist.ProcessGroup,
    cluster: Cluster,
    sizes: Sequence[int],
    seconds: float,
    *,
    operations: Sequence[Operation] = ("all_reduce",),
    ways: Sequence[Way] = NATIVE,
    thorough: bool = True,
    device: torch.device | None = None,
    store: Store | None = None,
    timeout_seconds: float = 600.0,
    clock: Callable[[], float] = time.perf_counter,
) -> ClusterSpec:
    """`probe` without the links, for a job that has little time and knows its sizes.

    thorough: whether each way gets its share of the time. If not, they are measured side by side,
    which is for whoever takes the best way for each size: one that is clearly slower than the best
    at a size is only looked at there, and one that is far slower is given up where time is short;
    from then on it is taken to need time in proportion to the bytes, which is more than it would.
    """
    asked = _Asked(sizes, seconds, operations, ways, thorough)
    bench = _bench(group, cluster, asked, device, store, timeout_seconds, clock, lambda _: None)
    costs = _costs(group, cluster, bench, asked, seconds)
    return _spec(group, cluster, bench, costs, sizes, None)


@dataclass(frozen=True)
class _Asked:
    """What is to be measured, which has to be the same on every rank."""

    sizes: Sequence[int]
    seconds: float
    operations: Sequence[Operation]
    ways: Sequence[Way]
    thorough: bool = True


def _bench(
    group: dist.ProcessGroup,
    cluster: Cluster,
    asked: _Asked,
    device: torch.device | None,
    store: Store | None,
    timeout_seconds: float,
    clock: Callable[[], float],
    tell: Callable[[str], None],
) -> Bench:
    """Checks what is asked, on this rank and against the others."""
    peers = Peers(group, store, timeout_seconds, device or torch.device("cpu"))
    mine = {
        "sizes": list(asked.sizes),
        "seconds": asked.seconds,
        "operations": list(asked.operations),
        "collectives": [[name, str(wire)] for name, wire in asked.ways],
        "thoroughness": asked.thorough,
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
    _check(cluster, peers.world_size, asked)
    return Bench(peers, device or torch.device("cpu"), clock, tell)


def _check(cluster: Cluster, world_size: int, asked: _Asked) -> None:
    sizes, seconds = asked.sizes, asked.seconds
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
    known = len(set(asked.operations) & set(OPERATIONS))
    if not known or known < len(asked.operations):
        raise CostError(
            f"Operations to probe are some of {', '.join(OPERATIONS)}, each once; not "
            f"{', '.join(asked.operations) or 'none'}."
        )
    _check_ways(asked, cluster)
    if not (math.isfinite(seconds) and seconds > 0):
        raise CostError(f"A probe takes a finite time above 0, not {seconds} s.")


def _check_ways(asked: _Asked, cluster: Cluster) -> None:
    if "all_reduce" in asked.operations and not asked.ways:
        raise CostError("All-reduces to probe need a collective, such as 'native'.")
    for collective, wire in asked.ways:
        try:
            check(collective, wire, cluster)
        except PlanError as error:
            raise CostError(str(error)) from error


def ways_of(
    cluster: Cluster,
    collectives: Sequence[CollectiveName] = (),
    wires: Sequence[DenseWire] = ("float32",),
) -> tuple[Way, ...]:
    """Every collective that works on the cluster, or those asked for, with each of these wires.

    Raises CostError for a collective that there is not or not on this cluster, and where none sends
    any of the wires.
    """
    found = []
    for collective in collectives or DENSE_WIRES:
        try:
            check(collective, "float32", cluster)
        except PlanError as error:
            if collectives:
                raise CostError(str(error)) from error
            continue
        found += [(collective, w) for w in wires if w in DENSE_WIRES[collective]]
    if not found:
        raise CostError(f"None of {', '.join(collectives)} sends {' or '.join(wires)}.")
    return tuple(dict.fromkeys(found))


def _costs(
    group: dist.ProcessGroup, cluster: Cluster, bench: Bench, asked: _Asked, seconds: float
) -> tuple[MeasuredCost, ...]:
    halves, collectives = NativeHalves(group), Collectives(group, cluster, bench.device)
    ways = asked.ways if "all_reduce" in asked.operations else ()
    shares = [2 * len(ways) if name == "all_reduce" else 1 for name in asked.operations]
    found: list[MeasuredCost] = []
    try:
        for operation, share in zip(asked.operations, shares, strict=True):  # as the bytes
            left = seconds * share / sum(shares)
            if operation == "all_reduce":
                runs = [_run_of(collectives, way, group.size()) for way in ways]
                found += _all_reduces(runs, bench, asked, left)
            else:
                half = ScatterHalf if operation == "reduce_scatter" else GatherHalf
                with torch.no_grad():
                    times = Sweep(half(halves, group.size()), bench, asked.sizes, left).run()
                found.append(_cost(operation, NATIVE[0], times))
    finally:
        collectives.close()
    return tuple(found)


def _run_of(collectives: Collectives, way: Way, ranks: int) -> Callable[[torch.Tensor], None]:
    name, wire = way
    if isinstance(wire, str):
        return collectives.get(name, wire).sum_
    return SparseSum(collectives, name, wire, ranks)


def _all_reduces(
    runs: Sequence[Callable[[torch.Tensor], None]], bench: Bench, asked: _Asked, seconds: float
) -> list[MeasuredCost]:
    """The cost of each of the ways."""
    with torch.no_grad():
        if asked.thorough or len(runs) == 1:
            share = seconds / len(runs)
            times = [Sweep(run, bench, asked.sizes, share).run() for run in runs]
        else:
            times = Contest(runs, bench, asked.sizes, seconds).run()
    largest = max(max(found) for found in times)
    if not asked.thorough:
        times = [_in_proportion_up_to(largest, found) for found in times]
    return [_cost("all_reduce", way, found) for way, found in zip(asked.ways, times, strict=True)]


def _in_proportion_up_to(largest: int, times: dict[int, list[float]]) -> dict[int, list[float]]:
    """With one more point where a way was given up: its last slope alone might be far too small."""
    last = max(times)
    if last == largest:
        return times
    return times | {largest: [median_and_spread(times[last])[0] * largest / last]}


def _cost(name: Operation, way: Way, times: dict[int, list[float]]) -> MeasuredCost:
    found = {size: median_and_spread(repetitions) for size, repetitions in times.items()}
    return MeasuredCost(
        collective=way[0],
        operation=name,
        wire=way[1],
        points=tuple((size, median) for size, (median, _) in found.items()),
        spread_seconds=tuple(spread for _, spread in found.values()),
    )


def _largest(costs: Sequence[MeasuredCost]) -> int:
    """The largest size that was reached for every operation."""
    return min(cost.points[-1][0] for cost in costs if cost.points)


def _spec(
    group: dist.ProcessGroup,
    cluster: Cluster,
    bench: Bench,
    costs: tuple[MeasuredCost, ...],
    sizes: Sequence[int],
    links: Links | None,
) -> ClusterSpec:
    largest = _largest(costs)
    note = "Medians over repetitions back to back, each of its slowest rank."
    if largest < sizes[-1]:
        note += f" Sizes above {size_words(largest)} took longer than there was time for."
    counts = set(cluster.ranks_per_node)
    return ClusterSpec(
        backend=backend_of(group, bench.device),
        nodes=cluster.nodes,
        ranks_per_node=counts.pop() if len(counts) == 1 else cluster.ranks_per_node,
        links=links,
        costs=costs,
        note=note,
    )
