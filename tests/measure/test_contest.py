"""Rival ways measured side by side: who is measured, how well, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ranks import Rank, run_ranks
from slipstream.cluster import Cluster
from slipstream.comm.peers import Peers
from slipstream.costs import ClusterSpec, Costs, Line
from slipstream.measure import probe_budgeted, probing
from slipstream.measure.contest import CLOSE, FAR, Contest
from slipstream.measure.probing import Way
from slipstream.measure.timing import MIN_ROUNDS, Bench
from slipstream.wires import DENSE_WIRES
from worked_models import StoodClock

CPU = torch.device("cpu")
SIZES = tuple(4 * 3**power for power in range(4, 12))
ROOMY = 1e9

Found = list[dict[int, list[float]]]


def contested(
    ways: Sequence[Line], seconds: float, sizes: Sequence[int] = SIZES
) -> tuple[Found, float, list[int]]:
    """Of one rank whose ways take what lines say: what was found, how long it took, who ran."""
    clock, ran = StoodClock(), list[int]()

    def run(way: int, flat: torch.Tensor) -> None:
        ran.append(way)
        clock.wait(ways[way].seconds(flat.numel() * 4))

    def operation(way: int) -> object:
        return lambda flat: run(way, flat)

    bench = Bench(Peers(None, None, 1.0, CPU), CPU, clock)
    operations = [operation(way) for way in range(len(ways))]
    found = Contest(operations, bench, sizes, seconds).run()  # type: ignore[arg-type]
    return found, clock.now, ran


rivals = st.lists(
    st.builds(
        Line,
        st.integers(1, 100).map(lambda thousandths: thousandths * 1e-3),
        st.integers(0, 1000).map(lambda billionths: billionths * 1e-9),
    ),
    min_size=1,
    max_size=5,
)


@given(rivals)
def test_with_time_enough_all_sizes_are_known_and_those_that_may_win_are_measured_again(
    ways: list[Line],
) -> None:
    found, _, _ = contested(ways, ROOMY)
    for size in SIZES:
        best = min(way.seconds(size) for way in ways)
        for way, times in zip(ways, found, strict=True):
            assert times[size] == pytest.approx([way.seconds(size)] * len(times[size]))
            close = way.seconds(size) <= CLOSE * best * (1 - 1e-9)
            far = way.seconds(size) > CLOSE * best * (1 + 1e-9)
            assert not close or len(times[size]) >= MIN_ROUNDS
            assert not far or len(times[size]) == 1


@given(rivals, st.floats(0.1, 1000.0))
def test_the_budget_is_kept_once_the_smallest_size_is_through(
    ways: list[Line], seconds: float
) -> None:
    found, took, _ = contested(ways, seconds)
    smallest = 8 * sum(way.seconds(SIZES[0]) for way in ways)
    assert took <= max(seconds, smallest) * (1 + 1e-9)
    reached = [list(times) for times in found]
    longest = max(reached, key=len)
    assert longest == list(SIZES[: len(longest)])
    assert all(sizes == longest[: len(sizes)] for sizes in reached)


@given(rivals, st.floats(0.1, 1000.0))
def test_whoever_is_given_up_was_far_behind_at_the_last_size_that_it_reached(
    ways: list[Line], seconds: float
) -> None:
    found, _, _ = contested(ways, seconds)
    largest = max(max(times) for times in found)
    for way, times in zip(ways, found, strict=True):
        last = max(times)
        if last < largest:
            assert way.seconds(last) > FAR * (1 - 1e-9) * min(rival.seconds(last) for rival in ways)


def test_a_way_that_is_far_slower_is_given_up_before_a_size_is() -> None:
    quick, slow = Line(1.0, 1e-6), Line(1.0, 1e-3)
    _, whole, _ = contested([quick], ROOMY)
    found, _, _ = contested([quick, slow], 150.0)
    assert list(found[0]) == list(SIZES)
    assert SIZES[0] in found[1] and SIZES[-1] not in found[1]
    even, _, _ = contested([quick, quick], 30.0)
    assert list(even[0]) == list(even[1]) != list(SIZES)
    assert whole > 150.0


def test_a_lucky_look_wins_nothing() -> None:
    """Its second look alone would be the best; what counts is the longer one."""
    clock, looks = StoodClock(), iter([0.2, 5.0, 0.2, 5.0])

    def steady(_: torch.Tensor) -> None:
        clock.wait(0.1)

    def erratic(_: torch.Tensor) -> None:
        clock.wait(next(looks))

    bench = Bench(Peers(None, None, 1.0, CPU), CPU, clock)
    first, second = Contest([steady, erratic], bench, SIZES[:2], ROOMY).run()
    for times in first.values():
        assert len(times) >= MIN_ROUNDS and times == pytest.approx([0.1] * len(times))
    assert list(second.values()) == [[pytest.approx(5.0)]] * 2


def test_ways_take_turns_at_every_size() -> None:
    _, _, ran = contested([Line(1.0, 0.0)] * 3, 1.0, SIZES[:2])
    looks, rounds = ran[:6], ran[6:]
    assert looks == [0, 0, 1, 1, 2, 2]
    assert rounds == [0, 0, 1, 2] * MIN_ROUNDS  # the first of a round drains the links


def test_all_ranks_decide_alike_whatever_their_own_clocks_say() -> None:
    def body(rank: Rank) -> Found:
        clock = StoodClock()

        def waits(seconds: float) -> object:
            return lambda flat: clock.wait(seconds * flat.numel() * (1 + rank.rank))

        bench = Bench(Peers(rank.group, None, 5.0, CPU), CPU, clock)
        operations = [waits(0.1), waits(0.3), waits(0.12)]
        return Contest(operations, bench, SIZES[:4], 4700.0).run()  # type: ignore[arg-type]

    outcomes = run_ranks(body, 3)
    assert outcomes == [outcomes[0]] * 3
    elements = SIZES[0] // 4
    slowest = outcomes[0][0][SIZES[0]]
    assert slowest == pytest.approx([3 * 0.1 * elements] * len(slowest))
    assert max(outcomes[0][1]) < max(outcomes[0][0])


@pytest.mark.parametrize("shape", [(2,), (1, 1), (2, 1)], ids=str)
def test_a_probe_that_is_not_thorough_knows_every_way_up_to_the_largest_size(
    shape: tuple[int, ...],
) -> None:
    cluster = Cluster(shape)
    works = [name for name in DENSE_WIRES if name != "torus" or len(set(shape)) == 1]
    ways = [(name, wire) for name in works for wire in DENSE_WIRES[name]]
    sizes = (1024, 4096, 16384)

    def body(rank: Rank) -> ClusterSpec:
        return probe_budgeted(rank.group, cluster, sizes, 0.3, ways=ways, thorough=False)

    first, *others = run_ranks(body, cluster.world_size)
    assert others == [first] * len(others)
    assert [(cost.collective, cost.wire) for cost in first.costs] == ways
    reached = {cost.points[-1][0] for cost in first.costs if cost.points}
    assert len(reached) == 1
    costs = Costs.of(first)
    for name, wire in ways:
        assert costs.curve(name, "all_reduce", wire).seconds(1024) > 0


def test_a_way_that_was_given_up_is_charged_in_proportion_to_the_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own last slope, of noise, could make it the best of all for large buckets."""
    takes = {"native": Line(1.0, 1e-6), "ring": Line(40.0, 0.0)}
    clocks = threading.local()

    class Stood:
        def __init__(self, *_: object) -> None:
            pass

        def get(self, name: str, _: str) -> Any:
            def sum_(flat: torch.Tensor) -> None:
                clocks.mine.wait(takes[name].seconds(flat.numel() * 4))

            return SimpleNamespace(sum_=sum_)

        def close(self) -> None:
            pass

    def body(rank: Rank) -> ClusterSpec:
        clocks.mine = StoodClock()
        ways: list[Way] = [("native", "float32"), ("ring", "float32")]
        return probe_budgeted(
            rank.group, Cluster((2,)), SIZES, 250.0, ways=ways, thorough=False, clock=clocks.mine
        )

    monkeypatch.setattr(probing, "Collectives", Stood)
    native, ring = run_ranks(body, 2)[0].costs
    assert native.points is not None and ring.points is not None
    for size, seconds in native.points:
        assert seconds == pytest.approx(takes["native"].seconds(size))
    *measured, (largest, charged) = ring.points
    assert [size for size, _ in native.points] == list(SIZES)
    assert [size for size, _ in measured] == list(SIZES[: len(measured)])
    assert largest == SIZES[-1] and 0 < len(measured) < len(SIZES) - 1
    assert [seconds for _, seconds in measured] == pytest.approx([40.0] * len(measured))
    assert charged == pytest.approx(40.0 * largest / measured[-1][0])
