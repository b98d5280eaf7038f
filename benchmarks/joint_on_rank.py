"""What one rank does for lab_joint.py, started as every rank of a job: its ORDERS file."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

import lab_variants
from engine_vs_ddp import plan_of_ddp
from lab_variants import Variant
from sleeping import SleepingLayers, layers_of
from slipstream import Cluster, GradientSync
from slipstream.costs import ClusterSpec, Costs
from slipstream.measure import probe_budgeted, profile
from slipstream.plan import plan_step, time_step
from slipstream.simulate import load_trace
from slipstream.trace import Trace
from slipstream.wires import DENSE_WIRES, Wire

Loss = Callable[[nn.Module], Tensor]


def bf16_hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """As torch's bf16_compress_hook, which asks for NCCL: what travels is rounded to 16 bits."""
    flat = bucket.buffer()
    rounded = flat.to(torch.bfloat16).div_(group.size())
    work = dist.all_reduce(rounded, group=group, async_op=True)
    assert work is not None

    def widen(future: torch.futures.Future[Any]) -> torch.Tensor:
        rounded: torch.Tensor = future.value()[0]
        return flat.copy_(rounded)

    return work.get_future().then(widen)


bf16_hook.__annotations__.clear()  # torch compares them with its types, and here they are texts


def model_of(orders: dict[str, Any]) -> nn.Module:
    """The tensor list, with the compute of its trace slept through."""
    trace = load_trace(orders["model"])
    return SleepingLayers(layers_of(trace, orders["list_bytes"]))


def loss_of(module: nn.Module) -> Tensor:
    """Of nothing in particular."""
    loss: Tensor = module(torch.ones(()))
    return loss


def ddp(model: nn.Module, cap_mib: float, *, bf16: bool) -> Variant:
    """torch DDP at one cap, after its bucket rebuild."""
    wrapped = DistributedDataParallel(
        model, gradient_as_bucket_view=True, forward_sync_buffers=False, bucket_cap_mb=cap_mib
    )
    if bf16:
        wrapped.register_comm_hook(dist.group.WORLD, bf16_hook)
    step = lab_variants.step_of(wrapped, lab_variants.sgd(model), loss_of)
    for _ in range(lab_variants.DDP_WARMUP_STEPS):
        step()
    return Variant(step, plan_of_ddp(wrapped, dist.get_world_size()))


def joint(model: nn.Module, trace: Trace, costs: Costs, wires: list[Wire]) -> Variant:
    """The engine by the exact plan, merging and collectives chosen together."""
    plan = plan_step("optimal", trace, costs, collectives=tuple(DENSE_WIRES), allow=wires)
    sync = GradientSync(model, plan=plan, cluster=costs.cluster, group=dist.group.WORLD)
    variant = Variant(
        lab_variants.step_of(model, lab_variants.sgd(model), loss_of), plan, close=sync.close
    )
    variant.run(lab_variants.WARMUP_STEPS)
    return variant


def earlier(orders: dict[str, Any], cluster: Cluster, folder: Path) -> None:
    """Probes collectives and profiles the step, for plans and predictions."""
    group = dist.group.WORLD
    assert group is not None
    trace = profile(
        model := model_of(orders),
        lab_variants.step_of(model, lab_variants.sgd(model), loss_of),
        name=orders["model"],
        batch_size=1,
    )
    sizes = [2**power for power in range(10, 24) if 2**power < trace.bytes]
    ways = [(name, wire) for name, wires in DENSE_WIRES.items() for wire in wires]
    ways = [way for way in ways if way[1] != "float16"]
    spec = probe_budgeted(
        group, cluster, [*sizes, -(-trace.bytes // 4) * 4], orders["probe_seconds"], ways=ways
    )
    if dist.get_rank() == 0:
        spec.save(folder / "cluster.json")
        trace.save(folder / "trace.json")


def measure(orders: dict[str, Any], folder: Path) -> dict[str, Any]:
    """All variants in turns; what they took, and what was predicted of ours."""
    trace = Trace.load(folder / "trace.json")
    costs = Costs.of(ClusterSpec.load(folder / "cluster.json"))
    first = model_of(orders)
    work = lab_variants.Workload(first, loss_of)
    again = partial(work.again, partial(model_of, orders))
    found: dict[str, Variant] = {
        "joint float32": joint(again(), trace, costs, ["float32"]),
        "joint bfloat16 allowed": joint(again(), trace, costs, ["float32", "bfloat16"]),
    }
    for cap in orders["caps_mib"]:
        found[f"DDP {cap:g} MiB"] = ddp(again(), cap, bf16=False)
        found[f"DDP bf16 {cap:g} MiB"] = ddp(again(), cap, bf16=True)
    seconds = _in_turns(found, orders["turns"])
    return {
        name: {
            "seconds": seconds[name],
            "predicted_seconds": time_step(trace, costs, variant.plan).step_seconds
            if name.startswith("joint")
            else None,
            "buckets": [[b.bytes, b.collective, str(b.wire)] for b in variant.plan.reduce],
        }
        for name, variant in found.items()
    }


def _in_turns(found: dict[str, Variant], turns: int) -> dict[str, list[float]]:
    """Seconds of each variant's step in each turn, on the slowest rank; orders are shuffled."""
    mine: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(turns):
        names = list(found)
        random.Random(turn).shuffle(names)
        for name in names:
            dist.barrier()
            found[name].step()
            start = time.perf_counter()
            found[name].step()
            mine[name].append(time.perf_counter() - start)
    slowest = torch.tensor([mine[name] for name in found], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(found, slowest.tolist(), strict=True))


def main() -> None:
    """Joins the job and does what the orders say; rank 0 writes the result."""
    orders = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(orders["folder"])
    try:
        if orders["stage"] == "earlier":
            earlier(orders, Cluster(tuple(orders["ranks_per_node"])), folder)
        else:
            found = measure(orders, folder)
            if dist.get_rank() == 0:
                (folder / "measured.json").write_text(json.dumps(found), encoding="utf-8")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
