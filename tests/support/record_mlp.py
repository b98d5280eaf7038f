"""Records what `test_replay.py` replays: a 4-layer MLP's trace, a cluster's costs, measured steps.

Run as a rank of a job, on an otherwise idle machine; rank 0 writes the file:

    slipstream lab --nodes 2 --per-node 1 --rate 100mbit -- python record_mlp.py OUTPUT
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from slipstream import Cluster, GradientSync, Plan
from slipstream.costs import Costs
from slipstream.measure import probe_budgeted, profile
from slipstream.plan import plan_step

WIDTH, BATCH, TURNS = 512, 256, 15
PLANNERS = ("wfbp", "single", "mgwfbp", "optimal")


def training(model: nn.Module) -> Callable[[], None]:
    """A step of SGD on made-up data, as a function without arguments."""
    data, optimizer = torch.randn(BATCH, WIDTH), torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(data).square().mean().backward()
        optimizer.step()

    return step


def seconds_of(step: Callable[[], None]) -> float:
    """A step behind one that is not counted, on the slowest rank."""
    step()
    dist.barrier()
    start = time.perf_counter()
    step()
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def steps_of(model: nn.Module, plans: dict[str, Plan]) -> dict[str, float]:
    """Median seconds of a step by each plan; plans take turns."""
    found: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(TURNS):
        for name, plan in plans.items():
            sync = GradientSync(model, plan=plan)
            found[name].append(seconds_of(training(model)))
            sync.close()
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def main() -> None:
    """Profiles, probes, then lets the plans take turns."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    trace = profile(model, training(model), steps=20, name="mlp", batch_size=BATCH)
    sizes = [2**power for power in range(10, trace.bytes.bit_length())]
    cluster = Cluster.regular(dist.get_world_size(), 1)
    spec = probe_budgeted(dist.group.WORLD, cluster, [*sizes, trace.bytes], 30.0)
    plans = {name: plan_step(name, trace, Costs.of(spec)) for name in PLANNERS}
    measured = steps_of(model, plans)
    if dist.get_rank() == 0:
        documents = {name: json.loads(part.to_json()) for name, part in plans.items()}
        parts = {"trace": json.loads(trace.to_json()), "cluster": json.loads(spec.to_json())}
        record = {**parts, "plans": documents, "step_seconds": measured}
        Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        for name, plan in plans.items():
            print(name, len(plan.reduce), plan.predicted_step_seconds, measured[name])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
