"""The contract of every collective with every wire: exact sums on every shape, and what travels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import cycle, product

import pytest
import torch

from ranks import Rank, run_ranks
from slipstream.cluster import Cluster
from slipstream.comm import Collectives
from slipstream.comm.nodes import Torus
from slipstream.errors import PlanError
from slipstream.wires import WIRE_BYTES
from ways import MESSAGES, WAYS, Shape, Way, Ways, count_bytes_between_nodes, shapes_of, summed

LENGTHS = [*range(34), 1023, 1025]
SHAPES: dict[int, Shape] = dict(
    enumerate([(1,), (1, 1), (2, 1), (2, 2), (3, 2), (2, 2, 2), (3, 1, 3), (2, 2, 2, 2)], start=1)
)
"""On which every length is summed; on the others that there are a few."""
KNOW_NODES = ("hierarchical", "torus")
DTYPES = [torch.float64, torch.bfloat16, torch.float16]
Case = tuple[Way, Shape, int, torch.dtype]


def small_integers(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Sums of up to eight of them are exact in every dtype and with every wire."""
    generator = torch.Generator().manual_seed(1000 * length + rank)
    return torch.randint(-16, 17, (length,), generator=generator).to(dtype)


def cases_of(ranks: int) -> Iterator[Case]:
    """Every way with every length; on many ranks every fifth with rounded wires, and of pieces."""
    dtypes = cycle(DTYPES)
    for way in WAYS:
        shape: tuple[int, ...] = (ranks,)
        if way.name in KNOW_NODES:
            shape = SHAPES[ranks] if way.works_on(SHAPES[ranks]) else (1,) * ranks
        everything = ranks <= 4 or (way.wire == "float32" and not way.pieces)
        for length in LENGTHS if everything else LENGTHS[ranks % 5 :: 5]:
            yield way, shape, length, torch.float32
        yield way, shape, 65, next(dtypes)
    yield from cases_of_other_shapes(ranks)


def cases_of_other_shapes(ranks: int) -> Iterator[Case]:
    """Every shape, with lengths and wires by turns; groups of pieces take time to make."""
    lengths = cycle(LENGTHS)
    those = [way for way in WAYS if way.name in KNOW_NODES]
    for name, pieces in product(KNOW_NODES, (False, True) if ranks <= 5 else (False,)):
        ways = cycle([way for way in those if (way.name, way.pieces) == (name, pieces)])
        for shape in shapes_of(ranks):
            way = next(ways)
            if way.works_on(shape):
                yield way, shape, next(lengths), torch.float32


@pytest.mark.parametrize("world_size", range(1, 9))
def test_sums_are_exact_and_nothing_beside_them_is_touched(world_size: int) -> None:
    def body(rank: Rank) -> list[torch.Tensor]:
        ways, found = Ways(rank), []
        for way, shape, length, dtype in cases_of(world_size):
            memory = torch.full((length + 2,), 7.0, dtype=dtype)
            memory[1:-1] = small_integers(rank.rank, length, dtype)
            ways.get(way, shape).sum_(memory[1:-1])
            found.append(memory)
        return found

    outcomes = run_ranks(body, world_size, timeout_seconds=60.0)
    for case, (way, shape, length, dtype) in enumerate(cases_of(world_size)):
        each = [small_integers(rank, length, dtype) for rank in range(world_size)]
        beside = torch.full((1,), 7.0, dtype=dtype)
        expected = torch.cat([beside, torch.stack(each).double().sum(0).to(dtype), beside])
        for found in outcomes:
            assert torch.equal(found[case], expected), (str(way), shape, length, dtype)


def test_every_shape_and_every_length_is_among_the_cases() -> None:
    everything = {way: set[int]() for way in WAYS}
    for world_size in range(1, 9):
        cases = list(cases_of(world_size))
        assert {shape for _, shape, _, _ in cases} == set(shapes_of(world_size))
        for way in WAYS:
            lengths = {length for mine, _, length, _ in cases if mine == way}
            assert way.pieces or way.wire != "float32" or lengths >= set(LENGTHS), str(way)
            everything[way] |= lengths
    assert all(lengths >= set(LENGTHS) for lengths in everything.values())


@pytest.mark.parametrize("shape", [(3, 2), (2, 2, 1)], ids=str)
def test_nodes_may_hold_unequal_numbers_of_ranks(shape: Shape) -> None:
    """Case S7, and what may not is refused on every rank before anything travels."""

    def values(rank: int) -> torch.Tensor:
        return small_integers(rank, 100, torch.float32).div(8).trunc()

    def body(rank: Rank) -> list[torch.Tensor]:
        with pytest.raises(PlanError, match=r"as many ranks on every node.*hierarchical, ring or"):
            Collectives(rank.group, Cluster(shape)).get("torus")
        ways, found = Ways(rank), []
        for way in those_that_work:
            flat = 5 * values(rank.rank)
            ways.get(way, shape).sum_(flat, 5)
            found.append(flat)
        return found

    those_that_work = [way for way in WAYS if way.works_on(shape)]
    mean = torch.stack([values(rank) for rank in range(5)]).sum(0)
    for found in run_ranks(body, 5):
        for way, mine in zip(those_that_work, found, strict=True):
            assert torch.equal(mine, mean), str(way)


def test_a_torus_in_chunks_gives_what_it_gives_at_once() -> None:
    def body(rank: Rank) -> tuple[torch.Tensor, torch.Tensor]:
        found = []
        for chunk_bytes in (64, 2**20):
            flat = small_integers(rank.rank, 1023, torch.float32)
            Torus(rank.group, Cluster((2, 2)), chunk_bytes=chunk_bytes).sum_(flat)
            found.append(flat)
        return found[0], found[1]

    for chunked, whole in run_ranks(body, 4):
        assert torch.equal(chunked, whole)


def expected_bytes(way: Way, cluster: Cluster, num_bytes: int) -> float:
    """What each node's card sends, by the algorithms' own counts."""
    ranks, nodes, most = cluster.world_size, cluster.nodes, cluster.ranks_per_node[0]
    a_node = {
        "ring": 2 * (ranks - 1) / ranks,
        "direct": 2 * most * (ranks - most) / ranks,
        "recursive_doubling": most * math.log2(nodes),
        "halving_doubling": 2 * most * (1 - most / ranks),
        "hierarchical": 2 * (nodes - 1) / nodes,
        "torus": 2 * (nodes - 1) / nodes,
    }[way.name]
    return a_node * num_bytes * WIRE_BYTES[way.wire] / 4


@pytest.mark.parametrize("way", [way for way in MESSAGES if way.name != "native"], ids=str)
@pytest.mark.parametrize("shape", [(2, 2), (2, 2, 2, 2)], ids=str)
def test_bytes_between_nodes_are_those_of_the_formula(
    shape: Shape, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, length = Cluster(shape), 2**14
    sent = count_bytes_between_nodes(monkeypatch, cluster)

    run_ranks(summed(way, shape, lambda rank: torch.ones(length)), cluster.world_size)
    for node in range(cluster.nodes):
        assert sent[node] == pytest.approx(expected_bytes(way, cluster, 4 * length), rel=0.03), node


def test_what_there_is_not_is_refused_with_what_there_is() -> None:
    collectives = Collectives(None, Cluster((2, 1)))
    with pytest.raises(PlanError, match="as many ranks on every node"):
        collectives.get("torus")
    with pytest.raises(PlanError, match="sends float32 or bfloat16, not 'float16'"):
        collectives.get("ring", "float16")
    with pytest.raises(PlanError, match="'hitopk' sends a share of the elements"):
        collectives.get("hitopk")
    with pytest.raises(PlanError, match=r"no collective 'tree'; .* sparse ones: hitopk"):
        collectives.get("tree")
