"""Training under `plan="auto"` on a clock that stands still: exact times, no waiting."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import nn

from ranks import Rank
from slipstream.auto import GradientSync
from slipstream.cluster import Cluster
from slipstream.costs import CostKey, Costs, Curve, Line, Operation
from small_models import Gradients, gradients
from worked_models import StoodClock, workers

STEPS = 3
PLANNED = 1 + (2 + STEPS + 1) + (1 + STEPS)
"""Rounds after which auto has made up its mind: learn, profile, time."""
TOLD = PLANNED + 2 + STEPS
"""Rounds after which it has measured what came of it."""


def slow_links(world_size: int = 2) -> Costs:
    """0.4 s a byte and nothing a bucket: three buckets of 24 B hide what one of 72 B cannot.

    Each half of an all-reduce takes half of that.
    """
    curves = {"all_reduce": 0.4, "reduce_scatter": 0.2, "all_gather": 0.2}
    measured: dict[CostKey, Curve] = {
        ("native", operation, "float32"): Line(0.0, curves[operation])
        for operation in get_args(Operation)
    }
    return Costs(Cluster((world_size,)), measured)


@dataclass
class Trainer:
    """One rank that trains three workers (forward 6 s, backward 60 s), in 64 bits.

    samples differ between ranks and steps; `found` holds the averages of every synchronised step.
    """

    rank: Rank
    options: dict[str, Any] = field(default_factory=dict)
    plan: str = "auto"
    given: dict[str, Any] = field(default_factory=dict)
    found: list[Gradients] = field(default_factory=list)
    has_optimizer: bool = True

    def __post_init__(self) -> None:
        self.clock = StoodClock()
        self.model = workers(self.clock).double()
        self.start = copy.deepcopy(self.model.state_dict())
        options: dict[str, Any] = {"costs": slow_links(self.rank.world_size), "steps": STEPS}
        options |= {"clock": self.clock, **self.options}
        self.sync = GradientSync(
            self.model,
            plan=self.plan,
            plan_options={k: v for k, v in options.items() if v is not None},
            group=self.rank.group,
            store=self.rank.store,
            **self.given,
        )
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.optimizer: torch.optim.Optimizer = sgd
        self.count = 0

    def step(self, micro_batches: int = 1, between: Callable[[], None] = lambda: None) -> None:
        """Averages over all micro-batches; nothing of weights changes."""
        self.optimizer.zero_grad()
        with self.sync.no_sync():
            for _ in range(micro_batches - 1):
                self._backward()
                between()
        self._backward()
        self.found.append(gradients(self.model))
        if self.has_optimizer:
            self.optimizer.step()

    def run(self, steps: int, micro_batches: int = 1) -> Trainer:
        """That many steps."""
        for _ in range(steps):
            self.step(micro_batches)
        return self

    def _backward(self) -> None:
        x = samples(self.rank.rank, self.count)
        self.count += 1
        self.model(x).square().mean().backward()


def samples(rank: int, count: int) -> torch.Tensor:
    """[4, 3] of a rank's backward, counted from 0."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    return torch.randn(4, 3, dtype=torch.float64, generator=generator)


def reference(world_size: int, first: int, micro_batches: int) -> Gradients:
    """The averages of one step on one process: its backwards from `first` on, of all ranks."""
    model: nn.Module = workers(StoodClock()).double()
    for rank in range(world_size):
        for count in range(first, first + micro_batches):
            (model(samples(rank, count)).square().mean() / world_size).backward()
    return gradients(model)
