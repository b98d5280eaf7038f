"""However a lab ends, nothing of it stays; and where the kernel refuses, it says what to do."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from lab_process import QUICK, RunLab, lab_command, processes_with, python, wait_until
from lab_scripts import OBEDIENT, STUBBORN

pytestmark = pytest.mark.processes

LAB = ("--nodes", "2", "--per-node", "2", *QUICK)
RANKS = range(4)


def start(folder: Path, script: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts a lab whose ranks run `script`, and waits until each of them does."""
    lab = subprocess.Popen(
        lab_command(*LAB, *arguments, *python(script, folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: len(list(folder.glob("ready-*"))) == len(RANKS) or lab.poll() is not None)
    assert lab.poll() is None, lab.communicate()[1]
    return lab


def network() -> tuple[str, list[str]]:
    """This machine's interfaces, and names of namespaces that anybody may use."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    names = Path("/run/netns")
    return links, sorted(os.listdir(names)) if names.is_dir() else []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_goes_to_every_rank_and_nothing_stays(
    namespaces: None, place: Path, tmp_path: Path, number: signal.Signals
) -> None:
    before = network()
    with start(tmp_path, OBEDIENT) as lab:
        assert network() == before
        lab.send_signal(number)
        _, said = lab.communicate(timeout=30)
    assert lab.returncode == 128 + number, said
    assert [(tmp_path / f"told-{rank}").read_text() for rank in RANKS] == [number.name] * 4
    assert processes_with(str(tmp_path)) == []
    assert list(place.iterdir()) == []
    assert network() == before


def test_a_signal_during_the_check_ends_the_lab_before_its_command(
    namespaces: None, place: Path, tmp_path: Path
) -> None:
    slow = ("--nodes", "2", "--rate", "1mbit")
    command = lab_command(*slow, *python(OBEDIENT, tmp_path))
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as lab:
        wait_until(lambda: list(place.glob("run-*/hosts")))
        lab.send_signal(signal.SIGINT)
        _, said = lab.communicate(timeout=30)
    assert lab.returncode == 128 + signal.SIGINT
    assert said == "slipstream: stopped by SIGINT, before the command\n"
    assert list(tmp_path.glob("ready-*")) == list(place.iterdir()) == []


def test_a_second_signal_kills_ranks_that_ignore_it(
    namespaces: None, place: Path, tmp_path: Path
) -> None:
    with start(tmp_path, STUBBORN) as lab:
        lab.send_signal(signal.SIGINT)
        wait_until(lambda: len(list(tmp_path.glob("told-*"))) == len(RANKS))
        lab.send_signal(signal.SIGINT)
        _, said = lab.communicate(timeout=30)
    assert lab.returncode == 128 + signal.SIGINT, said
    assert processes_with(str(tmp_path)) == []
    assert list(place.iterdir()) == []


def test_ranks_that_ignore_a_signal_are_killed_after_the_grace_time(
    namespaces: None, place: Path, tmp_path: Path
) -> None:
    with start(tmp_path, STUBBORN, "--grace", "200ms") as lab:
        lab.send_signal(signal.SIGTERM)
        _, said = lab.communicate(timeout=30)
    assert lab.returncode == 128 + signal.SIGTERM, said
    assert processes_with(str(tmp_path)) == []


def test_a_killed_lab_takes_all_along_and_the_next_removes_its_folder(
    lab: RunLab, place: Path, tmp_path: Path
) -> None:
    before = network()
    killed_folder, alive_folder = tmp_path / "killed", tmp_path / "alive"
    killed_folder.mkdir()
    alive_folder.mkdir()
    with start(killed_folder, STUBBORN) as killed, start(alive_folder, OBEDIENT) as alive:
        killed.kill()
        killed.wait(30)
        folders = {path for path in place.iterdir() if path.is_dir()}
        assert len(folders) == 2
        wait_until(lambda: not processes_with(str(killed_folder)))
        assert processes_with(str(alive_folder))
        assert lab("--nodes", "1", *QUICK, "--", "true").exit_code == 0
        (left,) = [path for path in place.iterdir() if path.is_dir()]
        assert left in folders
        alive.terminate()
        assert alive.wait(30) == 128 + signal.SIGTERM
    assert list(place.iterdir()) == []
    assert network() == before


def test_a_killed_inner_side_is_an_error_and_takes_all_along(
    namespaces: None, place: Path, tmp_path: Path
) -> None:
    with start(tmp_path, STUBBORN) as lab:
        children = Path(f"/proc/{lab.pid}/task/{lab.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        _, said = lab.communicate(timeout=30)
    assert lab.returncode == 1
    assert "slipstream: the lab itself broke down (exit code -9)" in said
    wait_until(lambda: not processes_with(str(tmp_path)))
    assert list(place.iterdir()) == []


def test_a_user_without_rights_has_a_lab_in_a_user_namespace(lab: RunLab, tmp_path: Path) -> None:
    prefix: tuple[str, ...] = ()
    if os.geteuid() == 0:
        prefix = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
        if subprocess.run([*prefix, "true"]).returncode != 0:
            pytest.skip("this machine allows no user namespaces")
    script = "import pathlib, sys; pathlib.Path(sys.argv[1], 'mine').touch()"
    run = lab("--nodes", "2", *QUICK, *python(script, tmp_path), prefix=prefix)
    assert run.exit_code == 0, run.stderr
    assert (tmp_path / "mine").stat().st_uid == os.geteuid()


def test_a_kernel_that_refuses_namespaces_is_told_with_the_way_out(lab: RunLab) -> None:
    prefix = ("unshare", "--user", "--map-root-user", "sh", "-c")
    forbid = 'echo 0 >/proc/sys/user/max_net_namespaces && exec "$0" "$@"'
    if subprocess.run([*prefix, forbid, "true"]).returncode != 0:
        pytest.skip("this machine allows no user namespaces")
    run = lab("--nodes", "2", *QUICK, "--", "true", prefix=(*prefix, forbid))
    assert run.exit_code == 1
    assert run.stderr.startswith("slipstream: the kernel refuses namespaces")
    assert "sysctl user.max_net_namespaces" in run.stderr


def test_a_kernel_without_the_token_bucket_is_told_by_its_option(
    lab: RunLab, place: Path, tmp_path: Path
) -> None:
    fake = tmp_path / "tc"
    fake.write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2\nexit 2\n")
    fake.chmod(0o755)
    run = lab("--nodes", "2", *QUICK, "--", "true", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert run.exit_code == 1
    assert "lacks the token bucket filter (CONFIG_NET_SCH_TBF)" in run.stderr
    assert "Specified qdisc kind is unknown" in run.stderr
    assert processes_with(str(place)) == []
