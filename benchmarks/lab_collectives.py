"""Collectives on slow links: time and bytes of each, and the choice that measured costs make.

Two emulated clusters (`slipstream lab`) with 100 Mbit/s between nodes and nothing but the machine
inside them: 2 nodes of 2 ranks with 16.8 MB, and 4 nodes of 2 ranks with 1 KiB to 16 MiB. All
variants take turns in one run, in an order shuffled alike on all ranks; a repetition lasts as long
as on its slowest rank, and figures are medians. Tensors are float32 and lie in memory as one flat
piece. The baseline is `native`, Gloo's own ring, which has no settings.

Hybrid: on 4 nodes the collective for each size is chosen from costs that an earlier job on a lab of
its own has probed; what it then takes is that collective's time in this run.

Bytes: what a node's card sends for one all-reduce, against the algorithm's formula; headers of
TCP, IP and Ethernet included (MTU 9000).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from harness import Figure, at_least, at_most, finish, options, paired_ratio
from lab_jobs import RANKS_PER_NODE, run_job
from markers import markdown_table
from slipstream.costs import ClusterSpec, Costs
from slipstream.errors import SlipstreamError
from slipstream.wires import DENSE_WIRES

ON_RANK = Path(__file__).with_name("collectives_on_rank.py")
RATE = "100mbit"
LARGE_BYTES = 16_800_000
SIZES = [2**power for power in range(10, 25)]
SMALL_BYTES = 16 * 1024
FLOAT32 = [[name, "float32"] for name in DENSE_WIRES]
WAYS_2X2 = [*FLOAT32, ["ring", "bfloat16"], ["direct", "bfloat16"], ["torus", "bfloat16"]]
WHOLE = "torus float32, in one piece"
BETWEEN = {
    "ring": lambda nodes, per_node: 2 * (nodes * per_node - 1) / (nodes * per_node),
    "direct": lambda nodes, per_node: 2 * per_node * (1 - 1 / nodes),
    "hierarchical": lambda nodes, per_node: 2 * (nodes - 1) / nodes,
    "torus": lambda nodes, per_node: 2 * (nodes - 1) / nodes,
    "halving_doubling": lambda nodes, per_node: 2 * per_node * (1 - 1 / nodes),
    "recursive_doubling": lambda nodes, per_node: per_node * (nodes.bit_length() - 1),
}
"""Bytes that a node's card sends for each byte of an all-reduce; nodes and ranks powers of two."""


def result_of(folder: Path, nodes: int, **orders: Any) -> Any:
    """What rank 0 of a job on a lab of its own writes. Raises RuntimeError when it failed."""
    name = f"{orders['stage']}-{nodes}.json"
    result = folder / name
    orders |= {
        "result": str(result.absolute()),
        "ranks_per_node": [RANKS_PER_NODE] * nodes,
    }
    run_job(ON_RANK, orders, folder / f"orders-{name}", nodes=nodes, rate=RATE)
    return json.loads(result.read_text(encoding="utf-8"))


def seconds_of(found: dict[str, Any], name: str) -> float:
    """A variant's median."""
    seconds: list[float] = found[name]["seconds"]
    return statistics.median(seconds)


def ratio_to(found: dict[str, Any], name: str, baseline: str) -> float:
    """The median of ratios within a turn."""
    return paired_ratio(found[name]["seconds"], found[baseline]["seconds"]).median


def of_2x2(size: int, found: dict[str, Any]) -> tuple[list[Figure], dict[str, float], str]:
    """Figures, ratios and table of a large tensor on 2 nodes of 2 ranks."""
    goals = {"torus float32": 0.70, "ring bfloat16": 0.55, "torus bfloat16": 0.42}
    figures, ratios, rows = [], {}, []
    for name, measured in found.items():
        ratio = ratio_to(found, name, "native float32")
        collective, wire = name.split(",")[0].split()
        share = 0.5 if wire == "bfloat16" else 1.0
        sent = statistics.median(measured["sent_bytes"])
        counted = BETWEEN.get(collective, BETWEEN["ring"])(2, 2) * share * size
        rows.append(
            [
                name,
                f"{seconds_of(found, name) * 1e3:.0f} ms",
                f"{ratio:.3f}",
                f"{sent / 1e6:.2f} MB",
                f"{counted / 1e6:.2f} MB",
            ]
        )
        ratios[f"2x2_{name.replace(' ', '_')}"] = ratio
        if name in goals:
            figures.append(at_most(f"2 x 2, 16.8 MB: {name} / native", ratio, goals[name]))
        if collective != "native":
            off = abs(sent / counted - 1)
            figures.append(at_most(f"2 x 2: bytes of {name} off its formula", 100 * off, 3, " %"))
    figures.insert(
        1,
        Figure("2 x 2, 16.8 MB: torus in one piece / native", f"{ratios[_key(WHOLE)]:.3f}"),
    )
    head = ["2 nodes x 2 ranks, 16.8 MB", "median", "/ native", "a card sends", "by formula"]
    return figures, ratios, markdown_table(head, rows)


def _key(name: str) -> str:
    return f"2x2_{name.replace(' ', '_')}"


def of_4x2(
    found: dict[str, dict[str, Any]], costs: Costs
) -> tuple[list[Figure], dict[str, float], str]:
    """Figures, ratios and table of all sizes on 4 nodes of 2 ranks."""
    rows, hybrid_ratios, gains = [], [], []
    for size, measured in found.items():
        single = [f"{name} float32" for name in DENSE_WIRES]
        medians = {name: seconds_of(measured, name) for name in single}
        choices = costs.choices(tuple(DENSE_WIRES))
        chosen = min(choices, key=lambda choice: choice.curve.seconds(int(size))).collective
        best = min(medians.values())
        hybrid_ratios.append(medians[f"{chosen} float32"] / best)
        if int(size) <= SMALL_BYTES:
            rivals = min(medians["native float32"], medians["ring float32"])
            ours = min(v for n, v in medians.items() if n.split()[0] not in ("native", "ring"))
            gains.append(rivals / ours)
        cells = [f"**{v * 1e3:.2f}**" if v == best else f"{v * 1e3:.2f}" for v in medians.values()]
        rows.append([f"{int(size):,}", *cells, chosen])
    largest = found[str(max(map(int, found)))]
    torus = ratio_to(largest, "torus float32", "native float32")
    figures = [
        at_most("4 x 2, 16 MiB: torus / native", torus, 0.93),
        at_most("4 x 2: hybrid / best single algorithm, worst size", max(hybrid_ratios), 1.10),
        at_least("4 x 2, up to 16 KiB: native or ring / best other, least", min(gains), 2.0, "x"),
    ]
    ratios = {"4x2_torus": torus, "4x2_hybrid": max(hybrid_ratios), "4x2_small": min(gains)}
    head = ["4 nodes x 2 ranks, bytes", *(f"{name}, ms" for name in DENSE_WIRES), "hybrid takes"]
    return figures, ratios, markdown_table(head, rows)


def measure(arguments: argparse.Namespace) -> None:
    """Runs the jobs and prints figures and tables."""
    quick: bool = arguments.quick
    folder: Path = arguments.folder
    sizes = [2**12, 2**18] if quick else SIZES
    seconds = 10.0 if quick else arguments.probe_seconds
    spec = result_of(folder, 4, stage="probe", sizes=sizes, seconds=seconds, ways=FLOAT32)
    costs = Costs.of(ClusterSpec.from_json(json.dumps(spec)))
    turns = 2 if quick else arguments.turns
    small = {"stage": "measure", "turns": turns, "repetitions": 5}
    large = result_of(folder, 2, sizes=[2**20 if quick else LARGE_BYTES], ways=WAYS_2X2, **small)
    each = result_of(folder, 4, sizes=sizes, ways=FLOAT32, **small)
    figures_2, ratios_2, table_2 = of_2x2(int(next(iter(large))), next(iter(large.values())))
    figures_4, ratios_4, table_4 = of_4x2(each, costs)
    print(f"{table_2}\n\n{table_4}", flush=True)
    finish(
        "lab_collectives",
        figures_2 + figures_4,
        ratios_2 | ratios_4,
        quick=quick,
        turns=turns,
        tables=[table_2, table_4],
    )


def main() -> int:
    """Returns 1 when a job failed."""
    parser = options(__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--probe-seconds", type=float, default=240.0)
    parser.add_argument("--folder", type=Path, default=Path("runs/lab_collectives"))
    try:
        measure(parser.parse_args())
    except (RuntimeError, SlipstreamError) as error:
        print(f"lab_collectives: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
