"""Ranks as real processes, for what threads cannot show: torch's DDP, and the default group.

One fork server with torch loaded serves a whole test run, so that a rank starts in a fraction of a
second. Ranks meet in a file under the test's folder: no port is chosen by anyone.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

_PRELOADED = ["torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "slipstream.sync"]
_POLL_SECONDS = 0.02

Task = Callable[[int, int], dict[str, Any]]


def run_processes(
    task: Task, world_size: int, folder: Path, *, limit_seconds: float = 60.0
) -> list[dict[str, Any]]:
    """Runs `task(rank, world_size)` in that many processes; returns its results in rank order.

    task: a function of an importable module, called with the default process group (Gloo)
    initialised; its result holds tensors, numbers and texts. folder: empty, for this call alone.
    Raises AssertionError with the rank's traceback when one fails, or when time is up; no process
    is left behind.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    ranks = [
        context.Process(target=_rank, args=(task, rank, world_size, str(folder)), daemon=True)
        for rank in range(world_size)
    ]
    try:
        for process in ranks:
            process.start()
        _join(ranks, folder, time.monotonic() + limit_seconds)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
    import torch

    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world_size)]


def _join(ranks: list[ForkServerProcess], folder: Path, deadline: float) -> None:
    while any(process.exitcode is None for process in ranks):
        assert not any(process.exitcode for process in ranks), _report(ranks, folder)
        assert time.monotonic() < deadline, "ranks hang"
        time.sleep(_POLL_SECONDS)
    assert not any(process.exitcode for process in ranks), _report(ranks, folder)


def _report(ranks: list[ForkServerProcess], folder: Path) -> str:
    """What the rank said that failed first: later errors are closed connections to it."""
    said = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    if said:
        return f"rank {said[0].stem} failed and said: {said[0].read_text()}"
    codes = {rank: process.exitcode for rank, process in enumerate(ranks) if process.exitcode}
    return f"ranks ended without a word, by exit code: {codes}"


def _rank(task: Task, rank: int, world_size: int, folder: str) -> None:
    """What a rank's process runs."""
    try:
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import FileStore

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        store = FileStore(f"{folder}/store", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        torch.save(task(rank, world_size), f"{folder}/{rank}.pt")
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"{rank}.error").write_text(traceback.format_exc())
        raise
