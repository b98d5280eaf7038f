"""Ranks on this machine, started and watched by torch.distributed's elastic launcher.

Nodes are logical here: all ranks are processes of this machine, meeting on a free port. When one
rank fails the others are ended, and its own sentence is raised once. SIGTERM and Ctrl-C go on to
the ranks, which have the recipe's grace time to save; a killed launcher takes its ranks with it.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from slipstream.cluster import Cluster
from slipstream.errors import LaunchError
from slipstream.train.failure import ERROR_FILE_VARIABLE, RankEnd, as_error, read_error, root_cause
from slipstream.train.recipe import Recipe
from slipstream.train.worker import TRAINING, Orders, log_file

_FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP")
LOGS = "logs"


class Interrupted(Exception):
    """The launcher was told to stop by a signal, and its ranks have ended.

    Its text says what the ranks saved. Not a SlipstreamError: stopping is no failure.
    """

    def __init__(self, signal_number: int, text: str) -> None:
        super().__init__(text)
        self.signal_number = signal_number


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
    error of the rank that failed first, LaunchError when ranks cannot be started or end without a
    word, and Interrupted after a signal. No rank is alive when this returns or raises.
    """
    logs = run_folder / LOGS
    logs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="slipstream-") as scratch:
        files = _ErrorFiles(Path(scratch))
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
        command = ("-P", "-m", "slipstream.train.worker", str(orders))
        try:
            with _quiet_launcher(), _handlers_restored(), _no_rank_left():
                elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            _raise_for(error, logs)
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
        signals_to_handle=",".join(_FORWARDED),
        shutdown_timeout=math.ceil(recipe.checkpoint.grace_seconds),
    )


class _ErrorFiles(LogsSpecs):
    """Where each rank leaves its error; what it prints is the rank's own affair."""

    def __init__(self, scratch: Path) -> None:
        super().__init__()
        self._scratch = scratch

    @property
    def root_log_dir(self) -> str:
        return str(self._scratch)

    def error_file(self, rank: int) -> Path:
        """The file of one rank."""
        return self._scratch / f"error-{rank}.json"

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files of each local rank; tells each rank its error file through ``envs``."""
        error_files = {rank: str(self.error_file(rank)) for rank in envs}
        for rank, path in error_files.items():
            envs[rank][ERROR_FILE_VARIABLE] = path
        inherited = dict.fromkeys(envs, "")
        return LogsDest(stdouts=inherited, stderrs=inherited, error_files=error_files)


def _remove_empty(logs: Path) -> None:
    """Leave only logs in which a rank said something."""
    for path in logs.glob("rank-*.log"):
        if path.stat().st_size == 0:
            path.unlink()
    if not any(logs.iterdir()):
        logs.rmdir()


def _last_word(files: _ErrorFiles, world_size: int) -> str:
    """What a rank that stopped in order said about it; empty where none did."""
    records = [read_error(files.error_file(rank)) for rank in range(world_size)]
    said = [record.text for record in records if record and record.kind == "TrainingStopped"]
    return said[0] if said else ""


def _raise_for(failed: ChildFailedError, logs: Path) -> None:
    """Raise the error of the rank that failed first; a defect's traceback goes to stderr."""
    ends = [
        RankEnd(rank, failure.exitcode, read_error(Path(failure.error_file)))
        for rank, failure in failed.failures.items()
    ]
    cause = root_cause(ends)
    if cause.record is not None:
        sys.stderr.write(cause.record.traceback)
        raise as_error(ends) from None
    log = log_file(logs, cause.rank)
    if log.is_file() and log.stat().st_size:
        raise LaunchError(f"{as_error(ends)} Its last words are in {log}") from None
    raise as_error(ends) from None


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Silence the elastic launcher's own log: what it knows is raised as one sentence instead."""
    loggers = [
        logging.getLogger(name)
        for name in logging.root.manager.loggerDict
        if name.startswith("torch.distributed")
    ]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextmanager
def _handlers_restored() -> Iterator[None]:
    """Put back the signal handlers that the elastic launcher replaces and keeps."""
    before: dict[str, Callable[..., object] | int | None] = {
        name: signal.getsignal(getattr(signal, name)) for name in _FORWARDED
    }
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


@contextmanager
def _no_rank_left() -> Iterator[None]:
    """Kill what the launcher left, as after a second Ctrl-C during the grace time."""
    launcher = psutil.Process()
    before = set(launcher.children())
    try:
        yield
    finally:
        for child in set(launcher.children()) - before:
            child.kill()
            child.wait()
