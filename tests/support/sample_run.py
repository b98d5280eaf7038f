"""Writes a made-up run folder that holds everything a report can show."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from slipstream.plan import Bucket, Plan, PlanHistory, PlannedStep
from slipstream.report.records import format_line

NUM_EPOCHS, STEPS_PER_EPOCH = 6, 117
_RECIPE = """\
name = "fashion"

[data]
dataset = "fashion"
folder = ""

[augment]
crop_padding = 2
horizontal_flip = true

[model]
name = "resnet_small"
width = 24
channels_last = true

[train]
epochs = 6
global_batch_size = 512
accumulation_steps = 1
seed = 1
label_smoothing = 0.05

[optimizer]
learning_rate = 0.4
momentum = 0.9
nesterov = true

[sync]
planner = "ddp"
wait = "backward"

[cluster]
nodes = 2
ranks_per_node = 2
"""


def write_run(folder: Path, *, num_steps: int = NUM_EPOCHS * STEPS_PER_EPOCH) -> Path:
    """Fills `folder` as a training of `num_steps` steps would; returns it."""
    (folder / "checkpoints" / "step-00000117").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000117" / "model.safetensors").write_bytes(b"x" * 472_000)
    (folder / "recipe.toml").write_text(_RECIPE)
    (folder / "plan.json").write_text(plan().to_json())
    (folder / "plans.json").write_text(plans().to_json())
    (folder / "environment.json").write_text(json.dumps(environment()))
    (folder / "metrics.jsonl").write_text("".join(map(format_line, records(num_steps))))
    (folder / "summary.json").write_text(json.dumps(summary(folder)))
    return folder


def plan() -> Plan:
    """Five buckets of a small residual network."""
    sizes = (90_000, 400_000, 1_048_576, 2_200_000, 640_000)
    buckets = tuple(
        Bucket(gradients=tuple(f"layer{5 - i}.{j}.weight" for j in range(1 + 3 * i)), bytes=size)
        for i, size in enumerate(sizes)
    )
    return Plan(planner="ddp", model="resnet_small", nodes=2, ranks_per_node=2, reduce=buckets)


def plans() -> PlanHistory:
    """A change of plan after 21 steps."""
    better = plan().model_copy(update={"planner": "optimal", "predicted_step_seconds": 0.0625})
    change = PlannedStep(
        step=21, plan=better, reason="auto <changed> it", measured_step_seconds=0.0655
    )
    return PlanHistory(plans=(PlannedStep(step=0, plan=plan()), change))


def environment() -> dict[str, Any]:
    """What `slipstream.report.environment` gives, made up."""
    return {
        "python": "CPython 3.11.2",
        "platform": "Linux-6.1-x86_64",
        "cpu": "A processor",
        "cores": 2,
        "usable_cores": 2,
        "memory_bytes": 24 * 2**30,
        "gpus": [],
        "packages": {"slipstream": "0.1.0", "torch": "2.14.1"},
        "variables": {"OMP_NUM_THREADS": "1"},
    }


def summary(folder: Path) -> dict[str, Any]:
    """The summary of a finished run."""
    return {
        "recipe": "fashion",
        "world_size": 4,
        "epochs": NUM_EPOCHS,
        "steps": NUM_EPOCHS * STEPS_PER_EPOCH,
        "test_accuracy": 0.9243,
        "train_seconds": 271.4,
        "images_per_second": 1321.7,
        "exposed_communication_seconds": 8.1,
        "peak_memory_bytes": 812_000_000,
        "weights_sha256": "ab" * 32,
        "run_folder": folder.name,
    }


def records(num_steps: int) -> list[dict[str, Any]]:
    """Metrics of `num_steps` steps: falling loss, epochs, a timeline, a skip and a resume."""
    noise = random.Random(1)
    total = NUM_EPOCHS * STEPS_PER_EPOCH
    found: list[dict[str, Any]] = []
    for step in range(1, num_steps + 1):
        epoch = (step - 1) // STEPS_PER_EPOCH + 1
        done = step / total
        loss = 0.28 + 2.0 * math.exp(-9 * done) + noise.gauss(0, 0.04) * (1.1 - done)
        where: dict[str, Any] = {"step": step, "epoch": epoch}
        found.append(
            {
                "kind": "step",
                **where,
                "loss": loss,
                "accuracy": min(0.97, 1.02 - loss / 2.6),
                "learning_rate": 0.4 * min(10 * done, 0.5 + 0.5 * math.cos(math.pi * done)),
                "images_per_second": 1320 + noise.gauss(0, 35) - (900 if step == 1 else 0),
                "communication_hidden_seconds": 0.021 + abs(noise.gauss(0, 0.002)),
                "communication_exposed_seconds": 0.0045 + abs(noise.gauss(0, 0.0012)),
                "gradient_norm": 0.4 + 3 * math.exp(-12 * done) + abs(noise.gauss(0, 0.05)),
                "input_wait_seconds": abs(noise.gauss(0, 0.0001)),
            }
        )
        if step % STEPS_PER_EPOCH == 0:
            found += _epoch_end(where, done)
    if num_steps > 300:
        found.append({"kind": "resume", "step": 234})
        found.append({"kind": "skip", "step": 300, "ranks": [1, 3], "parameter": "stem.weight"})
    if num_steps:
        found.append({"kind": "timeline", "step": num_steps, "spans": spans()})
    return found


def spans() -> list[dict[str, Any]]:
    """A step in which four buckets are hidden and the last is mostly exposed."""
    rows: list[tuple[str, str, float, float, int | None]] = [
        ("input", "input", 0.0, 0.004, None),
        ("forward", "forward", 0.004, 0.118, None),
        ("backward", "backward", 0.118, 0.352, None),
        ("communication", "bucket 0", 0.131, 0.136, 90_000),
        ("communication", "bucket 1", 0.170, 0.188, 400_000),
        ("communication", "bucket 2", 0.226, 0.257, 1_048_576),
        ("communication", "bucket 3", 0.282, 0.343, 2_200_000),
        ("communication", "bucket 4", 0.350, 0.374, 640_000),
        ("wait", "wait", 0.352, 0.374, None),
        ("update", "update", 0.374, 0.384, None),
    ]
    return [
        {"row": row, "name": name, "start_seconds": start, "end_seconds": end}
        | ({} if num_bytes is None else {"bytes": num_bytes})
        for row, name, start, end, num_bytes in rows
    ]


def _epoch_end(where: dict[str, Any], done: float) -> list[dict[str, Any]]:
    test_accuracy = 0.93 - 0.2 * math.exp(-5 * done)
    return [
        {
            "kind": "epoch",
            **where,
            "train_loss": 0.3 + 1.2 * math.exp(-6 * done),
            "train_accuracy": 0.95 - 0.3 * math.exp(-5 * done),
            "seconds": 45.1,
            "images_per_second": 1318.0,
        },
        {
            "kind": "evaluation",
            **where,
            "test_loss": 0.27 + 0.8 * math.exp(-5 * done),
            "test_accuracy": test_accuracy,
        },
    ]
