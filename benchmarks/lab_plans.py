"""Plans on slow links: `auto`, every planner and torch DDP in turns; predicted against measured.

Each row of the table is a model on an emulated cluster (`slipstream lab`): 4 nodes of 1 rank,
links of 0.2, 0.5, 1 and 2 Gbit/s. Compute is slept through as the shipped traces of ResNet-50,
VGG-16 and BERT-Base say it, with their tensors scaled to 20 MB together (one row: ResNet-50 at its
own 102 MB); one row computes really, torchvision's ResNet-18 on 8 images of 64x64 a rank, which is
CPU-bound on a machine with fewer cores than ranks.

Two runs a cluster. The earlier one probes collectives and profiles steps without communication;
plans and predictions come from its cluster.json and trace.json. In the measuring run, another job
on another lab, all variants of a row train the same parameters over the same process group and take
turns, each turn in a random order that is the same on all ranks. A turn: a barrier, a step that is
not counted, then the step that is: zero_grad, forward, loss, backward, SGD's update, as long as on
the slowest rank. Below 1 Gbit/s and in the last two rows, where steps are long, only pipelined
plans get the uncounted step, for their steps begin in the one before. Figures are medians over
turns; intervals are bootstraps over the turns' ratios.

DDP: gradient_as_bucket_view=True, forward_sync_buffers=False, after its bucket rebuild, at its
default (a first bucket of 1 MiB, then 25), at explicit caps of 1 to 100 MiB, at 25 MiB scaled like
the list, and with the sizes of auto's plan as bucket_cap_mb_list. Variants whose buckets are the
same are measured once. `auto` is GradientSync(model, plan="auto"), which profiles, probes and plans
by itself in the measuring run; `fixed` has buckets of 1 MiB, then 5 MiB.

Each row is a file in --folder as soon as it is measured; --resume keeps what is there. --paper runs
the comparison of the MG-WFBP paper instead: WFBP, single, MG-WFBP, optimal on 8 nodes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import finish, options
from lab_evaluation import evaluate, tables
from lab_rows import PAPER_ROWS, QUICK_ROW, RATES, ROWS, Row, RunFolder, groups
from slipstream.errors import SlipstreamError
from slipstream.lab import LabSettings, parse_rate, run_lab

CONTEST = Path(__file__).with_name("lab_contest.py")
LIMIT_SECONDS = 3600.0


def run_stage(stage: str, rows: Sequence[Row], folder: RunFolder, settings: dict[str, Any]) -> bool:
    """One job on one lab: the earlier or the measuring run of rows that share a cluster.

    Returns whether the lab warned that figures may be CPU-bound. Raises RuntimeError when the job
    failed, LabError when there is no lab.
    """
    orders = {
        "stage": stage,
        "folder": str(folder.path.absolute()),
        "rows": [asdict(row) for row in rows],
        "settings": settings,
    }
    path = folder.path / f"orders-{stage}.json"
    folder.write(path, orders)
    result = run_lab(
        LabSettings(
            nodes=rows[0].nodes,
            ranks_per_node=1,
            rate_bits_per_second=parse_rate(rows[0].rate),
            command=(str(CONTEST), str(path)),
            limit_seconds=LIMIT_SECONDS,
            grace_seconds=20.0,
            check=not settings["quick"],
        )
    )
    if result.exit_code:
        raise RuntimeError(
            f"the {stage} run on {rows[0].rate} ended with exit code {result.exit_code}."
        )
    return bool(result.check and result.check.cpu_bound)


def run_rows(rows: Sequence[Row], folder: RunFolder, settings: dict[str, Any]) -> None:
    """Measures the rows that the folder lacks, cluster by cluster."""
    for (nodes, rate), members in groups(rows).items():
        missing = [row for row in members if not folder.result(row).exists()]
        if not missing:
            continue
        print(f"{nodes} nodes at {rate}: {', '.join(row.workload for row in missing)}", flush=True)
        if not all(folder.has_earlier_run(row) for row in missing):
            run_stage("earlier", missing, folder, settings)
        began = time.monotonic()
        cpu_bound = run_stage("measure", missing, folder, settings)
        print(f"  took {time.monotonic() - began:.0f} s", flush=True)
        for row in missing:
            found = json.loads(folder.result(row).read_text(encoding="utf-8"))
            folder.write(folder.result(row), found | {"lab_cpu_bound": cpu_bound})


def chosen_rows(arguments: argparse.Namespace) -> list[Row]:
    """The rows that were asked for. Raises ValueError when there are none."""
    if arguments.quick:
        return [QUICK_ROW]
    rows = [
        row
        for row in (PAPER_ROWS if arguments.paper else ROWS)
        if row.rate in arguments.rates
        and (not arguments.rows or any(row.key.startswith(name) for name in arguments.rows))
    ]
    if not rows:
        known = ", ".join(row.key for row in (*ROWS, *PAPER_ROWS))
        raise ValueError(f"no row is called so; there are {known}")
    return rows


def parsed() -> argparse.Namespace:
    """The options."""
    parser = options(__doc__)
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="rows whose names begin so")
    parser.add_argument("--rates", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--paper", action="store_true", help="the paper's comparison, 8 nodes")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--folder", type=Path, default=Path("runs/lab_plans"))
    parser.add_argument("--row-seconds", type=float, default=60.0, help="of turns, where they fit")
    parser.add_argument("--turns", type=int, nargs=2, default=(7, 15), metavar=("LEAST", "MOST"))
    parser.add_argument("--steps", type=int, default=1, help="counted steps in a turn")
    return parser.parse_args()


def main() -> int:
    """Runs the rows and prints figures and tables; returns 1 when a job failed."""
    arguments = parsed()
    try:
        rows = chosen_rows(arguments)
    except ValueError as error:
        print(f"lab_plans: {error}", file=sys.stderr)
        return 2
    folder = RunFolder(arguments.folder / "quick" if arguments.quick else arguments.folder)
    folder.path.mkdir(parents=True, exist_ok=True)
    if not arguments.resume:
        for row in rows:
            folder.forget(row)
    least, most = (2, 2) if arguments.quick else arguments.turns
    settings = {
        "row_seconds": arguments.row_seconds,
        "min_turns": least,
        "max_turns": most,
        "steps": arguments.steps,
        "quick": arguments.quick,
    }
    began = time.monotonic()
    try:
        run_rows(rows, folder, settings)
    except (RuntimeError, SlipstreamError) as error:
        print(f"lab_plans: {error} --resume goes on.", file=sys.stderr)
        return 1
    results = folder.results(rows)
    figures, ratios = evaluate(results)
    texts = tables(results)
    print("\n\n".join(texts), flush=True)
    finish(
        "lab_plans",
        figures,
        ratios,
        quick=arguments.quick,
        settings=settings,
        seconds=round(time.monotonic() - began),
        tables=texts,
        rows=results,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
