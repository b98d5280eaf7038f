"""What a probe finds out, how long it takes, and what happens when ranks do not agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ranks import Rank, run_ranks, run_ranks_settled
from slipstream.cluster import Cluster
from slipstream.comm.peers import Peers
from slipstream.costs import ClusterSpec, Costs
from slipstream.errors import CostError, RankFailure, RanksDiffer
from slipstream.measure import OPERATIONS, SIZES, probe, probe_budgeted
from slipstream.measure.links import inner_pairs, outer_pairs
from slipstream.measure.spread import median_and_spread
from slipstream.measure.timing import MAX_ROUNDS, Bench, Sweep
from worked_models import StoodClock

CPU = torch.device("cpu")


def swept(
    seconds_for: Callable[[int], float], sizes: tuple[int, ...], seconds: float
) -> tuple[dict[int, list[float]], float, list[int]]:
    """A sweep on one rank: what it found, how long it took, and the bytes of each run in order."""
    clock, runs = StoodClock(), []

    def operation(flat: torch.Tensor) -> None:
        runs.append(flat.numel() * 4)
        clock.wait(seconds_for(runs[-1]))

    bench = Bench(Peers(None, None, 1.0, CPU), CPU, clock)
    found = Sweep(operation, bench, sizes, seconds).run()
    return found, clock.now, runs


def test_a_sweep_finds_what_each_size_takes() -> None:
    found, _, _ = swept(lambda size: 0.25 + size / 1024, (1024, 2048, 4096), 1e6)
    assert {size: set(times) for size, times in found.items()} == {
        1024: {1.25},
        2048: {2.25},
        4096: {4.25},
    }
    assert [len(times) for times in found.values()] == [10 * MAX_ROUNDS] * 3


@pytest.mark.parametrize("seconds", [0.5, 3.0, 30.0, 300.0])
def test_a_sweep_keeps_its_budget_and_measures_as_far_as_that_reaches(seconds: float) -> None:
    sizes = tuple(2**power for power in range(10, 22))
    found, took, _ = swept(lambda size: 0.004 + size * 1e-5, sizes, seconds)
    assert took <= seconds
    assert all(len(times) >= 3 for times in found.values())
    assert list(found) == list(sizes[: len(found)])
    if len(found) < len(sizes):  # the next one would not have fitted
        following = 0.004 + sizes[len(found)] * 1e-5
        assert 8 * following > seconds / 2
    else:
        assert took > seconds / 3


def test_the_smallest_size_is_measured_whatever_it_takes() -> None:
    found, _, _ = swept(lambda _: 100.0, (1024, 2048), 1.0)
    assert found == {1024: [100.0] * 3}


def test_rounds_go_from_the_largest_size_down_after_one_run_that_empties_the_bucket() -> None:
    _, _, runs = swept(lambda size: size * 1.0, (4, 8, 16), 1e6)
    assert runs[:6] == [4, 4, 8, 8, 16, 16]
    first_round = runs[6 : 6 + len(runs[6:]) // MAX_ROUNDS]
    assert first_round[:2] == [16, 16]
    assert first_round == sorted(first_round, reverse=True)
    assert runs[6:] == first_round * MAX_ROUNDS


def test_a_repetition_takes_what_its_slowest_rank_takes_and_rank_0_keeps_the_time() -> None:
    def body(rank: Rank) -> dict[int, list[float]]:
        clock = StoodClock()
        takes = [1.0, 3.0, 2.0][rank.rank]

        def operation(_: torch.Tensor) -> None:
            clock.wait(takes)

        bench = Bench(Peers(rank.group, None, 5.0, CPU), CPU, clock)
        return Sweep(operation, bench, (1024, 2048), 40.0).run()

    outcomes = run_ranks(body, 3)
    assert outcomes == [outcomes[0]] * 3
    assert {time for times in outcomes[0].values() for time in times} == {3.0}


@pytest.mark.parametrize("shape", [(1, 1), (2,), (2, 1)], ids=str)
def test_a_probe_gives_every_rank_the_same_cluster(shape: tuple[int, ...]) -> None:
    cluster = Cluster(shape)

    def body(rank: Rank) -> ClusterSpec:
        return probe(rank.group, cluster, sizes=(1024, 4096, 65536), seconds=60.0)

    first, *others = run_ranks(body, cluster.world_size)
    assert all(other == first for other in others)
    assert (first.backend, first.cluster) == ("gloo", cluster)
    (cost,) = first.costs
    assert cost.points is not None and cost.spread_seconds is not None
    assert [size for size, _ in cost.points] == [1024, 4096, 65536]
    assert first.links is not None
    assert (first.links.intra is None) == (max(shape) == 1)
    assert (first.links.inter is None) == (len(shape) == 1)
    for link in (first.links.intra, first.links.inter):
        assert link is None or (link.latency_seconds > 0 and link.reduce_seconds_per_byte > 0)
    assert ClusterSpec.from_json(first.to_json()) == first
    assert Costs.of(first).curve().seconds(1024) == cost.points[0][1]


def test_a_budgeted_probe_leaves_out_the_links_and_what_there_is_no_time_for() -> None:
    def body(rank: Rank) -> ClusterSpec:
        clock = StoodClock()

        def ticking() -> float:
            clock.wait(1.0)  # every look at the clock takes a second, and so every run
            return clock.now

        return probe_budgeted(rank.group, Cluster((2,)), SIZES, 20.0, clock=ticking)

    zero, one = run_ranks(body, 2)
    assert zero == one
    assert zero.links is None
    (cost,) = zero.costs
    assert cost.points == ((1024, 1.0), (2048, 1.0)) and cost.spread_seconds == (0.0, 0.0)
    assert "Sizes above 2.00 KiB took longer than there was time for." in zero.note


def test_the_halves_are_measured_as_all_reduces_are_and_serve_pipelined_plans() -> None:
    cluster = Cluster((1, 1, 1))
    sizes = (4, 1024, 4096)  # 4 bytes, one element: fewer than ranks

    def body(rank: Rank) -> ClusterSpec:
        return probe_budgeted(rank.group, cluster, sizes, 30.0, operations=OPERATIONS)

    first, *others = run_ranks(body, 3)
    assert others == [first] * 2
    assert [cost.operation for cost in first.costs] == list(OPERATIONS)
    costs = Costs.of(first)
    for cost in first.costs:
        assert cost.points is not None and [size for size, _ in cost.points] == list(sizes)
        assert costs.curve("native", cost.operation).seconds(1024) == cost.points[1][1] > 0


def test_ranks_that_probe_differently_all_say_so() -> None:
    def body(rank: Rank) -> None:
        probe_budgeted(rank.group, Cluster((2,)), (1024, 2048 + 4 * rank.rank), 1.0)

    for outcome in run_ranks_settled(body, 2):
        assert isinstance(outcome, RanksDiffer)
        assert "sizes are [1024, 2048] on rank 0 and [1024, 2052] on rank 1" in str(outcome)


@pytest.mark.parametrize("operations", [(), ("all_gather", "all_gather"), ("broadcast",)])
def test_operations_that_cannot_be_measured_are_refused(operations: Any) -> None:
    def body(rank: Rank) -> None:
        probe_budgeted(rank.group, Cluster((2,)), (1024,), 1.0, operations=operations)

    for outcome in run_ranks_settled(body, 2):
        assert isinstance(outcome, CostError) and "each once" in str(outcome)


@pytest.mark.parametrize(
    ("shape", "sizes", "seconds", "words"),
    [
        ((3,), (1024,), 1.0, "has 3 ranks and the group that measures it 2"),
        ((2,), (), 1.0, "multiples of 4"),
        ((2,), (1023,), 1.0, "multiples of 4"),
        ((2,), (2048, 1024), 1.0, "increase"),
        ((2,), (1024,), 0.0, "finite time above 0"),
        ((2,), (1024,), float("inf"), "finite time above 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    shape: tuple[int, ...], sizes: tuple[int, ...], seconds: float, words: str
) -> None:
    def body(rank: Rank) -> None:
        probe(rank.group, Cluster(shape), sizes=sizes, seconds=seconds)

    for outcome in run_ranks_settled(body, 2):
        assert isinstance(outcome, CostError) and words in str(outcome)


def test_a_single_rank_has_nothing_to_probe() -> None:
    (outcome,) = run_ranks_settled(lambda rank: probe(rank.group, Cluster((1,))), 1)
    assert isinstance(outcome, CostError) and "probe with two" in str(outcome)


@pytest.mark.usefixtures("brief_reports")
def test_a_rank_that_is_lost_is_named_within_the_limit() -> None:
    def body(rank: Rank) -> None:
        said: list[str] = []

        def tell(text: str) -> None:
            said.append(text)
            if rank.rank == 1 and len(said) == 2:
                rank.hold(8.0)
                raise SystemExit

        peers_limit = 1.0
        probe(
            rank.group,
            Cluster((2,)),
            sizes=(1024, 2048, 4096),
            seconds=1.0,
            timeout_seconds=peers_limit,
            tell=tell,
        )

    zero, _ = run_ranks_settled(body, 2, timeout_seconds=1.0)
    assert isinstance(zero, RankFailure)
    assert "while measuring 2.00 KiB" in str(zero) and "no answer from rank 1" in str(zero)


def test_pairs_cover_nodes_and_the_ring_between_them() -> None:
    cluster = Cluster((2, 1, 3))
    assert inner_pairs(cluster) == [(0, 1), (3, 4)]
    assert outer_pairs(cluster) == [(0, 2), (2, 3), (3, 0)]
    assert outer_pairs(Cluster((4,))) == []
    many = outer_pairs(Cluster.regular(100, 2))
    assert len(many) == 8 and many[1] == (26, 28)


def test_median_and_interquartile_range() -> None:
    assert median_and_spread([5.0, 1.0, 2.0, 4.0, 3.0]) == (3.0, 2.0)
    assert median_and_spread([7.0]) == (7.0, 0.0)
