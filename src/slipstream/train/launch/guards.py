"""What surrounds the elastic launcher: room, silence, signals, and no rank left behind."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from slipstream.errors import RecipeError, TrainingStopped
from slipstream.train.launch.failure import ERROR_FILE_VARIABLE, read_error
from slipstream.words import size

FORWARDED_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
_LOOK_EVERY_SECONDS = 0.5
_LATE_SECONDS = 5.0
_LEAST_RANK_BYTES = 200 * 2**20
"""What a rank holds once it has loaded its libraries, before it has a model or data."""


def refuse_too_many(world_size: int) -> None:
    """Raise RecipeError for ranks that cannot even start together in this machine's free memory.

    Otherwise the system would end processes by its own choice, other people's among them.
    """
    needed, free = world_size * _LEAST_RANK_BYTES, psutil.virtual_memory().available
    if world_size > 1 and needed > free:
        raise RecipeError(
            f"{world_size} ranks on this machine need {size(needed)} of memory at the least, and"
            f" {size(free)} are free: lower cluster.nodes or cluster.ranks_per_node, or start the"
            " ranks on several machines by torchrun"
        )


class ErrorFiles(LogsSpecs):
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


@contextmanager
def quiet_launcher() -> Iterator[None]:
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
def handlers_restored() -> Iterator[None]:
    """Put back the signal handlers that the elastic launcher replaces and keeps."""
    before: dict[str, Callable[..., object] | int | None] = {
        name: signal.getsignal(getattr(signal, name)) for name in FORWARDED_SIGNALS
    }
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


@contextmanager
def late_ranks_killed(files: ErrorFiles, world_size: int) -> Iterator[None]:
    """Kill ranks that are still there some seconds after another one reported a failure.

    A frozen rank ignores the elastic launcher's SIGTERM, and that one waits for half a minute.
    Ranks that stop in order are not hurried: one of them may be saving still.
    """
    over = threading.Event()
    launcher = psutil.Process()
    before = set(launcher.children())

    def has_failed(rank: int) -> bool:
        record = read_error(files.error_file(rank))
        return record is not None and record.kind != TrainingStopped.__name__

    def watch() -> None:
        while not any(has_failed(rank) for rank in range(world_size)):
            if over.wait(_LOOK_EVERY_SECONDS):
                return
        if over.wait(_LATE_SECONDS):
            return
        for child in set(launcher.children()) - before:
            # It may have ended by itself meanwhile.
            with suppress(psutil.NoSuchProcess):
                child.kill()

    watcher = threading.Thread(target=watch, name="slipstream-late-ranks", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


@contextmanager
def no_rank_left() -> Iterator[None]:
    """Kill what the launcher left, as after a second Ctrl-C during the grace time."""
    launcher = psutil.Process()
    before = set(launcher.children())
    try:
        yield
    finally:
        for child in set(launcher.children()) - before:
            child.kill()
            child.wait()
