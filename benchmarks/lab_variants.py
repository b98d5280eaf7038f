"""The contestants of a row in the lab: torch DDP at many settings, the engine by many plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from engine_vs_ddp import plan_of_ddp
from lab_rows import DDP_DEFAULT, DDP_SCALED, MIB, Row
from sleeping import SleepingLayers, layers_of
from slipstream import Cluster, GradientSync, Plan
from slipstream.simulate import load_trace

Step = Callable[[], None]
LEARNING_RATE = 1e-4
WARMUP_STEPS = 2
DDP_WARMUP_STEPS = 3
"""The second forward finds new buckets, which the third step reports."""
AUTO_LIMIT_STEPS = 100
AUTO_JUDGES_STEPS = 12
"""More than the steps by which auto tells whether its plan was worth it."""
BATCH_SIZE = 8


@dataclass
class Workload:
    """What every variant of a row trains: each has a model of its own, all the same parameters.

    loss: of a model, or of its wrapper, on this rank's samples.
    """

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]

    def again(self, build: Callable[[], nn.Module]) -> nn.Module:
        """A further model whose parameters lie in the memory of the first one's."""
        model = build()
        for mine, first in zip(model.parameters(), self.model.parameters(), strict=True):
            mine.data = first.data
        return model


def builder(row: Row) -> Callable[[], nn.Module]:
    """What makes a model of the row, the same on every rank."""
    if row.computes:
        from torchvision.models import resnet18

        def seeded() -> nn.Module:
            torch.manual_seed(0)
            model: nn.Module = resnet18()
            return model

        return seeded
    trace = load_trace(row.model)
    return partial(SleepingLayers, layers_of(trace, row.list_bytes or trace.bytes))


def workload(row: Row, rank: int) -> Workload:
    """The row's work on this rank."""
    model = builder(row)()
    if not row.computes:
        one = torch.ones(())
        return Workload(model, lambda module: module(one))
    torch.manual_seed(1 + rank)
    images, labels = torch.randn(BATCH_SIZE, 3, 64, 64), torch.randint(0, 1000, (BATCH_SIZE,))
    return Workload(model, lambda module: cross_entropy(module(images), labels))


def step_of(module: nn.Module, optimizer: Optimizer, loss: Callable[[nn.Module], Tensor]) -> Step:
    """A whole training step."""

    def step() -> None:
        optimizer.zero_grad()
        loss(module).backward()
        optimizer.step()

    return step


def sgd(model: nn.Module) -> SGD:
    """Every variant's optimizer."""
    return SGD(model.parameters(), lr=LEARNING_RATE)


@dataclass
class Variant:
    """One way to average gradients, ready to be timed.

    step: one training step; rest: brings to an end what a step leaves in flight; plan: the buckets
    that travel; close: takes it off its model; story: how it came to its plan, if by itself.
    """

    step: Step
    plan: Plan
    rest: Step = lambda: None
    close: Step = lambda: None
    story: str = ""

    def run(self, num_steps: int) -> None:
        """Trains some steps."""
        for _ in range(num_steps):
            self.step()


def ddp(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    cap_mib: float | None = None,
    cap_list_mib: Sequence[float] | None = None,
) -> Variant:
    """torch DDP at its best settings, after its bucket rebuild. cap_mib None: its default."""
    wrapped = DistributedDataParallel(
        model,
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,
        bucket_cap_mb=cap_mib,
        bucket_cap_mb_list=cap_list_mib,  # type: ignore[arg-type]  # and a list of them
    )
    step = step_of(wrapped, sgd(model), loss)
    for _ in range(DDP_WARMUP_STEPS):
        step()
    return Variant(step, plan_of_ddp(wrapped, dist.get_world_size()))


def ddp_caps(row: Row, list_bytes: int) -> dict[str, float | None]:
    """Names and caps of the DDP variants; one cap is scaled like the list."""
    whole = list_bytes if row.computes else load_trace(row.model).bytes
    caps: dict[str, float | None] = {DDP_DEFAULT: None}
    caps |= {f"DDP {cap} MiB": cap for cap in row.ddp_caps_mib}
    return caps | {DDP_SCALED: 25 * list_bytes / whole}


def caps_of(plan: Plan) -> list[float]:
    """The plan's sizes as DDP's list: a bucket closes as soon as it has reached its limit."""
    return [max(1, bucket.bytes - 1) / MIB for bucket in plan.reduce]


def engine(model: nn.Module, loss: Callable[[nn.Module], Tensor], plan: Plan) -> Variant:
    """Slipstream's engine by a given plan, on the group that DDP has."""
    cluster = Cluster.regular(plan.nodes, 1)
    sync = GradientSync(model, plan=plan, cluster=cluster, group=dist.group.WORLD)
    if plan.gather is None:
        variant = Variant(step_of(model, sgd(model), loss), plan, close=sync.close)
    else:
        step = step_of(model, sync.deferred(sgd(model)), loss)
        variant = Variant(step, plan, rest=sync.flush, close=sync.close)
    variant.run(WARMUP_STEPS)
    variant.rest()
    return variant


def auto(model: nn.Module, loss: Callable[[nn.Module], Tensor], num_nodes: int) -> Variant:
    """The engine as it comes, after it has measured, planned and judged what came of it."""
    cluster = Cluster.regular(num_nodes, 1)
    sync = GradientSync(model, plan="auto", cluster=cluster, group=dist.group.WORLD)
    step = step_of(model, sgd(model), loss)
    for _ in range(AUTO_LIMIT_STEPS):
        if sync.history.plans[-1].reason:
            break
        step()
    else:
        raise RuntimeError(f"auto has decided nothing within {AUTO_LIMIT_STEPS} steps.")
    for _ in range(AUTO_JUDGES_STEPS):
        step()
    return Variant(step, sync.plan, close=sync.close, story=sync.history.plans[-1].reason)
