"""The contract of every collective with every wire: exact sums, one result on all ranks, limits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from ranks import Rank, run_ranks, run_ranks_settled
from slipstream.cluster import Cluster
from slipstream.comm import Collective, Collectives
from slipstream.comm.nodes import Torus
from slipstream.comm.teams import Team
from slipstream.errors import PlanError
from slipstream.wires import DENSE_WIRES, DenseWire

LENGTHS = [*range(34), 1023, 1025]
SHAPES = [
    *[(1,) * nodes for nodes in range(1, 9)],
    *[(ranks,) for ranks in range(2, 9)],
    *[(2, 2), (3, 3), (4, 4), (2, 2, 2), (2, 2, 2, 2), (1, 3), (3, 1, 2), (2, 5)],
]
OURS = [name for name in DENSE_WIRES if name != "native"]
WAYS = [(name, wire) for name, wires in DENSE_WIRES.items() for wire in wires]


def works_on(name: str, shape: tuple[int, ...]) -> bool:
    return name != "torus" or len(set(shape)) == 1


def small_integers(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Sums of up to eight of them are exact in every dtype and with every wire."""
    generator = torch.Generator().manual_seed(1000 * length + rank)
    return torch.randint(-16, 17, (length,), generator=generator).to(dtype)


def on_ranks(
    shape: tuple[int, ...],
    name: str,
    wire: DenseWire,
    body: Callable[[Rank, Collective], torch.Tensor],
) -> list[torch.Tensor]:
    cluster = Cluster(shape)
    return run_ranks(
        lambda rank: body(rank, Collectives(rank.group, cluster).get(name, wire)),
        cluster.world_size,
    )


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "+".join(map(str, shape)))
def test_sums_are_exact_on_every_shape_of_nodes_for_every_length(shape: tuple[int, ...]) -> None:
    ways = [(name, wire) for name, wire in WAYS if works_on(name, shape)]

    def body(rank: Rank) -> list[torch.Tensor]:
        collectives, found = Collectives(rank.group, Cluster(shape)), []
        for name, wire in ways:
            # what lies side by side is kept apart by a sum of its own for every length
            for length in LENGTHS if wire == "float32" else LENGTHS[::5]:
                flat = small_integers(rank.rank, length, torch.float32)
                collectives.get(name, wire).sum_(flat)
                found.append(flat)
        return found

    world_size = sum(shape)
    outcomes = run_ranks(body, world_size, timeout_seconds=60.0)
    cases = [
        (name, wire, length)
        for name, wire in ways
        for length in (LENGTHS if wire == "float32" else LENGTHS[::5])
    ]
    for case, (name, wire, length) in enumerate(cases):
        each = [small_integers(rank, length, torch.float32) for rank in range(world_size)]
        for found in outcomes:
            assert torch.equal(found[case], sum(each)), (name, wire, length)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 2), (3,)])
def test_every_dtype_in_memory_is_summed_exactly(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    for name, wire in WAYS:
        if not works_on(name, shape):
            continue

        def body(rank: Rank, collective: Collective) -> torch.Tensor:
            flat = small_integers(rank.rank, 65, dtype)
            collective.sum_(flat)
            return flat

        each = [small_integers(rank, 65, dtype) for rank in range(sum(shape))]
        for found in on_ranks(shape, name, wire, body):
            assert torch.equal(found, sum(each)), (name, wire)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "wire"), WAYS)
@pytest.mark.parametrize("shape", [(2, 2), (3, 3), (5,)])
def test_means_of_any_values_have_the_same_bits_on_all_ranks(
    name: str, wire: DenseWire, shape: tuple[int, ...]
) -> None:
    world_size, length = sum(shape), 1000

    def values(rank: int) -> torch.Tensor:
        return torch.randn(length, generator=torch.Generator().manual_seed(rank))

    def body(rank: Rank, collective: Collective) -> torch.Tensor:
        flat = values(rank.rank)
        collective.sum_(flat, world_size)
        return flat

    found = on_ranks(shape, name, wire, body)
    mean = torch.stack([values(rank) for rank in range(world_size)]).double().mean(0)
    error = {"float32": 1e-6, "bfloat16": 2**-6, "float16": 2**-9}[wire]
    for mine in found:
        assert torch.equal(mine, found[0])
        torch.testing.assert_close(mine.double(), mean, rtol=0.0, atol=error)


@pytest.mark.parametrize("name", [n for n, wires in DENSE_WIRES.items() if "float16" in wires])
@pytest.mark.parametrize("shape", [(2, 2), (4,), (1, 1, 1)])
def test_a_float16_wire_neither_overflows_nor_loses_what_the_mean_can_hold(
    name: str, shape: tuple[int, ...]
) -> None:
    """Sums of these pass float16's range, and dividing before sending would lose the small ones."""
    values = torch.tensor([60000.0, -60000.0, 2.0**-24, -(2.0**-23), 65504.0])

    def body(rank: Rank, collective: Collective) -> torch.Tensor:
        flat = values.clone()
        collective.sum_(flat, sum(shape))
        return flat

    for mine in on_ranks(shape, name, "float16", body):
        torch.testing.assert_close(mine, values, rtol=2**-10, atol=0.0)


def test_direct_gives_an_element_its_bits_whatever_travels_beside_it() -> None:
    def values(rank: int) -> torch.Tensor:
        return torch.randn(101, generator=torch.Generator().manual_seed(rank))

    def body(rank: Rank, collective: Collective) -> torch.Tensor:
        assert collective.layout_invariant
        whole, parts = values(rank.rank), values(rank.rank)
        collective.sum_(whole)
        for start, end in ((0, 1), (1, 40), (40, 101)):
            collective.sum_(parts[start:end])
        assert torch.equal(whole, parts)
        return whole

    for wire in DENSE_WIRES["direct"]:
        on_ranks((5,), "direct", wire, body)


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


def expected_bytes(
    name: str, wire: DenseWire, cluster: Cluster, num_bytes: int
) -> dict[int, float]:
    """What each node's card sends, by the algorithms' own counts."""
    ranks, nodes, most = cluster.world_size, cluster.nodes, cluster.ranks_per_node[0]
    share = 1.0 if wire == "float32" else 0.5
    a_node = {
        "ring": 2 * (ranks - 1) / ranks,
        "direct": 2 * most * (ranks - most) / ranks,
        "recursive_doubling": most * math.log2(nodes),
        "halving_doubling": 2 * most * (1 - most / ranks),
        "hierarchical": 2 * (nodes - 1) / nodes,
        "torus": 2 * (nodes - 1) / nodes,
    }[name]
    return dict.fromkeys(range(nodes), a_node * share * num_bytes)


@pytest.mark.parametrize(("name", "wire"), [way for way in WAYS if way[0] != "native"])
def test_bytes_between_nodes_are_those_of_the_formula(
    name: str, wire: DenseWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, length = Cluster((2, 2, 2, 2)), 2**14
    sent: list[tuple[int, int]] = []
    send = Team.send

    def counted(team: Team, tensor: torch.Tensor, member: int, tag: int) -> object:
        nodes = [cluster.node_of(team.ranks[place]) for place in (team.index, member)]
        if nodes[0] != nodes[1]:
            sent.append((nodes[0], tensor.nbytes))
        return send(team, tensor, member, tag)

    monkeypatch.setattr(Team, "send", counted)

    def body(rank: Rank, collective: Collective) -> torch.Tensor:
        flat = torch.ones(length)
        collective.sum_(flat)
        return flat

    on_ranks(cluster.ranks_per_node, name, wire, body)
    for node, expected in expected_bytes(name, wire, cluster, 4 * length).items():
        total = sum(size for source, size in sent if source == node)
        assert total == pytest.approx(expected, rel=0.03), node


@pytest.mark.parametrize("name", OURS)
def test_a_rank_that_does_not_come_is_an_error_on_the_others_within_the_limit(name: str) -> None:
    def body(rank: Rank) -> torch.Tensor:
        collective = Collectives(rank.group, Cluster((2, 2))).get(name)
        flat = torch.ones(1000)
        collective.sum_(flat)
        if rank.rank == 3:
            raise ValueError("rank 3 ends early")
        for _ in range(3):
            collective.sum_(flat)
        return flat

    outcomes = run_ranks_settled(body, 4, timeout_seconds=2.0)
    assert isinstance(outcomes[3], ValueError)
    assert all(isinstance(outcome, RuntimeError) for outcome in outcomes[:3]), outcomes


def test_what_there_is_not_is_refused_with_what_there_is() -> None:
    collectives = Collectives(None, Cluster((2, 1)))
    with pytest.raises(PlanError, match="as many ranks on every node"):
        collectives.get("torus")
    with pytest.raises(PlanError, match="sends float32 or bfloat16, not 'float16'"):
        collectives.get("ring", "float16")
    with pytest.raises(PlanError, match="no collective 'hitopk'"):
        collectives.get("hitopk")
