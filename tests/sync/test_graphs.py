"""Graphs that people really build: branches, several passes, recomputation, compilation."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ranks import Rank, run_ranks, run_ranks_settled
from slipstream.errors import RanksDiffer, SlipstreamError
from slipstream.sync import GradientSync
from small_models import (
    Gradients,
    assert_matches,
    batch,
    gradients,
    loss_of,
    mlp,
    reseeded,
    weights,
)


class Branches(nn.Module):
    """Linear layers of which a call uses those that it names."""

    def __init__(self, num_layers: int, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_layers))
        reseeded(self.double(), seed)

    def forward(self, x: torch.Tensor, *used: int) -> torch.Tensor:
        for index in used:
            x = self.layers[index](x)
        return x


class Scalars(nn.Module):
    """Three 0-dim parameters; a call uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(3):
            self.register_parameter(f"s{index}", nn.Parameter(torch.tensor(1.0 + index).double()))

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return x * self.get_parameter(f"s{index}")


def test_several_forwards_before_one_backward() -> None:
    """Case 1: one backward through three calls of one module."""

    def train(rank: Rank) -> Gradients:
        model = Scalars()
        sync = GradientSync(model, plan="wfbp", group=rank.group)
        torch.stack([model(batch(rank.rank, i), i).mean() for i in range(3)]).sum().backward()
        sync.close()
        return gradients(model)

    reference = Scalars()
    parts = [reference(torch.cat([batch(r, i) for r in range(2)]), i).mean() for i in range(3)]
    torch.stack(parts).sum().backward()
    for mine in run_ranks(train, 2):
        assert_matches(mine, gradients(reference))


@pytest.mark.parametrize("wait", ["backward", "update"])
def test_generator_and_discriminator(wait: str) -> None:
    """Case 1, second part: D's step uses only its own loss's gradients."""

    def gan_step(
        g: nn.Module, d: nn.Module, x: torch.Tensor, optimizers: list[torch.optim.Optimizer]
    ) -> None:
        g_optimizer, d_optimizer = optimizers
        for _ in range(3):
            g_optimizer.zero_grad()
            d(g(x)).square().mean().backward()
            g_optimizer.step()
            d_optimizer.zero_grad()
            (d(x).mean() - d(g(x).detach()).mean()).backward()
            d_optimizer.step()

    def pair() -> tuple[nn.Module, nn.Module, list[torch.optim.Optimizer]]:
        def net(seed: int) -> nn.Module:
            layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
            return reseeded(layers, seed)

        g, d = net(1), net(2)
        return g, d, [torch.optim.SGD(m.parameters(), lr=0.1) for m in (g, d)]

    def train(rank: Rank) -> torch.Tensor:
        g, d, optimizers = pair()
        groups = rank.new_group(), rank.new_group()
        syncs = [GradientSync(m, group=own) for m, own in zip((g, d), groups, strict=True)]
        if wait == "update":
            for sync, optimizer in zip(syncs, optimizers, strict=True):
                sync.attach(optimizer)
        gan_step(g, d, batch(rank.rank), optimizers)
        for sync in syncs:
            sync.close()
        return torch.cat([weights(g), weights(d)])

    g, d, optimizers = pair()
    gan_step(g, d, torch.cat([batch(r) for r in range(2)]), optimizers)
    for mine in run_ranks(train, 2):
        torch.testing.assert_close(mine, torch.cat([weights(g), weights(d)]), rtol=1e-12, atol=0)


def test_a_parameter_that_nobody_used_is_left_alone() -> None:
    """Case 3: momentum and weight decay do not move it, and its gradient stays None."""

    def steps(model: Branches, ranks: list[int]) -> list[tuple[torch.Tensor, bool]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        seen = []
        for step in range(10):
            optimizer.zero_grad()
            x = torch.cat([batch(r, step) for r in ranks])
            loss_of_branch = model(x, *((0, 1) if step % 2 == 0 else (0,))).square().mean()
            loss_of_branch.backward()
            optimizer.step()
            b = model.get_parameter("layers.1.weight")
            seen.append((b.detach().clone(), b.grad is None))
        return seen

    def train(rank: Rank) -> list[tuple[torch.Tensor, bool]]:
        model = Branches(2)
        sync = GradientSync(model, group=rank.group)
        seen = steps(model, [rank.rank])
        sync.close()
        return seen

    reference = steps(Branches(2), [0, 1])
    for mine in run_ranks(train, 2):
        for step, ((value, is_none), (expected, _)) in enumerate(zip(mine, reference, strict=True)):
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
            assert is_none == (step % 2 == 1)
            if step % 2 == 1:
                assert torch.equal(value, mine[step - 1][0])


def test_an_unused_gradient_that_the_user_kept_stays_bit_for_bit() -> None:
    """Three ranks: x * 3 / 3 is not always x, so the old value must not travel and come back."""

    def train(rank: Rank) -> tuple[torch.Tensor, torch.Tensor]:
        model = Branches(2)
        sync = GradientSync(model, plan="single", group=rank.group)
        model(batch(rank.rank), 0, 1).square().mean().backward()
        kept = model.layers[1].weight.grad
        assert isinstance(kept, torch.Tensor)
        before = kept.clone()
        model(batch(rank.rank, 1), 0).square().mean().backward()
        after = model.layers[1].weight.grad
        assert isinstance(after, torch.Tensor)
        sync.close()
        return before, after

    for before, after in run_ranks(train, 3):
        assert torch.equal(before, after)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_each_rank_uses_another_layer(world_size: int) -> None:
    """Case 5: (sum over ranks, missing = 0) / number of ranks, everywhere."""

    def train(rank: Rank) -> list[Gradients]:
        model = Branches(3)
        sync = GradientSync(model, plan="wfbp", group=rank.group)
        seen = []
        for step in range(2):
            model(batch(rank.rank, step), rank.rank % 3).square().mean().backward()
            seen.append(gradients(model))
            model.zero_grad()
        used = 2 if rank.rank == 0 else 0
        model(batch(rank.rank, 2), used).square().mean().backward()
        seen.append(gradients(model))
        sync.close()
        return seen

    def reference(step: int, layer_of: Callable[[int], int]) -> Gradients:
        model = Branches(3)
        for rank in range(world_size):
            loss = model(batch(rank, step), layer_of(rank)).square().mean() / world_size
            loss.backward()
        return gradients(model)

    for mine in run_ranks(train, world_size):
        assert_matches(mine[0], reference(0, lambda r: r % 3))
        assert_matches(mine[1], reference(1, lambda r: r % 3))
        assert_matches(mine[2], reference(2, lambda r: 2 if r == 0 else 0))


def body_and_head(seed: int = 0) -> nn.Sequential:
    return reseeded(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double(), seed)


def fine_tune(model: nn.Sequential, frozen_first: bool, ranks: list[int]) -> torch.Tensor:
    """Three steps with the body frozen (or not), three with the contrary."""
    body, head = model[0], model[2]
    for phase in range(2):
        frozen = frozen_first == (phase == 0)
        body.requires_grad_(not frozen)
        params = list(head.parameters()) + ([] if frozen else list(body.parameters()))
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        for step in range(3):
            model.zero_grad()
            loss_of(model, torch.cat([batch(r, 3 * phase + step) for r in ranks])).backward()
            optimizer.step()
    return weights(model)


@pytest.mark.parametrize("frozen_first", [True, False])
@pytest.mark.parametrize("planner", ["wfbp", "ddp"])
def test_freezing_and_unfreezing_between_steps(frozen_first: bool, planner: str) -> None:
    """Case 6: the copies stay in sync and equal the reference."""

    def train(rank: Rank) -> tuple[torch.Tensor, set[str]]:
        model = body_and_head()
        model[0].requires_grad_(not frozen_first)
        sync = GradientSync(model, plan=planner, group=rank.group)
        final = fine_tune(model, frozen_first, [rank.rank])
        planned = {name for bucket in sync.plan.reduce for name in bucket.gradients}
        sync.close()
        return final, planned

    reference = fine_tune(body_and_head(), frozen_first, [0, 1])
    outcomes = run_ranks(train, 2)
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    for final, planned in outcomes:
        torch.testing.assert_close(final, reference, rtol=1e-12, atol=0)
        body = {"0.weight", "0.bias"}
        assert planned == {"2.weight", "2.bias"} | (body if frozen_first else set())


def test_everything_trained_changes_at_once() -> None:
    """The head is frozen in the moment in which the body is unfrozen."""

    def train(rank: Rank) -> Gradients:
        model = body_and_head()
        model[0].requires_grad_(False)
        sync = GradientSync(model, group=rank.group)
        loss_of(model, batch(rank.rank)).backward()
        model.zero_grad()
        model[0].requires_grad_(True)
        model[2].requires_grad_(False)
        loss_of(model, batch(rank.rank)).backward()
        sync.close()
        return gradients(model)

    reference = body_and_head()
    reference[2].requires_grad_(False)
    loss_of(reference, torch.cat([batch(r) for r in range(2)])).backward()
    for mine in run_ranks(train, 2):
        assert_matches(mine, gradients(reference))


@pytest.mark.parametrize("unfrozen_on", [0, 1])
def test_unfreezing_on_one_rank_only_is_an_error_that_names_the_parameter(unfrozen_on: int) -> None:
    def train(rank: Rank) -> None:
        model = body_and_head()
        model[0].requires_grad_(False)
        _sync = GradientSync(model, group=rank.group, timeout_seconds=2.0)
        loss_of(model, batch(rank.rank)).backward()
        if rank.rank == unfrozen_on:
            model[0].requires_grad_(True)
        model.zero_grad()
        loss_of(model, batch(rank.rank)).backward()

    outcomes = run_ranks_settled(train, 2, timeout_seconds=2.0)
    for outcome in outcomes:
        assert isinstance(outcome, SlipstreamError), outcome
        assert "'0.weight'" in str(outcome)
    assert isinstance(outcomes[unfrozen_on], RanksDiffer)


def test_a_model_without_trainable_parameters_is_wrapped_and_reduces_nothing() -> None:
    def train(rank: Rank) -> int:
        model = mlp().requires_grad_(False)
        sync = GradientSync(model, group=rank.group)
        num_buckets = len(sync.plan.reduce)
        sync.close()
        return num_buckets

    assert run_ranks(train, 2) == [0, 0]


def test_accumulation_over_branches() -> None:
    """Case 7: what only the first micro-batch used is averaged too."""

    def train(rank: Rank) -> list[Gradients]:
        model = Branches(2)
        sync = GradientSync(model, plan="wfbp", group=rank.group)
        seen = []
        for _ in range(3):
            model.zero_grad()
            with sync.no_sync():
                model(batch(rank.rank, 0), 0).square().mean().backward()
            model(batch(rank.rank, 1), 1).square().mean().backward()
            seen.append(gradients(model))
        sync.close()
        return seen

    reference = Branches(2)
    for step in range(2):
        reference(torch.cat([batch(r, step) for r in range(2)]), step).square().mean().backward()
    for mine in run_ranks(train, 2):
        for seen in mine:
            assert_matches(seen, gradients(reference))


@pytest.mark.parametrize("planner", ["single", "wfbp"])
def test_accumulation_with_layers_dropped_at_random_on_each_rank(planner: str) -> None:
    def picks(rank: int) -> list[list[int]]:
        rng = random.Random(rank)
        return [[i for i in range(4) if rng.random() < 0.4] or [rng.randrange(4)] for _ in range(8)]

    def accumulate(model: Branches, rank: int, micro: int) -> torch.Tensor:
        out: torch.Tensor = model(batch(rank, micro), *picks(rank)[micro]).square().mean()
        return out

    def train(rank: Rank) -> Gradients:
        model = Branches(4)
        sync = GradientSync(model, plan=planner, group=rank.group)
        for micro in range(7):
            with sync.no_sync():
                accumulate(model, rank.rank, micro).backward()
        accumulate(model, rank.rank, 7).backward()
        sync.close()
        return gradients(model)

    reference = Branches(4)
    for rank in range(2):
        for micro in range(8):
            (accumulate(reference, rank, micro) / 2).backward()
    for mine in run_ranks(train, 2):
        assert_matches(mine, gradients(reference), rtol=1e-11)


def test_gradient_penalty() -> None:
    """Case 9: a loss that holds first-order gradients of the inputs."""

    def total(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        penalty: torch.Tensor = out.square().mean() + grad.square().sum(1).mean()
        return penalty

    def net() -> nn.Module:
        return reseeded(nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1)).double(), 0)

    def train(rank: Rank) -> Gradients:
        model = net()
        sync = GradientSync(model, plan="wfbp", group=rank.group)
        total(model, batch(rank.rank)).backward()
        sync.close()
        return gradients(model)

    reference = net()
    total(reference, torch.cat([batch(r) for r in range(2)])).backward()
    for mine in run_ranks(train, 2):
        assert_matches(mine, gradients(reference))
