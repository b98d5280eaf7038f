"""A model whose gradients are what it is fed with, plans for it, and what its ranks owe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from slipstream.cluster import Cluster
from slipstream.plan import Bucket, Plan
from slipstream.sync import GradientSync
from slipstream.wires import Density, Wire

CLUSTER = Cluster((2, 2))
SHAPES = {"a": (40, 5), "b": (7,), "c": (11, 3, 3), "d": (130,)}
TENTH = Density(density=0.1, values="float32")
ROUNDED = Density(density=0.2, values="bfloat16")
NAMES = ("hitopk", "naive_topk", "a2a_topk")
Cut = Sequence[tuple[str, str, Wire]]
"""Buckets: the letters of their parameters, collective and wire."""


class Fed(nn.Module):
    """Parameters whose gradients are the numbers that they are fed with."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def feed(self, values: Mapping[str, torch.Tensor]) -> None:
        """A backward in which the named parameters get these gradients and the others none."""
        products = [(self.get_parameter(name) * value).sum() for name, value in values.items()]
        torch.stack(products).sum().backward()


def plan_of(cut: Cut, cluster: Cluster = CLUSTER) -> Plan:
    sizes = {name: 4 * torch.Size(shape).numel() for name, shape in SHAPES.items()}
    return Plan(
        planner="fixed",
        nodes=cluster.nodes,
        ranks_per_node=cluster.ranks_per_node,
        reduce=tuple(
            Bucket.model_validate(
                {
                    "gradients": tuple(letters),
                    "bytes": sum(sizes[letter] for letter in letters),
                    "collective": name,
                    "wire": wire,
                }
            )
            for letters, name, wire in cut
        ),
    )


def integers(rank: int, step: int, names: str = "abcd") -> dict[str, torch.Tensor]:
    """Multiples of 4, so that a quarter of them is exact, and so is every sum of a test."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    everything = {
        name: 4.0 * torch.randint(-99, 100, shape, generator=generator)
        for name, shape in SHAPES.items()
    }
    return {name: everything[name] for name in names}


def mean(step: int, ranks: int = 4) -> dict[str, torch.Tensor]:
    each = [integers(rank, step) for rank in range(ranks)]
    return {name: torch.stack([e[name] for e in each]).sum(0) / ranks for name in SHAPES}


def trained_over(
    model: Fed, sync: GradientSync, rank: int, cuts: Sequence[Cut], each: int
) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """The averages of some steps under each plan, the first of which is in force; what is owed."""
    found = []
    for step in range(each * len(cuts)):
        if step and step % each == 0:
            sync.use_plan(plan_of(cuts[step // each]))
        model.zero_grad()
        model.feed(integers(rank, step))
        found.append(gradients(model))
    state = sync.residual_state()
    sync.close()
    return found, state


def owed_by(states: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What all ranks together still owe of each parameter."""
    owed = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for state in states:
        for key, values in state.items():
            name, _, start = key.partition("@")
            if start.endswith("~"):  # a velocity
                continue
            start = start.removesuffix("+")
            owed[name].view(-1)[int(start) : int(start) + values.numel()] += values
    return owed


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
