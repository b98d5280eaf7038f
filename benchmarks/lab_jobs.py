"""Jobs of benchmarks on emulated clusters of nodes with two ranks each (no torch here)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipstream.lab import LabSettings, parse_rate, run_lab

RANKS_PER_NODE = 2


def run_job(script: Path, orders: dict[str, Any], path: Path, *, nodes: int, rate: str) -> None:
    """Starts `script` as every rank of a job on a lab of its own, with its orders in a file.

    Raises RuntimeError when the job failed, LabError when there is no lab.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(orders), encoding="utf-8")
    ended = run_lab(
        LabSettings(
            nodes=nodes,
            ranks_per_node=RANKS_PER_NODE,
            rate_bits_per_second=parse_rate(rate),
            command=(str(script), str(path.absolute())),
            limit_seconds=1800.0,
            grace_seconds=20.0,
        )
    )
    if ended.exit_code:
        raise RuntimeError(
            f"the {orders['stage']} job on {nodes} nodes ended with exit code {ended.exit_code}."
        )
