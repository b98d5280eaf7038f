"""Sparse buckets in the engine: what is not sent is kept, moved with the plan, and never lost."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from fed_model import (
    CLUSTER,
    NAMES,
    ROUNDED,
    SHAPES,
    TENTH,
    Cut,
    Fed,
    gradients,
    integers,
    mean,
    owed_by,
    plan_of,
    trained_over,
)
from ranks import Rank, run_ranks
from slipstream.cluster import Cluster
from slipstream.errors import CheckpointError, PlanError
from slipstream.sync import GradientSync
from slipstream.wires import Density, Wire

CUTS: tuple[Cut, ...] = (
    [("dc", "hitopk", TENTH), ("ba", "hitopk", TENTH)],
    [("d", "native", "float32"), ("cba", "naive_topk", ROUNDED)],
    [("dcb", "a2a_topk", TENTH), ("a", "torus", "float32")],
    [("dcba", "hitopk", ROUNDED)],
)


@pytest.mark.parametrize("first", range(len(CUTS)))
def test_nothing_is_lost_in_50_steps_with_other_plans_in_between(first: int) -> None:
    steps, each = 52, 13

    def train(rank: Rank) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        model = Fed()
        cuts = [*CUTS[first:], *CUTS[:first]]
        sync = GradientSync(model, plan=plan_of(cuts[0]), group=rank.group, cluster=CLUSTER)
        return trained_over(model, sync, rank.rank, cuts, each)

    outcomes = run_ranks(train, 4, timeout_seconds=30.0)
    owed = owed_by([state for _, state in outcomes])
    for found, _ in outcomes[1:]:
        for step, mine in enumerate(found):
            assert all(torch.equal(mine[n], outcomes[0][0][step][n]) for n in SHAPES), step
    for name in SHAPES:
        given = torch.stack([step[name] for step in outcomes[0][0]]).sum(0)
        total = torch.stack([mean(step)[name] for step in range(steps)]).sum(0)
        assert torch.equal(given + owed[name], total), name
    assert any(owed[name].any() for name in SHAPES)


@pytest.mark.parametrize(("name", "dense"), [("hitopk", "torus"), ("naive_topk", "direct")])
def test_density_1_equals_the_dense_plan_bit_for_bit(name: str, dense: str) -> None:
    """Case 29. On three ranks a node, where dividing rounds."""
    cluster = Cluster((3, 3))

    def random(rank: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}

    def train(rank: Rank) -> list[dict[str, torch.Tensor]]:
        found = []
        wires: tuple[Wire, Wire] = (Density(density=1.0, values="float32"), "float32")
        for way, wire in zip((name, dense), wires, strict=True):
            model, plan = Fed(), plan_of([("dc", way, wire), ("ba", way, wire)], cluster)
            sync = GradientSync(model, plan=plan, group=rank.group, cluster=cluster)
            model.feed(random(rank.rank))
            found.append(gradients(model))
            sync.close()
        return found

    for sparse, full in run_ranks(train, 6):
        assert all(torch.equal(sparse[name], full[name]) for name in SHAPES)


def test_the_first_dense_step_pays_everything_back() -> None:
    def train(rank: Rank) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], bool]:
        model = Fed()
        plan = plan_of([("dcba", "hitopk", TENTH)])
        sync = GradientSync(model, plan=plan, group=rank.group, cluster=CLUSTER)
        model.feed(integers(rank.rank, 0))
        first = gradients(model)
        sync.use_plan(plan_of([("dcba", "native", "float32")]))
        model.zero_grad()
        model.feed(integers(rank.rank, 1))
        second = gradients(model)
        nothing = sync.residual_state()
        sync.close()
        return first, second, not nothing

    for first, second, is_clear in run_ranks(train, 4):
        assert is_clear
        for name in SHAPES:
            assert torch.equal(first[name] + second[name], mean(0)[name] + mean(1)[name]), name


def test_a_parameter_that_no_rank_used_keeps_gradient_and_residual() -> None:
    def train(rank: Rank) -> None:
        model = Fed()
        plan = plan_of([("dcba", "hitopk", TENTH)])
        sync = GradientSync(model, plan=plan, group=rank.group, cluster=CLUSTER)
        model.feed(integers(rank.rank, 0))
        before = owed_by([sync.residual_state()])
        model.zero_grad()
        used, unused = model.get_parameter("a"), model.get_parameter("c")
        used.grad = torch.full_like(used, 5.0)
        model.feed(integers(rank.rank, 1, "bd"))
        assert unused.grad is None and torch.equal(used.grad, torch.full_like(used, 5.0))
        after = owed_by([sync.residual_state()])
        assert torch.equal(after["a"], before["a"]) and torch.equal(after["c"], before["c"])
        assert any(not torch.equal(after[name], before[name]) for name in "bd")
        sync.close()

    run_ranks(train, 4)


@pytest.mark.parametrize("where", ["a", "b"])
def test_a_step_that_is_not_finite_leaves_residuals_as_they_were(where: str) -> None:
    """Whether it shows in a sparse bucket or in a dense one beside it."""

    def train(rank: Rank) -> dict[str, torch.Tensor]:
        model = Fed()
        plan = plan_of([("dca", "hitopk", TENTH), ("b", "native", "float32")])
        sync = GradientSync(model, plan=plan, group=rank.group, cluster=CLUSTER)
        model.feed(integers(rank.rank, 0))
        before = sync.residual_state()
        values = integers(rank.rank, 1)
        if rank.rank == 1:
            values[where].view(-1)[3] = torch.inf
        model.zero_grad()
        model.feed(values)
        found, after = gradients(model), sync.residual_state()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        sync.close()
        return found

    for found in run_ranks(train, 4):
        assert found[where].view(-1)[3] == torch.inf


@pytest.mark.parametrize("name", NAMES)
def test_a_restored_residual_is_the_saved_one_bit_for_bit(name: str) -> None:
    """Case 31: ten steps; and five steps, a new engine, five steps."""
    plan = plan_of([("dc", name, TENTH), ("ba", name, ROUNDED)])

    def steps(rank: Rank, sync: GradientSync, model: Fed, which: range) -> dict[str, torch.Tensor]:
        for step in which:
            model.zero_grad()
            generator = torch.Generator().manual_seed(100 * step + rank.rank)
            model.feed({n: torch.randn(s, generator=generator) for n, s in SHAPES.items()})
        return {**gradients(model), **sync.residual_state()}

    def train(rank: Rank) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        model = Fed()
        sync = GradientSync(model, plan=plan, group=rank.group, cluster=CLUSTER)
        steps(rank, sync, model, range(5))
        saved[rank.rank] = sync.residual_state()
        whole = steps(rank, sync, model, range(5, 10))
        sync.close()
        model = Fed()
        sync = GradientSync(model, plan=plan, group=rank.group, cluster=CLUSTER)
        sync.load_residual_state([saved[r] for r in range(4)])
        resumed = steps(rank, sync, model, range(5, 10))
        sync.close()
        return whole, resumed

    saved: dict[int, dict[str, torch.Tensor]] = {}
    for whole, resumed in run_ranks(train, 4):
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(whole[key], resumed[key]) for key in whole)


@pytest.mark.parametrize(("name", "ranks"), [*product(("hitopk", "naive_topk"), (2, 6))])
def test_on_another_number_of_ranks_the_sum_is_kept(name: str, ranks: int) -> None:
    def save(rank: Rank) -> dict[str, torch.Tensor]:
        model = Fed()
        plan = plan_of([("dcba", name, TENTH)])
        sync = GradientSync(model, plan=plan, group=rank.group, cluster=CLUSTER)
        model.feed(integers(rank.rank, 0))
        state = sync.residual_state()
        sync.close()
        return state

    def restore(rank: Rank) -> dict[str, torch.Tensor]:
        plan = plan_of([("dc", "hitopk", TENTH), ("ba", "native", "float32")], cluster)
        sync = GradientSync(Fed(), plan=plan, group=rank.group, cluster=cluster)
        sync.load_residual_state(saved)
        state = sync.residual_state()
        sync.close()
        return state

    cluster = Cluster((ranks // 2, ranks // 2))
    saved = run_ranks(save, 4)
    before, after = owed_by(saved), owed_by(run_ranks(restore, ranks))
    assert all(torch.equal(before[name], after[name]) for name in SHAPES)
    assert any(before[name].any() for name in SHAPES)


@pytest.mark.parametrize(
    ("key", "values", "said"),
    [
        ("e@0", torch.zeros(3), "belongs to no parameter"),
        ("a@-1", torch.zeros(3), "belongs to no parameter"),
        ("a@x", torch.zeros(3), "belongs to no parameter"),
        ("b@5", torch.zeros(3), "damaged or of another model"),
        ("b@0", torch.zeros(3, dtype=torch.float64), "damaged or of another model"),
        ("b@0", torch.full((3,), torch.nan), "damaged or of another model"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(key: str, values: torch.Tensor, said: str) -> None:
    def body(rank: Rank) -> None:
        plan = plan_of([("dcba", "hitopk", TENTH)], Cluster((2,)))
        sync = GradientSync(Fed(), plan=plan, group=rank.group, cluster=Cluster((2,)))
        with pytest.raises(CheckpointError, match=said):
            sync.load_residual_state([{key: values}, {}])
        sync.close()

    run_ranks(body, 2)


@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [
        ((3,), torch.float64, "holds float64 gradients"),
        ((2, 1), torch.float32, r"as many ranks on every node.*naive_topk"),
    ],
)
def test_what_cannot_be_sparse_is_refused(
    shape: tuple[int, ...], dtype: torch.dtype, said: str
) -> None:
    def body(rank: Rank) -> None:
        plan = plan_of([("dcba", "hitopk", TENTH)], Cluster(shape))
        with pytest.raises(PlanError, match=said):
            GradientSync(Fed(dtype), plan=plan, group=rank.group, cluster=Cluster(shape))

    run_ranks(body, 3)


def test_a_single_rank_keeps_everything() -> None:
    model, alone = Fed(), Cluster((1,))
    sync = GradientSync(model, plan=plan_of([("dcba", "hitopk", TENTH)], alone), cluster=alone)
    model.feed(integers(0, 0))
    assert all(torch.equal(gradients(model)[n], integers(0, 0)[n]) for n in SHAPES)
    assert sync.residual_state() == {}
    sync.close()


def test_residuals_do_not_depend_on_the_loss_scale() -> None:
    """Gradients with a scale that changes, an infinity that is left out included, give the same."""

    def train(rank: Rank) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
        plan = plan_of([("dc", "hitopk", TENTH), ("ba", "a2a_topk", TENTH)])
        plain = Fed()
        sync = GradientSync(plain, plan=plan, group=rank.group, cluster=CLUSTER)
        expected = []
        for step in range(6):
            plain.zero_grad()
            plain.feed(integers(rank.rank, step))
            expected.append(gradients(plain))
        expected.append(sync.residual_state())
        sync.close()
        model, found = Fed(), []
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sync = GradientSync(model, plan=plan, group=rank.group, cluster=CLUSTER)
        sync.follow(scaler)
        for turn in (0, 1, None, 2, 3, 4, 5):
            optimizer.zero_grad()
            scale = scaler.scale(torch.ones(()))
            values = integers(rank.rank, turn or 0)
            if turn is None and rank.rank == 0:
                values["a"][3] = torch.inf
            model.feed({name: value * scale for name, value in values.items()})
            scaler.unscale_(optimizer)
            if turn is not None:
                found.append(gradients(model))
            scaler.step(optimizer)
            scaler.update()
        found.append(sync.residual_state())
        sync.close()
        return expected, found

    for expected, found in run_ranks(train, 4):
        for mine, reference in zip(found, expected, strict=True):
            assert mine.keys() == reference.keys()
            assert all(torch.equal(mine[key], reference[key]) for key in mine)
