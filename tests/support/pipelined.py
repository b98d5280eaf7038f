"""Plans that gather, and trainings under them to compare with others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ranks import Rank
from slipstream.plan import Bucket, Plan
from slipstream.sync import GradientSync
from small_models import batch, loss_of, mlp, weights

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def pipelined_plan(model: nn.Module, reduce: int = 2, gather: int = 1) -> Plan:
    """Buckets of so many parameters, of one dtype each; gathered in the order of registration."""
    params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return Plan(
        planner="pipelined",
        wait="forward",
        reduce=tuple(_cut(params[::-1], reduce)),
        gather=tuple(_cut(params, gather)),
    )


def _cut(params: Sequence[tuple[str, nn.Parameter]], count: int) -> Iterator[Bucket]:
    for dtype in dict.fromkeys(p.dtype for _, p in params):
        lane = [(name, p) for name, p in params if p.dtype is dtype]
        for start in range(0, len(lane), count):
            part = lane[start : start + count]
            size = sum(p.numel() * p.element_size() for _, p in part)
            yield Bucket(gradients=tuple(name for name, _ in part), bytes=size)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    )


class Trainee:
    """A model under an engine on one rank, and the optimizer to step with."""

    def __init__(
        self,
        rank: Rank,
        *,
        pipelined: bool,
        build: Callable[[], nn.Module] = mlp,
        optimizer: MakeOptimizer = sgd,
        buckets: tuple[int, int] = (2, 1),
        separable: bool = False,
        **options: Any,
    ) -> None:
        self.model = build()
        plan: Plan | str = pipelined_plan(self.model, *buckets) if pipelined else "wfbp"
        self.sync = GradientSync(self.model, plan=plan, group=rank.group, **options)
        self.optimizer = optimizer(self.model)
        if pipelined:
            self.optimizer = self.sync.deferred(self.optimizer, separable=separable)
        self.rank = rank.rank

    def backward(self, step: int) -> None:
        loss_of(self.model, batch(self.rank, step)).backward()

    def train(self, *steps: int) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.backward(step)
            self.optimizer.step()

    def end(self) -> torch.Tensor:
        """The final weights, after close."""
        self.sync.close()
        return weights(self.model)


def assert_same(
    found: Sequence[torch.Tensor], reference: torch.Tensor, rtol: float = 1e-12
) -> None:
    """Every rank has the reference's weights to rounding, and all have the same bits."""
    for mine in found:
        torch.testing.assert_close(mine, reference, rtol=rtol, atol=rtol)
        assert torch.equal(mine, found[0]), "ranks hold the same bits"
