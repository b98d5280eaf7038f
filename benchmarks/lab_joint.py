"""Merging and collectives planned together, end to end: our steps against torch DDP's.

An emulated cluster (`slipstream lab`): 2 nodes of 2 ranks, 100 Mbit/s between them. Compute is
slept through as the shipped trace of ResNet-50 says it, with its tensors scaled to 10 MB. An
earlier job, on a lab of its own, probes every collective and profiles the step; plans and
predictions come from there. In the measuring job all variants train the same parameters and take
turns in an order shuffled alike on all ranks: a step that is not counted, then the one that is
(zero_grad, forward, loss, backward, SGD's update), as long as on the slowest rank.

DDP: gradient_as_bucket_view=True, forward_sync_buffers=False, after its bucket rebuild, at explicit
caps of which the best counts; once with its own all-reduce, and once with a hook that rounds to
bfloat16 what travels, as torch's own does where there is NCCL.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from harness import Figure, at_most, finish, options, paired_ratio
from lab_jobs import RANKS_PER_NODE, run_job
from markers import markdown_table
from slipstream.errors import SlipstreamError

ON_RANK = Path(__file__).with_name("joint_on_rank.py")
RATE, NODES = "100mbit", 2
CAPS_MIB = (0.25, 0.5, 1, 2, 5, 25)


def evaluate(found: dict[str, Any]) -> tuple[list[Figure], dict[str, float], str]:
    """Figures, ratios and the table."""
    medians = {name: statistics.median(entry["seconds"]) for name, entry in found.items()}
    figures, ratios, errors = [], {}, []
    for ours, prefix, goal in (
        ("joint float32", "DDP ", 0.75),
        ("joint bfloat16 allowed", "DDP bf16 ", 0.80),
    ):
        rivals = [n for n in found if n.startswith(prefix) and n[len(prefix)].isdigit()]
        best = min(rivals, key=medians.__getitem__)
        ratio = paired_ratio(found[ours]["seconds"], found[best]["seconds"])
        what = f"{ours} / best {prefix.strip()} ({best})"
        spread = f" ({ratio.lower:.3f} to {ratio.upper:.3f})"
        figure = at_most(what, ratio.median, goal)
        figures.append(Figure(figure.what, figure.value + spread, figure.goal, figure.met))
        ratios[ours.replace(" ", "_")] = ratio.median
        errors.append(abs(found[ours]["predicted_seconds"] / medians[ours] - 1))
    error = 100 * statistics.median(errors)
    figures.append(at_most("predicted / measured step, median error", error, 10, " %", digits=1))
    rows = []
    for name, entry in found.items():
        predicted = entry["predicted_seconds"]
        ways = list(dict.fromkeys(f"{way} {wire}" for _, way, wire in entry["buckets"]))
        rows.append(
            [
                name,
                f"{medians[name] * 1e3:.0f}",
                f"{predicted * 1e3:.0f}" if predicted else "",
                f"{len(entry['buckets'])}",
                ", ".join(ways) if predicted else "",
            ]
        )
    head = ["2 x 2, 100 Mbit/s, 10 MB", "step, ms", "predicted, ms", "buckets", "by"]
    return figures, ratios, markdown_table(head, rows)


def main() -> int:
    """Runs the jobs and prints figures and the table; returns 1 when a job failed."""
    parser = options(__doc__)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--probe-seconds", type=float, default=150.0)
    parser.add_argument("--folder", type=Path, default=Path("runs/lab_joint"))
    arguments: argparse.Namespace = parser.parse_args()
    quick: bool = arguments.quick
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    orders = {
        "folder": str(folder.absolute()),
        "model": "resnet50",
        "list_bytes": 1e6 if quick else 10e6,
        "ranks_per_node": [RANKS_PER_NODE] * NODES,
        "probe_seconds": 8.0 if quick else arguments.probe_seconds,
        "caps_mib": CAPS_MIB[2:3] if quick else CAPS_MIB,
        "turns": 2 if quick else arguments.turns,
    }
    try:
        for stage in ("earlier", "measure"):
            path = folder / f"orders-{stage}.json"
            run_job(ON_RANK, {**orders, "stage": stage}, path, nodes=NODES, rate=RATE)
    except (RuntimeError, SlipstreamError) as error:
        print(f"lab_joint: {error}", file=sys.stderr)
        return 1
    found = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
    figures, ratios, table = evaluate(found)
    print(table, flush=True)
    finish("lab_joint", figures, ratios, quick=quick, tables=[table])
    return 0


if __name__ == "__main__":
    sys.exit(main())
