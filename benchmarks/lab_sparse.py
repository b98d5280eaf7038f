"""Sparse sums on slow links: time, bytes and what selecting takes, against rings.

An emulated cluster (`slipstream lab`) of 2 nodes of 2 ranks, 100 Mbit/s between nodes and nothing
but the machine inside them; 16.8 MB of float32 gradient, of which one in a hundred elements is
sent. Selection, error feedback and the sum are part of the time. Gradients are normal random
numbers, other ones in each of three turns. All variants take turns in one run, in an order shuffled
alike on all ranks, each on drained links; a repetition lasts as long as on its slowest rank;
figures are medians over turns.

The baselines are our rings over all ranks, with all elements as float32 and as bfloat16; that of
`lab_collectives.py` is as fast as Gloo's own, which has no settings.
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

ON_RANK = Path(__file__).with_name("sparse_on_rank.py")
NODES, RATE = 2, "100mbit"
NUMEL, DENSITY = 4_200_000, 0.01
VALUE_BYTES = {"float32": 4, "bfloat16": 2}
GOALS = {"ring float32": 0.08, "ring bfloat16": 0.15}


def formula_bytes(name: str) -> float:
    """What a node's card sends, by the collectives' own counts."""
    collective, values = name.split(",")[0].split()
    ranks = NODES * RANKS_PER_NODE
    if collective == "ring":
        return 2 * (ranks - 1) / ranks * NUMEL * VALUE_BYTES[values]
    selected = DENSITY * NUMEL * (4 + VALUE_BYTES[values])
    times = {
        "hitopk": NODES - 1,
        "naive_topk": ranks - 1,
        "a2a_topk": 2 * (NODES - 1) / NODES,
    }
    return times[collective] * selected


def report(found: dict[str, Any]) -> tuple[list[Figure], dict[str, float], str]:
    """Figures, ratios and the table."""
    figures: list[Figure] = []
    ratios: dict[str, float] = {}
    rows = []
    for name, measured in found.items():
        to = {b: paired_ratio(measured["seconds"], found[b]["seconds"]).median for b in GOALS}
        sent, counted = statistics.median(measured["sent_bytes"]), formula_bytes(name)
        selecting = statistics.median(measured["selection_seconds"])
        rows.append(
            [
                name,
                f"{statistics.median(measured['seconds']) * 1e3:.1f} ms",
                f"{selecting * 1e3:.1f} ms" if selecting else "",
                *(f"{ratio:.3f}" for ratio in to.values()),
                f"{sent / 1e6:.3f} MB",
                f"{counted / 1e6:.3f} MB",
            ]
        )
        if name == "hitopk float32":
            for baseline, goal in GOALS.items():
                figures.append(at_most(f"2 x 2, 16.8 MB: {name} / {baseline}", to[baseline], goal))
        ratios |= {f"{name} / {baseline}": ratio for baseline, ratio in to.items()}
        off = 100 * abs(sent / counted - 1)
        figures.append(at_most(f"2 x 2: bytes of {name} off its formula", off, 3, " %"))
    head = ["2 nodes x 2 ranks", "median", "selecting"]
    head += [*(f"/ {name}" for name in GOALS), "a card sends", "by formula"]
    return figures, ratios, markdown_table(head, rows)


def measure(arguments: argparse.Namespace) -> None:
    """Runs the job and prints figures and table."""
    folder: Path = arguments.folder
    result = folder / "result.json"
    turns = 2 if arguments.quick else arguments.turns
    orders = {
        "stage": "sparse",
        "result": str(result.absolute()),
        "ranks_per_node": [RANKS_PER_NODE] * NODES,
        "numel": NUMEL,
        "density": DENSITY,
        "wires": list(VALUE_BYTES),
        "turns": turns,
    }
    run_job(ON_RANK, orders, folder / "orders.json", nodes=NODES, rate=RATE)
    found = json.loads(result.read_text(encoding="utf-8"))
    figures, ratios, text = report(found)
    print(text, flush=True)
    finish("lab_sparse", figures, ratios, quick=arguments.quick, turns=turns, tables=[text])


def main() -> int:
    """Returns 1 when the job failed."""
    parser = options(__doc__)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--folder", type=Path, default=Path("runs/lab_sparse"))
    try:
        measure(parser.parse_args())
    except (RuntimeError, SlipstreamError) as error:
        print(f"lab_sparse: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
