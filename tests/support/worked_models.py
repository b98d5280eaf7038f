"""Models whose parts take a stated time on a clock that stands still otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class StoodClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        """Lets time pass."""
        self.now += seconds


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: StoodClock, there: float, back: float) -> Any:
        ctx.clock, ctx.back = clock, back
        clock.wait(there)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.clock.wait(ctx.back)
        return gradients[0], None, None, None


def work(x: torch.Tensor, clock: StoodClock, there: float, back: float) -> torch.Tensor:
    """The same values; takes `there` seconds now and `back` seconds in backward."""
    result: torch.Tensor = _Work.apply(x, clock, there, back)
    return result


class Worker(nn.Module):
    """Scales its input [B, 3] by a weight [3]; forward and backward take stated seconds."""

    def __init__(self, clock: StoodClock, there: float, back: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.clock = clock
        self.there = there
        self.back = back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The weight's gradient is ready once the work of backward is done."""
        return work(x * self.weight, self.clock, self.there, self.back)


def workers(clock: StoodClock) -> nn.Sequential:
    """Three of them: forward 1 + 2 + 3 s, backward 30, then 20, then 10 s."""
    times = [(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]
    return nn.Sequential(*(Worker(clock, there, back) for there, back in times))
