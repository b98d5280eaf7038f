"""Sparse sums: nothing is lost, all ranks get the same bits, and everything is the dense sum."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, product

import pytest
import torch

from ranks import Rank, run_ranks
from slipstream.cluster import Cluster
from slipstream.comm.sparse import Gather, TopK
from slipstream.errors import PlanError
from slipstream.wires import Density
from ways import Shape, count_bytes_between_nodes, shapes_of

NAMES = ("hitopk", "naive_topk", "a2a_topk")
LENGTHS = (0, 1, 2, 3, 5, 7, 8, 13, 33, 1000, 1025)
GATHERS: tuple[Gather, ...] = ("dense", "sparse")
Case = tuple[str, Shape, int, Density, Gather]


def integers(rank: int, step: int, length: int) -> torch.Tensor:
    """Sums of a hundred of them over eight ranks are exact in float32."""
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * length + step)
    return torch.randint(-999, 1000, (length,), generator=generator).float()


def works_on(name: str, shape: Shape) -> bool:
    return name == "naive_topk" or len(set(shape)) == 1


def cases_of(ranks: int) -> Iterator[Case]:
    """Every shape with every collective, wires and gathers by turns; on many ranks lengths too."""
    wires = cycle(
        Density.model_validate({"density": density, "values": values})
        for density, values in product((0.01, 0.3, 1.0), ("float32", "bfloat16", "float16"))
    )
    gathers, lengths = cycle(GATHERS), cycle(LENGTHS)
    for shape, name in product(shapes_of(ranks), NAMES):
        if works_on(name, shape):
            for length in LENGTHS if ranks < 5 else [next(lengths)]:
                yield name, shape, length, next(wires), next(gathers)


def owed(collective: TopK) -> torch.Tensor:
    """What a rank has kept of each element."""
    kept = torch.zeros(collective.numel)
    for part in collective.kept():
        kept[part.start : part.start + part.values.numel()] += part.values
    return kept


@pytest.mark.parametrize("world_size", range(1, 9))
def test_nothing_is_lost_and_all_ranks_have_the_same_bits(world_size: int) -> None:
    steps = 3

    def body(rank: Rank) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
        found = []
        for name, shape, length, wire, gather in cases_of(world_size):
            collective = TopK(name, rank.group, Cluster(shape), length, wire, gather=gather)
            outs = []
            for step in range(steps):
                flat = torch.cat([integers(rank.rank, step, length), torch.full((3,), 1.0)])
                collective.sum_(flat)
                outs.append(flat)
            found.append((outs, owed(collective)))
        return found

    everyone = run_ranks(body, world_size, timeout_seconds=60.0)
    for number, case in enumerate(cases_of(world_size)):
        length, what = case[2], str(case)
        outs = everyone[0][number][0]
        for outcome in everyone[1:]:
            assert all(map(torch.equal, outcome[number][0], outs)), what
        assert all(out[length:].tolist() == [world_size] * 3 for out in outs), what
        given = sum((out[:length] for out in outs), torch.zeros(length))
        kept = sum((outcome[number][1] for outcome in everyone), torch.zeros(length))
        total = sum(
            (integers(r, step, length) for r, step in product(range(world_size), range(steps))),
            torch.zeros(length),
        )
        assert torch.equal(given + kept, total), what


@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("shape", [(3, 3), (2, 2, 2), (1, 1, 1)], ids=str)
def test_at_density_1_it_is_the_dense_sum_bit_for_bit(shape: Shape, gather: Gather) -> None:
    """Case 29: in the order in which the dense collective adds: ranks of a node, then nodes."""
    cluster, length = Cluster(shape), 1025

    def values(rank: int) -> torch.Tensor:
        return torch.randn(length, generator=torch.Generator().manual_seed(rank))

    def body(rank: Rank) -> dict[str, torch.Tensor]:
        found = {}
        for name in NAMES:
            wire = Density(density=1.0, values="float32")
            found[name] = values(rank.rank)
            collective = TopK(name, rank.group, cluster, length, wire, gather=gather)
            collective.sum_(found[name])
            assert not owed(collective).any()
        return found

    def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    ranks = [values(rank) for rank in range(cluster.world_size)]
    nodes = [
        in_order([ranks[r] for r in cluster.ranks_of_node(node)]) for node in range(cluster.nodes)
    ]
    by_node, by_rank = in_order(nodes), in_order(ranks)
    for found in run_ranks(body, cluster.world_size):
        assert torch.equal(found["hitopk"], by_node)
        assert torch.equal(found["a2a_topk"], by_node)
        assert torch.equal(found["naive_topk"], by_rank)


@pytest.mark.parametrize("name", NAMES)
def test_positions_that_only_one_rank_selects_are_not_added_to_others(name: str) -> None:
    """Case 29: ranks with disjoint largest elements; each arrives divided by the ranks."""

    def body(rank: Rank) -> torch.Tensor:
        flat = torch.zeros(100)
        flat[10 + 40 * rank.rank] = 8.0 * (rank.rank + 1)
        density = Density(density=0.02, values="float32")
        TopK(name, rank.group, Cluster((1, 1)), 100, density).sum_(flat, 2)
        return flat

    expected = torch.zeros(100)
    expected[10], expected[50] = 4.0, 8.0
    for flat in run_ranks(body, 2):
        assert torch.equal(flat, expected)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_is_sent_later(name: str) -> None:
    """After one gradient and many of zero everything has arrived."""

    def body(rank: Rank) -> torch.Tensor:
        density = Density(density=0.1, values="bfloat16")
        collective = TopK(name, rank.group, Cluster((2, 2)), 300, density)
        total = torch.zeros(300)
        for step in range(100):
            flat = integers(rank.rank, 0, 300) if step == 0 else torch.zeros(300)
            collective.sum_(flat)
            total += flat
        assert not owed(collective).any()
        return total

    expected = torch.stack([integers(rank, 0, 300) for rank in range(4)]).sum(0)
    for total in run_ranks(body, 4):
        assert torch.equal(total, expected)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_reaches_all_ranks_and_can_be_undone(name: str) -> None:
    def body(rank: Rank) -> torch.Tensor:
        density = Density(density=0.05, values="float32")
        collective = TopK(name, rank.group, Cluster((2, 2)), 200, density, can_undo=True)
        collective.sum_(integers(rank.rank, 0, 200))
        before = [kept.values.clone() for kept in collective.kept()]
        flat = integers(rank.rank, 1, 200)
        if rank.rank == 2:
            flat[150] = torch.inf
        collective.sum_(flat)
        assert collective.saw_nonfinite
        assert all(kept.values.isfinite().all() for kept in collective.kept())
        collective.undo()
        after = [kept.values for kept in collective.kept()]
        assert all(map(torch.equal, before, after))
        return flat

    for flat in run_ranks(body, 4):
        assert flat[150] == torch.inf and int(flat.isfinite().sum()) == 199


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 2), (2, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("values", ["float32", "bfloat16"])
def test_bytes_between_nodes_are_those_of_the_formula(
    name: str, shape: Shape, values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, length, density = Cluster(shape), 2**20, 0.01
    sent = count_bytes_between_nodes(monkeypatch, cluster)

    def body(rank: Rank) -> None:
        wire = Density.model_validate({"density": density, "values": values})
        TopK(name, rank.group, cluster, length, wire).sum_(integers(rank.rank, 0, length))

    run_ranks(body, cluster.world_size)
    k_bytes = density * length * (4 + (4 if values == "float32" else 2))
    ranks, nodes = cluster.world_size, cluster.nodes
    expected = {
        "hitopk": (nodes - 1) * k_bytes,
        "naive_topk": (ranks - 1) * k_bytes,
        "a2a_topk": 2 * (nodes - 1) / nodes * k_bytes,
    }[name]
    for node in range(nodes):
        assert sent[node] == pytest.approx(expected, rel=0.03), node


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_gradients_are_summed_in_32_bits(dtype: torch.dtype) -> None:
    def body(rank: Rank) -> torch.Tensor:
        flat = torch.full((64,), 1.0 + rank.rank, dtype=dtype)
        wire = Density(density=1.0, values="float32")
        TopK("hitopk", rank.group, Cluster((2, 2)), 64, wire).sum_(flat, 4)
        return flat

    for flat in run_ranks(body, 4):
        assert flat.dtype == dtype and flat.tolist() == [2.5] * 64


def test_64_bit_gradients_are_refused() -> None:
    def body(rank: Rank) -> None:
        wire = Density(density=0.5, values="float32")
        with pytest.raises(PlanError, match="32-bit and 16-bit gradients"):
            TopK("hitopk", rank.group, Cluster((2,)), 8, wire).sum_(torch.ones(8).double())

    run_ranks(body, 2)


def test_rows_get_around_a_node_as_what_is_smaller() -> None:
    def body(rank: Rank) -> list[str]:
        return [
            TopK("hitopk", rank.group, Cluster((2, 2)), 10_000, wire).gather
            for wire in (
                Density(density=0.01, values="float32"),
                Density(density=0.5, values="float32"),
            )
        ]

    assert run_ranks(body, 4) == [["sparse", "dense"]] * 4
