"""The mean over ranks as a reference, and the check of an engine against it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ranks import Rank, run_ranks
from slipstream.sync import GradientSync
from small_models import Gradients, assert_matches, gradients

Backward = Callable[[Any, int, int], None]


def mean_over_ranks(
    build: Callable[[], nn.Module], backward: Backward, world_size: int, step: int
) -> Gradients:
    """The mean of what `backward(model, rank, step)` gives to each rank's model, all on its own."""
    each = []
    for rank in range(world_size):
        model = build()
        backward(model, rank, step)
        each.append(gradients(model))
    return {n: torch.stack([dense(g[n]) for g in each]).mean(0) for n in each[0]}


def dense(gradient: torch.Tensor | None) -> torch.Tensor:
    """The gradient, which must be there, in dense form."""
    assert gradient is not None
    return gradient.to_dense() if gradient.is_sparse else gradient


def check_averages(
    build: Callable[[], nn.Module],
    backward: Backward,
    *,
    before: Callable[[nn.Module, int], object] = lambda model, rank: None,
    after: Callable[[nn.Module, int], object] = lambda model, rank: None,
    planner: str = "wfbp",
    world_size: int = 2,
    steps: int = 3,
    rtol: float = 1e-12,
) -> None:
    """Gradients of several steps are the reference's, alike on all ranks, in parameter layout.

    before, after: called with (model, rank) around the wrap.
    """

    def train(rank: Rank) -> list[Gradients]:
        model = build()
        before(model, rank.rank)
        sync = GradientSync(model, plan=planner, group=rank.group, check_finite=True)
        after(model, rank.rank)
        found = []
        for step in range(steps):
            model.zero_grad()
            backward(model, rank.rank, step)
            assert sync.nonfinite() is None
            for name, param in model.named_parameters():
                assert param.grad is not None, name
                assert param.grad.shape == param.shape and param.grad.dtype == param.dtype
                assert param.grad.stride() == param.stride(), name
            found.append(gradients(model))
        sync.close()
        return found

    outcomes = run_ranks(train, world_size)
    for step in range(steps):
        reference = mean_over_ranks(build, backward, world_size, step)
        for mine in outcomes:
            assert_matches(mine[step], reference, rtol)
            for name, value in mine[step].items():
                assert torch.equal(dense(value), dense(outcomes[0][step][name])), name
