"""One rank of a run that `slipstream train` started, as `python -m` this module FILE.

The file holds what the launcher decided. A rank prints nothing on standard output, leaves its
error where the launcher looks for it, and does not outlive the launcher.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from slipstream.cluster import Cluster
from slipstream.errors import LaunchError
from slipstream.train.launch.failure import write_error
from slipstream.train.launch.leaving import leave
from slipstream.train.recipe import Recipe, parse_recipe

TRAINING = "slipstream.train.loop:run_training"


class Training(Protocol):
    """What trains on one rank, from start or checkpoint to the end; gives the run's summary."""

    def __call__(
        self, recipe: Recipe, *, run_folder: Path, cluster: Cluster, resume: Path | None
    ) -> dict[str, Any]: ...


_LOOK_EVERY_SECONDS = 0.5


@dataclass(frozen=True)
class Orders:
    """What every rank is told: the recipe as TOML, its folder, checkpoint, cluster, and launcher.

    ``task`` is ``module:function``, called as ``run_training`` is.
    """

    recipe: str
    run_folder: str
    resume: str | None
    ranks_per_node: tuple[int, ...]
    logs: str
    launcher_pid: int
    grace_seconds: float
    task: str = TRAINING

    def save(self, path: Path) -> None:
        """Write them as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Orders:
        """Read what `save` wrote."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**fields, "ranks_per_node": tuple(fields["ranks_per_node"])})


def main(arguments: list[str]) -> int:
    """Run this rank to its end; 0 on success. A failing rank leaves the process at once."""
    orders = Orders.load(Path(arguments[0]))
    follow_launcher(orders.launcher_pid, orders.grace_seconds, Path(arguments[0]).parent)
    signal.signal(signal.SIGHUP, _as_sigterm)
    try:
        redirect_output(int(os.environ["RANK"]), Path(orders.logs))
        run(orders)
    except Exception as error:
        # Another rank's failure makes the launcher end this one: not before it has had its say.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        write_error(error)
        clean_up_after(orders.launcher_pid, Path(arguments[0]).parent)
        sys.stderr.flush()
        # Threads that still wait for a peer would keep a failed rank, and so the job, alive.
        os._exit(1)
    return 0


def log_file(logs: Path, rank: int) -> Path:
    """Where a rank other than 0 prints."""
    return logs / f"rank-{rank}.log"


def redirect_output(rank: int, logs: Path) -> None:
    """Send what this process prints to standard error on rank 0, else to the rank's log.

    Standard output belongs to the launcher's summary, and the terminal to rank 0's display,
    whatever libraries print. Raises LaunchError where the log cannot be opened.
    """
    if rank:
        path = log_file(logs, rank)
        try:
            log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as error:
            raise LaunchError(
                f"{path} cannot be written ({error.strerror or error}): free space or fix the"
                " permissions there"
            ) from error
        os.dup2(log, 2)
        os.close(log)
    os.dup2(2, 1)


def run(orders: Orders) -> None:
    """Call the task that the orders name."""
    call_task(
        orders.task,
        parse_recipe(orders.recipe, f"recipe of {orders.run_folder}"),
        run_folder=Path(orders.run_folder),
        cluster=Cluster(orders.ranks_per_node),
        resume=Path(orders.resume) if orders.resume else None,
    )


def call_task(
    task: str, recipe: Recipe, *, run_folder: Path, cluster: Cluster, resume: Path | None
) -> dict[str, Any]:
    """The summary that ``task`` (``module:function``) gives on this rank."""
    module, _, function = task.partition(":")
    run_training: Training = getattr(import_module(module), function)
    return run_training(recipe, run_folder=run_folder, cluster=cluster, resume=resume)


def follow_launcher(launcher_pid: int, grace_seconds: float, scratch: Path) -> None:
    """End this process, by SIGTERM and after the grace time by SIGKILL, once the launcher is gone.

    A launcher that is killed outright cannot tell its ranks; a thread looks for it instead.
    """

    def look() -> None:
        pause = threading.Event()
        while os.getppid() == launcher_pid:
            pause.wait(_LOOK_EVERY_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        pause.wait(grace_seconds)
        clean_up_after(launcher_pid, scratch)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=look, name="slipstream-launcher-watch", daemon=True).start()


def clean_up_after(launcher_pid: int, scratch: Path) -> None:
    """Remove the launcher's temporary folder if it was killed and cannot do so itself."""
    if os.getppid() != launcher_pid:
        shutil.rmtree(scratch, ignore_errors=True)


def _as_sigterm(signal_number: int, frame: FrameType | None) -> None:
    """A closed terminal asks for the same orderly end as SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
