"""Ranks on this machine, started and watched by torch.distributed's elastic launcher.

Nodes are logical here: all ranks are processes of this machine, meeting on a free port. When one
rank fails the others are ended, and its own sentence is raised once. SIGTERM and Ctrl-C go on to
the ranks, which have the recipe's grace time to save; a killed launcher takes its ranks with it.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from slipstream.cluster import Cluster
from slipstream.errors import LaunchError, TrainingStopped
from slipstream.train.launch.failure import RankEnd, as_error, read_error, root_cause
from slipstream.train.launch.guards import (
    FORWARDED_SIGNALS,
    ErrorFiles,
    handlers_restored,
    late_ranks_killed,
    no_rank_left,
    quiet_launcher,
    refuse_too_many,
)
from slipstream.train.launch.interruption import Interrupted
from slipstream.train.launch.scratch import temporary_files
from slipstream.train.launch.worker import TRAINING, Orders, log_file
from slipstream.train.recipe import Recipe

LOGS = "logs"


def launch(
    recipe: Recipe,
    *,
    run_folder: Path,
    cluster: Cluster,
    resume: Path | None = None,
    task: str = TRAINING,
) -> None:
    """Run ``task`` on every rank of ``cluster``, as processes of this machine, to their end.

    Rank 0 writes to this process's standard error, the others to ``run_folder/logs``. Raises the
    error of the rank that failed first, RankFailure when that one ended without a word, LaunchError
    when ranks cannot be started, and Interrupted after a signal; RecipeError, before any starts,
    for more ranks than this machine's memory can hold. No rank is alive when this returns or
    raises.
    """
    refuse_too_many(cluster.world_size)
    logs = run_folder / LOGS
    _make(logs)
    with ExitStack() as stack:
        with temporary_files():
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-"))
            files = ErrorFiles(Path(scratch))
            orders = Path(scratch) / "orders.json"
            Orders(
                recipe=recipe.to_toml(),
                run_folder=str(run_folder),
                resume=str(resume) if resume else None,
                ranks_per_node=cluster.ranks_per_node,
                logs=str(logs),
                launcher_pid=os.getpid(),
                grace_seconds=recipe.checkpoint.grace_seconds,
                task=task,
            ).save(orders)
        config = _config(cluster.world_size, recipe, files)
        command = ("-P", "-m", "slipstream.train.launch.worker", str(orders))
        try:
            with (
                quiet_launcher(),
                handlers_restored(),
                no_rank_left(),
                late_ranks_killed(files, cluster.world_size),
            ):
                elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            _raise_for(_ends(error, files, cluster.world_size), logs, cluster.world_size)
        except SignalException as error:
            said = _last_word(files, cluster.world_size)
            raise Interrupted(
                error.sigval, said or f"{error.sigval.name} ended training."
            ) from error
        except RendezvousError as error:
            raise LaunchError(f"ranks could not meet on this machine: {error}") from error
        finally:
            _remove_empty(logs)


def _config(world_size: int, recipe: Recipe, files: LogsSpecs) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        logs_specs=files,
        run_id=uuid.uuid4().hex,
        role="rank",
        rdzv_backend="c10d",
        # Port 0: the system picks a free one, so two jobs on one machine never collide.
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle=",".join(FORWARDED_SIGNALS),
        shutdown_timeout=math.ceil(recipe.checkpoint.grace_seconds),
    )


def _make(logs: Path) -> None:
    try:
        logs.mkdir(exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"{logs}, the folder of the ranks' logs, cannot be made ({error.strerror or error}):"
            " free space or fix the permissions there"
        ) from error


def _remove_empty(logs: Path) -> None:
    """Leave only logs in which a rank said something."""
    with suppress(FileNotFoundError):  # a job that was refused this folder may tidy it as well
        for path in logs.glob("rank-*.log"):
            if path.stat().st_size == 0:
                path.unlink()
        if not any(logs.iterdir()):
            logs.rmdir()


def _last_word(files: ErrorFiles, world_size: int) -> str:
    """What a rank that stopped in order said about it; empty where none did."""
    records = [read_error(files.error_file(rank)) for rank in range(world_size)]
    said = [record.text for record in records if record and record.kind == TrainingStopped.__name__]
    return said[0] if said else ""


def _ends(failed: ChildFailedError, files: ErrorFiles, world_size: int) -> list[RankEnd]:
    """How ranks ended, first those that the launcher saw fail; those that left a word follow."""
    ends = [
        RankEnd(rank, failure.exitcode, read_error(files.error_file(rank)))
        for rank, failure in failed.failures.items()
    ]
    for rank in range(world_size):
        record = read_error(files.error_file(rank))
        if record is not None and rank not in failed.failures:
            ends.append(RankEnd(rank, 1, record))
    return ends


def _raise_for(ends: list[RankEnd], logs: Path, world_size: int) -> NoReturn:
    """Raise the error of the rank that failed first; a defect's traceback goes to stderr."""
    cause, error = root_cause(ends), as_error(ends, num_ranks=world_size)
    if cause.record is not None:
        sys.stderr.write(cause.record.traceback)
        raise error from None
    log = log_file(logs, cause.rank)
    if log.is_file() and log.stat().st_size:
        raise type(error)(f"{error} Its last words are in {log}") from None
    raise error from None
