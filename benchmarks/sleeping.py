"""A model whose compute is sleep: real gradients of real sizes, ready at chosen times.

Wrappers such as torch DDP and Slipstream's engine see an ordinary module. Because sleeping leaves
the cores free, the ranks of one machine do not take compute from one another, and what is left of
a step is what synchronisation costs.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


def resnet50_sizes(scale: float) -> list[int]:
    """The 161 parameter sizes of ResNet-50 in forward order, times `scale`, at least 1."""
    from torchvision.models import resnet50

    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in resnet50().parameters()]
    return [max(1, round(size * scale)) for size in sizes]


class _Clock:
    """Sleeps to absolute deadlines: many short sleeps would each overshoot."""

    def __init__(self) -> None:
        self.origin_seconds = 0.0

    def start(self) -> None:
        self.origin_seconds = time.perf_counter()

    def sleep_until(self, offset_seconds: float) -> None:
        left = self.origin_seconds + offset_seconds - time.perf_counter()
        if left > 0:
            time.sleep(left)


class _Layer(torch.autograd.Function):
    """Identity on a scalar; backward makes the parameter's gradient and sleeps until it is due."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, parameter: Tensor, clock: _Clock, ready_seconds: float
    ) -> Tensor:
        ctx.parameter, ctx.clock, ctx.ready_seconds = parameter, clock, ready_seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gradient = torch.full_like(ctx.parameter, 1e-3)
        ctx.clock.sleep_until(ctx.ready_seconds)
        return grad, gradient, None, None


class _BackwardStart(torch.autograd.Function):
    """Identity; its backward starts the clock."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: _Clock) -> Tensor:
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.clock.start()
        return grad, None


class SleepingModel(nn.Module):
    """Sleeps in forward; in backward, gradients become ready evenly over `backward_seconds`.

    sizes: elements of each float32 parameter, in forward order.
    """

    def __init__(self, sizes: list[int], forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
        self.forward_seconds = forward_seconds
        self.backward_seconds = backward_seconds

    def forward(self, x: Tensor) -> Tensor:
        """x: a scalar that needs no gradient. Returns a scalar that depends on every parameter."""
        clock = _Clock()
        x = x.clone().requires_grad_()
        count = len(self.weights)
        for index, weight in enumerate(self.weights):
            ready_seconds = self.backward_seconds * (count - index) / count
            x = _Layer.apply(x, weight, clock, ready_seconds)
        time.sleep(self.forward_seconds)
        result: Tensor = _BackwardStart.apply(x, clock)
        return result
