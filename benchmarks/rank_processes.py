"""Runs one function on several ranks, each a real process on this machine, joined by Gloo."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

Measure = Callable[[int, int, dict[str, Any]], dict[str, Any]]


def run_processes(measure: Measure, num_ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Calls measure(rank, num_ranks, settings) on every rank; returns what rank 0's call returned.

    Every process has one thread and a default process group on Gloo. `measure` lives at the top
    level of a module, and rank 0's result must be expressible in JSON. The first rank that fails
    ends the others, and its error is raised here.
    """
    multiprocessing.set_forkserver_preload(["torch", "torchvision"])
    os.environ["OMP_NUM_THREADS"] = "1"  # before the server starts: OpenMP reads it once
    with tempfile.TemporaryDirectory(prefix="slipstream-benchmark-") as folder:
        start_processes(
            _rank_main,
            args=(measure, num_ranks, settings, folder),
            nprocs=num_ranks,
            start_method="forkserver",
        )
        result: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        return result


def _rank_main(
    rank: int, measure: Measure, num_ranks: int, settings: dict[str, Any], folder: str
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=(Path(folder) / "store").as_uri(),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=120),
    )
    try:
        result = measure(rank, num_ranks, settings)
        if rank == 0:
            (Path(folder) / "result.json").write_text(json.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()
