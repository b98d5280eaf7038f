"""The same small trainings under torch's DDP and under GradientSync, one pair a scenario.

Every training returns its weights, its buffers and the gradients of each step as one flat tensor in
64 bits, a gradient that is None as NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipelined import pipelined_plan
from slipstream.sync import GradientSync
from small_models import reseeded

NUM_STEPS = 5
OVERFLOW_STEP = 2


class Branches(nn.Module):
    """Convolution, batch norm and two heads of which a call uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten())
        self.heads = nn.ModuleList([nn.Linear(24, 3), nn.Linear(24, 3)])
        reseeded(self.double(), 0)

    def forward(self, images: torch.Tensor, use: tuple[int, ...]) -> torch.Tensor:
        features = self.body(images)
        return torch.stack([self.heads[index](features) for index in use]).square().mean()


class Side(Protocol):
    """One of the two: how it averages, clips, accumulates and steps."""

    model: nn.Module

    def loss(self, images: torch.Tensor, use: tuple[int, ...]) -> torch.Tensor: ...
    def no_sync(self) -> AbstractContextManager[None]: ...
    def clip(self, max_norm: float) -> torch.Tensor: ...
    def unscale(self, scaler: torch.amp.GradScaler) -> None: ...
    def look(self) -> None: ...
    def finish(self) -> None: ...

    optimizer: torch.optim.Optimizer


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3
    )


class WithDDP:
    """torch's own."""

    def __init__(self, find_unused: bool = False) -> None:
        self.model: nn.Module = Branches()
        self.ddp = DistributedDataParallel(
            self.model, find_unused_parameters=find_unused, gradient_as_bucket_view=True
        )
        self.optimizer = sgd(self.model)

    def loss(self, images: torch.Tensor, use: tuple[int, ...]) -> torch.Tensor:
        loss: torch.Tensor = self.ddp(images, use)
        return loss

    def no_sync(self) -> AbstractContextManager[None]:
        return self.ddp.no_sync()

    def clip(self, max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        scaler.unscale_(self.optimizer)

    def look(self) -> None:
        """Gradients are there."""

    def finish(self) -> None:
        """Its buffers are rank 0's since the last forward began; nothing more is promised."""


class WithSlipstream:
    """Ours; other seeds on other ranks, since rank 0's weights win."""

    def __init__(self, planner: str, way: str, rank: int) -> None:
        self.model: nn.Module = reseeded(Branches(), rank)
        plan = pipelined_plan(self.model, 3, 2) if planner == "pipelined" else planner
        self.sync = GradientSync(self.model, plan=plan)
        self.optimizer = sgd(self.model)
        self.looks = way == "looked at"
        if way == "attached":
            self.sync.attach(self.optimizer)
        elif way:
            self.optimizer = self.sync.deferred(self.optimizer)

    def loss(self, images: torch.Tensor, use: tuple[int, ...]) -> torch.Tensor:
        loss: torch.Tensor = self.model(images, use)
        return loss

    def no_sync(self) -> AbstractContextManager[None]:
        return self.sync.no_sync()

    def clip(self, max_norm: float) -> torch.Tensor:
        return self.sync.clip_grad_norm_(max_norm)

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        self.sync.unscale_(scaler, self.optimizer)

    def look(self) -> None:
        if self.looks:
            self.sync.flush()

    def finish(self) -> None:
        self.sync.sync_buffers()
        self.sync.close()


def images(rank: int, step: int) -> torch.Tensor:
    """[4, 2, 4, 4], float64."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 2, 4, 4, dtype=torch.float64, generator=generator)


def plain(side: Side, rank: int) -> Iterator[None]:
    for step in range(NUM_STEPS):
        side.optimizer.zero_grad()
        side.loss(images(rank, step), (0, 1)).backward()
        side.optimizer.step()
        yield


def accumulation(side: Side, rank: int) -> Iterator[None]:
    for step in range(NUM_STEPS):
        side.optimizer.zero_grad()
        with side.no_sync():
            for micro in (1, 2):
                side.loss(images(rank, 10 * micro + step), (0, 1)).backward()
        side.loss(images(rank, step), (0, 1)).backward()
        side.optimizer.step()
        yield


def unused(side: Side, rank: int) -> Iterator[None]:
    """The second head: by nobody, by all, by rank 0, by all but rank 0, by nobody."""
    uses = [False, True, rank == 0, rank != 0, False]
    for step, use in enumerate(uses):
        side.optimizer.zero_grad()
        side.loss(images(rank, step), (0, 1) if use else (0,)).backward()
        side.optimizer.step()
        yield


def clipping(side: Side, rank: int) -> Iterator[None]:
    for step in range(NUM_STEPS):
        side.optimizer.zero_grad()
        side.loss(images(rank, step), (0, 1)).backward()
        assert side.clip(0.1) > 0.1, "the norm is clipped"
        side.optimizer.step()
        yield


def scaling(side: Side, rank: int) -> Iterator[None]:
    """The gradient overflows on rank 1 in one step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    for step in range(NUM_STEPS):
        side.optimizer.zero_grad()
        loss = side.loss(images(rank, step), (0, 1))
        if step == OVERFLOW_STEP and rank == 1:
            loss = loss * 1e306
        scaler.scale(loss).backward()
        side.unscale(scaler)
        scaler.step(side.optimizer)
        before = scaler.get_scale()
        scaler.update()
        assert (scaler.get_scale() < before) == (step == OVERFLOW_STEP)
        yield


SCENARIOS: dict[str, Callable[[Side, int], Iterator[None]]] = {
    "plain": plain,
    "accumulation": accumulation,
    "unused": unused,
    "clipping": clipping,
    "scaling": scaling,
}
OURS = {
    "ddp planner": ("ddp", ""),
    "wfbp planner": ("wfbp", ""),
    "single planner, attached": ("single", "attached"),
    "wfbp planner, attached": ("wfbp", "attached"),
    "wfbp planner, deferred": ("wfbp", "deferred"),
    "pipelined, looked at": ("pipelined", "looked at"),
    "pipelined": ("pipelined", "deferred"),
}
HIDDEN = "pipelined"
"""The way whose gradients are not there between two steps."""


def observe(side: Side, scenario: str, rank: int) -> dict[str, torch.Tensor]:
    """Runs the scenario; what is compared of it."""
    seen = []
    for _ in SCENARIOS[scenario](side, rank):
        side.look()
        seen += [
            torch.full_like(p, float("nan")) if p.grad is None else p.grad.clone()
            for p in side.model.parameters()
        ]
    side.finish()
    return {
        "gradients": torch.cat([tensor.reshape(-1) for tensor in seen]),
        "weights": torch.cat([p.detach().reshape(-1) for p in side.model.parameters()]),
        "buffers": torch.cat([b.reshape(-1).double() for b in side.model.buffers()]),
    }


def run_all(rank: int, _world_size: int) -> dict[str, Any]:
    """Every scenario under DDP and under each way of ours: results[scenario][way]."""
    results: dict[str, Any] = {}
    for scenario in SCENARIOS:
        find_unused = scenario == "unused"
        ways = {"torch": observe(WithDDP(find_unused), scenario, rank)}
        for name, (planner, way) in OURS.items():
            ways[name] = observe(WithSlipstream(planner, way, rank), scenario, rank)
        results[scenario] = ways
    return results


def rank_1_raises(rank: int, _world_size: int) -> dict[str, Any]:
    """Fails on one rank while the other waits for it."""
    if rank == 1:
        raise ValueError("one is odd")
    torch.distributed.barrier()
    return {}
