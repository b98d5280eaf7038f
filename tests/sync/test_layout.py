"""Memory layouts of parameters and gradients may differ; the averages are right (case 12)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from averages import check_averages, mean_over_ranks
from ranks import Rank, run_ranks
from slipstream.sync import GradientSync
from small_models import Gradients, assert_matches, batch, gradients, loss_of, reseeded

PLANNERS = ["wfbp", "single", "fixed", "ddp"]


def convolutions() -> nn.Module:
    """64 -> 64 channels, once 1x1 and once 3x3; strides of 1x1 weights are ambiguous."""
    layers = nn.Sequential(nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 3, padding=1))
    return reseeded(layers.double(), 0)


def on_images(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    images = torch.randn(2, 64, 3, 3, dtype=torch.float64, generator=generator)
    if step % 2:
        images = images.to(memory_format=torch.channels_last)
    model(images).square().mean().backward()


def channels_last(model: nn.Module, _rank: int) -> None:
    model.to(memory_format=torch.channels_last)


def channels_last_on_rank(which: int) -> Callable[[nn.Module, int], None]:
    def convert(model: nn.Module, rank: int) -> None:
        if rank == which:
            channels_last(model, rank)

    return convert


@pytest.mark.parametrize("convert", [channels_last, *map(channels_last_on_rank, (0, 1))])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_channels_last_before_or_after_the_wrap_and_on_one_rank(
    moment: str, convert: Callable[[nn.Module, int], None]
) -> None:
    check_averages(convolutions, on_images, **{moment: convert})  # type: ignore[arg-type]


@pytest.mark.parametrize("planner", ["ddp", "wfbp"])
def test_a_conversion_between_steps_reaches_gradients_that_are_still_there(planner: str) -> None:
    """Module.to() also converts p.grad, in place of the tensor object that p.grad is."""

    def train(rank: Rank) -> list[Gradients]:
        model = convolutions()
        sync = GradientSync(model, plan=planner, group=rank.group)
        found = []
        for step in range(5):
            model.zero_grad(set_to_none=step != 4)
            on_images(model, rank.rank, step)
            found.append(gradients(model))
            if step == 1:
                channels_last(model, rank.rank)
            if step == 3:
                model.to(memory_format=torch.contiguous_format)
        sync.close()
        return found

    outcomes = run_ranks(train, 2)
    for step in range(5):
        reference = mean_over_ranks(convolutions, on_images, 2, step)
        for mine in outcomes:
            assert_matches(mine[step], reference)


def test_accumulated_gradients_of_another_layout_are_averaged_too() -> None:
    def train(rank: Rank) -> Gradients:
        model = convolutions()
        channels_last_on_rank(1)(model, rank.rank)
        sync = GradientSync(model, group=rank.group)
        for _ in range(2):
            model.zero_grad()
            with sync.no_sync():
                on_images(model, rank.rank, 0)
            on_images(model, rank.rank, 1)
        sync.close()
        return gradients(model)

    def twice(model: nn.Module, rank: int, _step: int) -> None:
        on_images(model, rank, 0)
        on_images(model, rank, 1)

    reference = mean_over_ranks(convolutions, twice, 2, 0)
    for mine in run_ranks(train, 2):
        assert_matches(mine, reference)


def test_an_optimizer_keeps_ranks_of_different_layouts_in_sync() -> None:
    def train(rank: Rank) -> list[torch.Tensor]:
        model = convolutions()
        channels_last_on_rank(1)(model, rank.rank)
        sync = GradientSync(model, group=rank.group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sync.attach(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            on_images(model, rank.rank, step)
            sync.clip_grad_norm_(0.1)
            optimizer.step()
        sync.close()
        return [param.detach() for param in model.parameters()]

    zero, one = run_ranks(train, 2)
    for here, there in zip(zero, one, strict=True):
        assert torch.equal(here, there)


class Strided(nn.Module):
    """Gradients that arrive transposed and expanded, and parameters with strides of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
        self.spread = nn.Parameter(torch.zeros(5, 3, dtype=torch.float64))
        self.turned = nn.Parameter(torch.zeros(3, 4, dtype=torch.float64).t())
        reseeded(self, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = functional.linear(x, self.plain.t()) + functional.linear(x, self.turned.t())
        return out.square().mean() + self.spread.sum() * x.mean()


def on_batch(model: nn.Module, rank: int, step: int) -> None:
    loss_of(model, batch(rank, step)).backward()


@pytest.mark.parametrize("planner", PLANNERS)
def test_transposed_and_expanded_gradients(planner: str) -> None:
    def direct(model: nn.Module, rank: int, step: int) -> None:
        model(batch(rank, step)).backward()

    check_averages(Strided, direct, planner=planner)


def test_a_parameter_with_gaps_in_memory() -> None:
    class Gappy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64)[:, ::2])
            reseeded(self, 0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    def train(rank: Rank) -> Gradients:
        model = Gappy()
        sync = GradientSync(model, group=rank.group)
        for step in range(2):
            model.zero_grad()
            on_batch(model, rank.rank, step)
        sync.close()
        return gradients(model)

    reference = mean_over_ranks(Gappy, on_batch, 2, 1)
    for mine in run_ranks(train, 2):
        assert_matches(mine, reference)
