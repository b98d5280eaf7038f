"""A model whose compute is sleep: real gradients of real sizes, ready at chosen times.

Wrappers such as torch DDP and Slipstream's engine see an ordinary module. Because sleeping leaves
the cores free, the ranks of one machine do not take compute from one another, and what is left of
a step is what synchronisation costs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.trace import Trace


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


@dataclass(frozen=True)
class LayerTimes:
    """One layer with one parameter. ready_seconds: of its gradient, from the start of backward."""

    numel: int
    forward_seconds: float
    ready_seconds: float


def layers_of(trace: Trace, total_bytes: float) -> list[LayerTimes]:
    """The layers of a recorded step in forward order, every size in proportion to total_bytes.

    A chain of layers becomes ready in the reverse of the order in which it is computed, so the
    trace's order of readiness stands; its starts in the forward are given out in that order.
    Raises ValueError for a trace that does not say when the forward needs a parameter.
    """
    scale = total_bytes / trace.bytes
    forward_order = trace.gradients[::-1]
    needed = [gradient.needed_seconds for gradient in forward_order]
    starts = sorted(seconds for seconds in needed if seconds is not None)
    if len(starts) < len(needed):
        raise ValueError(f"the trace of {trace.model!r} does not say when parameters are needed")
    ends = [*starts[1:], trace.forward_seconds]
    return [
        LayerTimes(
            numel=max(1, round(gradient.numel * scale)),
            forward_seconds=end - start,
            ready_seconds=gradient.ready_seconds,
        )
        for gradient, start, end in zip(forward_order, [0.0, *starts[1:]], ends, strict=True)
    ]


class _Pace:
    """Sleeps one after the other; what one of them oversleeps is taken off the next."""

    def __init__(self) -> None:
        self._overslept = 0.0

    def spend(self, seconds: float) -> None:
        start = time.perf_counter()
        if seconds > self._overslept:
            time.sleep(seconds - self._overslept)
        self._overslept += time.perf_counter() - start - seconds


class _SleepingLayer(nn.Module):
    """Holds one parameter; sleeps for its share of forward, and in backward until it is due."""

    def __init__(self, times: LayerTimes, pace: _Pace, clock: _Clock) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(times.numel))
        self.times, self.pace, self.clock = times, pace, clock

    def forward(self, x: Tensor) -> Tensor:
        self.pace.spend(self.times.forward_seconds)
        result: Tensor = _Layer.apply(x, self.weight, self.clock, self.times.ready_seconds)
        return result


class SleepingLayers(nn.Module):
    """Layers that sleep, each a module of its own: what waits for one in forward delays the rest.

    In forward each layer takes its time from when it is called; in backward each gradient becomes
    ready at its time from the start of backward.
    """

    def __init__(self, layers: Sequence[LayerTimes]) -> None:
        super().__init__()
        pace, self.clock = _Pace(), _Clock()
        self.layers = nn.ModuleList(_SleepingLayer(times, pace, self.clock) for times in layers)

    def forward(self, x: Tensor) -> Tensor:
        """x: a scalar that needs no gradient. Returns a scalar that depends on every parameter."""
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = layer(x)
        result: Tensor = _BackwardStart.apply(x, self.clock)
        return result
