"""What launched ranks do in the launcher's tests, instead of training; no torch in here."""

import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from slipstream.cluster import Cluster
from slipstream.errors import DataError, RankFailure, TrainingStopped
from slipstream.train.recipe import Recipe

RANK = int(os.environ.get("RANK", "0"))
FOREVER_SECONDS = 100
LATE_SECONDS = 7


def report(
    recipe: Recipe, *, run_folder: Path, cluster: Cluster, resume: Path | None
) -> dict[str, Any]:
    """Leave in the run folder what this rank was told; chatter on both streams."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    told = {
        "recipe": recipe.to_toml(),
        "cluster": cluster.ranks_per_node,
        "resume": str(resume),
        "environment": {name: os.environ[name] for name in names},
    }
    (run_folder / f"told-{RANK}.json").write_text(json.dumps(told))
    print(f"chatter of rank {RANK}")
    if RANK == 1:
        print("a warning of rank 1", file=sys.stderr)
    return {}


def _mark(run_folder: Path) -> None:
    (run_folder / f"pid-{RANK}").write_text(str(os.getpid()))


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def _sleep_for_ever() -> None:
    time.sleep(FOREVER_SECONDS)


def rank_1_refuses(recipe: Recipe, *, run_folder: Path, **_: object) -> None:
    """Rank 1 raises a user's error; rank 0 fails because its peer is gone, and earlier."""
    if RANK == 0:
        _wait_for(run_folder / "rank-1-ready")
        (run_folder / "rank-0-gone").touch()
        raise RankFailure("rank 1 did not come to bucket 3 of step 7 within 10 s")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is asked to end while it comes to its error
    (run_folder / "rank-1-ready").touch()
    _wait_for(run_folder / "rank-0-gone")
    raise DataError("train-images.gz is damaged: fetch it again")


def every_rank_refuses(recipe: Recipe, *, run_folder: Path, **_: object) -> None:
    """All ranks find the same fault; the launcher asks the later ones to end meanwhile."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _mark(run_folder)
    _wait_for(run_folder / f"pid-{1 - RANK}")
    raise DataError("train-images.gz is damaged: fetch it again")


def rank_1_has_a_defect(recipe: Recipe, **_: object) -> None:
    """Rank 1 raises what nobody foresaw; rank 0 would run on."""
    if RANK == 1:
        raise ZeroDivisionError("unforeseen")
    _sleep_for_ever()


def rank_1_is_killed(recipe: Recipe, *, run_folder: Path, **_: object) -> None:
    """Rank 1 dies without a word; rank 0 would run on."""
    _mark(run_folder)
    _wait_for(run_folder / "pid-0")
    if RANK == 1:
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    _sleep_for_ever()


def rank_1_is_frozen(recipe: Recipe, *, run_folder: Path, **_: object) -> None:
    """Rank 1 stops answering; rank 0 tells after its time limit."""
    _mark(run_folder)
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        _sleep_for_ever()
    _wait_for(run_folder / "pid-1")
    raise RankFailure("rank 1 did not come to bucket 3 of step 7 within 10 s")


def joins_without_rank_1(recipe: Recipe, *, cluster: Cluster, **_: object) -> None:
    """Rank 1 freezes before it joins the job; rank 0 waits for it there."""
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    from slipstream.train.distributed import join_job

    with join_job(cluster, timeout_seconds=1):
        raise AssertionError("rank 1 has come")


def saves_slowly(recipe: Recipe, *, run_folder: Path, **_: object) -> NoReturn:
    """On a signal rank 1 ends at once, rank 0 after a save that takes its time."""
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
    _mark(run_folder)
    while not stopped.is_set():
        time.sleep(0.02)
    if RANK == 0:
        time.sleep(LATE_SECONDS)
        (run_folder / "saved-0").touch()
    raise TrainingStopped("training stopped after step 5; go on with --resume")


def waits(recipe: Recipe, *, run_folder: Path, **_: object) -> NoReturn:
    """Run until a signal, then save and stop in order."""

    def stop(number: int, frame: object) -> None:
        (run_folder / f"saved-{RANK}").write_text(signal.Signals(number).name)
        raise TrainingStopped("training stopped after step 5; go on with --resume")

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    _mark(run_folder)
    _sleep_for_ever()
    raise AssertionError("no signal came")


def ignores_signals(recipe: Recipe, *, run_folder: Path, **_: object) -> None:
    """Run on, whatever is asked."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _mark(run_folder)
    _sleep_for_ever()


def leaves_a_thread(recipe: Recipe, **_: object) -> None:
    """Fail while a thread that never ends is alive, as one waiting for a peer is."""
    threading.Thread(target=_sleep_for_ever).start()
    if RANK == 1:
        raise DataError("rank 1 cannot read its data")


def launch_and_tell(task: str, folder: Path, grace_seconds: float) -> None:
    """Launch two ranks from a process of its own, and write how that ended to ``ended``."""
    from slipstream.train.launch.interruption import Interrupted
    from slipstream.train.launch.local import launch
    from slipstream.train.recipe import load_recipe

    recipe = load_recipe("digits", [f"checkpoint.grace_seconds={grace_seconds}"])
    tempfile.tempdir = str(folder)  # a test sees what is left
    try:
        launch(recipe, run_folder=folder, cluster=Cluster((2,)), task=f"rank_tasks:{task}")
        (folder / "ended").write_text("well")
    except Interrupted as error:
        (folder / "ended").write_text(f"{error.signal_number:d} {error}")
