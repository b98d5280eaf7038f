"""Ranks started through the elastic launcher: told alike, ended together, reported once.

The ranks run functions of `rank_tasks`, which import no torch, so that they start at once.
"""

import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

import rank_tasks
from slipstream.cluster import Cluster
from slipstream.errors import DataError, LaunchError, RankFailure
from slipstream.train.launch.local import launch
from slipstream.train.recipe import Recipe, load_recipe

pytestmark = pytest.mark.processes

FOLDER_OF_TASKS = Path(rank_tasks.__file__).parent
WAIT_SECONDS = 60.0


@pytest.fixture(autouse=True)
def ranks_find_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(FOLDER_OF_TASKS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("digits", ["checkpoint.grace_seconds=20"])


def run(task: str, recipe: Recipe, folder: Path, *nodes: int) -> None:
    launch(recipe, run_folder=folder, cluster=Cluster(nodes or (2,)), task=f"rank_tasks:{task}")


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.02)


def pids(folder: Path, ranks: int = 2) -> list[int]:
    """The process of each rank, as soon as all have said so."""
    files = [folder / f"pid-{rank}" for rank in range(ranks)]
    until(lambda: all(path.exists() and path.read_text() for path in files), "ranks")
    return [int(path.read_text()) for path in files]


def alive(pid: int) -> bool:
    return bool(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)


def test_every_rank_is_told_the_same(
    tmp_path: Path, recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    run("report", recipe, tmp_path, 2, 1)
    told = [json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in range(3)]
    for rank, one in enumerate(told):
        assert one["recipe"] == recipe.to_toml()
        assert one["cluster"] == [2, 1]
        assert one["resume"] == "None"
        assert one["environment"]["RANK"] == one["environment"]["LOCAL_RANK"] == str(rank)
        assert one["environment"]["WORLD_SIZE"] == "3"
    assert len({one["environment"]["MASTER_PORT"] for one in told}) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "chatter of rank 0\n"
    log = (tmp_path / "logs/rank-1.log").read_text()
    assert sorted(log.splitlines()) == ["a warning of rank 1", "chatter of rank 1"]


def test_a_single_rank_is_launched_too(tmp_path: Path, recipe: Recipe) -> None:
    run("report", recipe, tmp_path, 1)
    told = json.loads((tmp_path / "told-0.json").read_text())
    assert told["environment"]["WORLD_SIZE"] == "1"
    assert not (tmp_path / "logs").exists()


def test_the_cause_is_raised_once_and_without_noise(
    tmp_path: Path, recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match=r"^rank 1: train-images\.gz is damaged: fetch it again$"):
        run("rank_1_refuses", recipe, tmp_path)
    assert capfd.readouterr() == ("", "")


def test_what_every_rank_refuses_is_told_without_a_rank(tmp_path: Path, recipe: Recipe) -> None:
    with pytest.raises(DataError, match=r"^train-images\.gz is damaged: fetch it again$"):
        run("every_rank_refuses", recipe, tmp_path)


def test_a_defect_shows_its_traceback_once(
    tmp_path: Path, recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LaunchError, match=r"^rank 1 failed with ZeroDivisionError: unforeseen$"):
        run("rank_1_has_a_defect", recipe, tmp_path)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("Traceback") == 1
    assert "in rank_1_has_a_defect" in err


def test_a_killed_rank_ends_the_others_and_is_named(tmp_path: Path, recipe: Recipe) -> None:
    with pytest.raises(RankFailure, match=r"rank 1 was ended by SIGKILL.*rank-1\.log$"):
        run("rank_1_is_killed", recipe, tmp_path)
    assert (tmp_path / "logs/rank-1.log").read_text() == "last words\n"
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_frozen_rank_is_told_of_and_killed(tmp_path: Path, recipe: Recipe) -> None:
    with pytest.raises(RankFailure) as caught:
        run("rank_1_is_frozen", recipe, tmp_path)
    assert str(caught.value) == (
        "rank 0: rank 1 did not come to bucket 3 of step 7 within 10 s."
        " Rank 1 did not end when asked; killed it."
    )
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_rank_that_never_joins_is_named(tmp_path: Path, recipe: Recipe) -> None:
    with pytest.raises(RankFailure) as caught:
        run("joins_without_rank_1", recipe, tmp_path)
    assert str(caught.value) == (
        "rank 0: rank 1 did not come to the start of the job within 1 s (sync.timeout_seconds):"
        " it was not started, died or froze; see what it printed."
        " Rank 1 did not end when asked; killed it."
    )


def test_a_failed_rank_ends_although_a_thread_waits(tmp_path: Path, recipe: Recipe) -> None:
    with pytest.raises(DataError, match="rank 1 cannot read its data"):
        run("leaves_a_thread", recipe, tmp_path)


def test_signal_handlers_are_as_before(tmp_path: Path, recipe: Recipe) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    run("report", recipe, tmp_path)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.fixture(scope="module")
def forkserver() -> Iterator[ForkServerContext]:
    """Processes that have loaded torch already, from a server of this module's own.

    There is one fork server a process, and what it has loaded is decided by who starts it first.
    """
    server: Any = multiprocessing.forkserver._forkserver  # its stop is not in the stubs
    server._stop()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["slipstream.train.launch.local"])
    yield context
    server._stop()
    context.set_forkserver_preload([])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_goes_on_to_the_ranks_which_may_save(
    tmp_path: Path, forkserver: ForkServerContext, number: int
) -> None:
    launcher = start(forkserver, "waits", tmp_path, grace_seconds=30)
    ranks = pids(tmp_path)
    os.kill(launcher.pid or 0, number)
    launcher.join(WAIT_SECONDS)
    said = "training stopped after step 5; go on with --resume"
    assert (tmp_path / "ended").read_text() == f"{number:d} {said}"
    for rank in range(2):
        assert (tmp_path / f"saved-{rank}").read_text() == signal.Signals(number).name
    assert not any(alive(pid) for pid in ranks)


def test_a_rank_that_still_saves_is_not_hurried(
    tmp_path: Path, forkserver: ForkServerContext
) -> None:
    launcher = start(forkserver, "saves_slowly", tmp_path, grace_seconds=60)
    pids(tmp_path)
    launcher.terminate()
    launcher.join(WAIT_SECONDS)
    assert "training stopped after step 5" in (tmp_path / "ended").read_text()
    assert (tmp_path / "saved-0").exists()


def test_ranks_that_do_not_stop_are_killed_after_the_grace_time(
    tmp_path: Path, forkserver: ForkServerContext
) -> None:
    launcher = start(forkserver, "ignores_signals", tmp_path, grace_seconds=1)
    ranks = pids(tmp_path)
    launcher.terminate()
    launcher.join(WAIT_SECONDS)
    assert (tmp_path / "ended").read_text() == f"{signal.SIGTERM:d} SIGTERM ended training."
    assert not any(alive(pid) for pid in ranks)


def test_a_second_signal_does_not_wait(tmp_path: Path, forkserver: ForkServerContext) -> None:
    launcher = start(forkserver, "ignores_signals", tmp_path, grace_seconds=3600)
    ranks = pids(tmp_path)
    # Nothing tells when the launcher has begun to wait; a signal too many does no harm.
    while launcher.is_alive():
        launcher.terminate()
        launcher.join(0.3)
    assert not any(alive(pid) for pid in ranks)


@pytest.mark.parametrize("task", ["waits", "ignores_signals"])
def test_ranks_do_not_outlive_a_launcher_that_is_killed(
    tmp_path: Path, forkserver: ForkServerContext, task: str
) -> None:
    launcher = start(forkserver, task, tmp_path, grace_seconds=1)
    ranks = pids(tmp_path)
    launcher.kill()
    launcher.join(WAIT_SECONDS)
    until(lambda: not any(alive(pid) for pid in ranks), "the end of the ranks")
    assert list(tmp_path.glob("slipstream-*")) == []
    if task == "waits":
        assert (tmp_path / "saved-0").read_text() == "SIGTERM"


def test_two_jobs_at_once_meet_on_two_ports(tmp_path: Path, forkserver: ForkServerContext) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    jobs = [start(forkserver, "report", folder, grace_seconds=30) for folder in folders]
    for job, folder in zip(jobs, folders, strict=True):
        job.join(WAIT_SECONDS)
        assert (folder / "ended").read_text() == "well"
    told = [json.loads((folder / "told-0.json").read_text()) for folder in folders]
    ports = {one["environment"]["MASTER_PORT"] for one in told}
    assert len(ports) == 2


def start(
    context: ForkServerContext, task: str, folder: Path, grace_seconds: float
) -> ForkServerProcess:
    """A process that launches two ranks."""
    arguments = (task, folder, grace_seconds)
    launcher = context.Process(target=rank_tasks.launch_and_tell, args=arguments)
    launcher.start()
    return launcher
