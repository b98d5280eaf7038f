"""What the lab decides without a kernel: units, settings, the ranks' variables, leftovers."""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import LabError, SlipstreamError
from slipstream.lab import Cut, LabSettings, interface_bytes, parse_rate, parse_seconds, run_lab
from slipstream.lab import run as lab_run
from slipstream.lab.folder import lab_place, remove_leftovers, run_folder
from slipstream.lab.job import plan_starts, start_members
from slipstream.lab.network import Network, Node, Tools
from slipstream.lab.result import LabResult
from slipstream.lab.units import format_rate

TWO_BY_TWO = LabSettings(2, 2, 1e9, ("true",))
HERE = Node(-1, -1, -1)


def answered(folder: Path, output_to_stderr: bool) -> dict[str, Any]:
    """What the side inside the namespaces answers after a run in which nothing happened."""
    return LabResult(
        nodes=2,
        ranks_per_node=2,
        rate_bits_per_second=1e9,
        intra_rate_bits_per_second=None,
        exit_code=0,
        seconds=0.0,
        sent_bytes=(0, 0),
        received_bytes=(0, 0),
        check=None,
        intra_check=None,
        failure=None,
        cut_seconds=None,
    ).to_dict()


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("1gbit", 1e9),
        ("2.5Gbit", 2.5e9),
        ("100 mbit/s", 1e8),
        ("64kbit", 64e3),
        ("10Gbps", None),
        ("1000", None),
        ("-1gbit", None),
        ("1gb", None),
        ("nangbit", None),
        ("", None),
    ],
)
def test_rates_are_bits_with_a_unit(text: str, bits: float | None) -> None:
    if bits is None:
        with pytest.raises(LabError, match="1gbit"):
            parse_rate(text)
    else:
        assert parse_rate(text) == bits


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5s", 5),
        ("500ms", 0.5),
        ("2min", 120),
        ("1h", 3600),
        ("1.5", 1.5),
        ("720h", 30 * 86400),
        ("soon", None),
    ],
)
def test_times_have_a_unit_or_are_seconds(text: str, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(LabError, match="'soon' cannot be read"):
            parse_seconds(text)
    else:
        assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["720.1h", "9" * 20 + "s", "9" * 5000 + "min"])
def test_times_beyond_thirty_days_are_refused(text: str) -> None:
    with pytest.raises(LabError, match="is too long: the lab waits 30 days at most") as refused:
        parse_seconds(text)
    assert len(str(refused.value)) < 120


def test_rates_are_shown_with_three_digits() -> None:
    assert [format_rate(rate) for rate in (1e9, 99.2e6, 12_345.0)] == [
        "1 Gbit/s",
        "99.2 Mbit/s",
        "12.3 kbit/s",
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"nodes": 0}, "--nodes 0"),
        ({"nodes": 201}, "--nodes 201"),
        ({"ranks_per_node": 0}, "--per-node 0"),
        ({"ranks_per_node": 10_001}, "--per-node 10001: a node has 1 to 10,000 ranks"),
        ({"grace_seconds": -1.0}, "--grace: times go from 0 s to 30 days"),
        ({"grace_seconds": math.nan}, "--grace"),
        ({"limit_seconds": math.inf}, "--timeout: times"),
        ({"cut": Cut(1, 1e20)}, "--after: times"),
        ({"rate_bits_per_second": 1e3}, "--rate"),
        ({"rate_bits_per_second": 0.0}, "--rate"),
        ({"intra_rate_bits_per_second": 1e15}, "--intra-rate"),
        ({"command": ()}, "no command"),
        ({"cut": Cut(2, 1.0)}, "node0 to node1"),
    ],
)
def test_settings_that_no_lab_can_have_are_refused(changes: dict[str, object], named: str) -> None:
    fields: dict[str, object] = {
        "nodes": 2,
        "ranks_per_node": 1,
        "rate_bits_per_second": 1e9,
        "command": ("true",),
    }
    with pytest.raises(LabError, match=named):
        LabSettings(**{**fields, **changes})  # type: ignore[arg-type]


def test_settings_come_back_from_json_as_they_were() -> None:
    settings = LabSettings(3, 2, 1e8, ("a", "b c"), 1e9, Cut(1, 0.5), 3.0, 9.0, True, False)
    assert LabSettings.from_json(settings.to_json()) == settings


def test_every_rank_is_told_its_place_as_by_torchrun() -> None:
    inherited = {
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "3",
        "GLOO_SOCKET_IFNAME": "eth7",
        "SLURM_PROCID": "5",
        "PET_NNODES": "9",
        "RANK": "17",
    }
    starts = plan_starts(TWO_BY_TWO, inherited)
    places = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")
    assert [[start.environment[name] for name in places] for start in starts] == [
        ["0", "0", "0", "0"],
        ["1", "1", "0", "1"],
        ["2", "0", "1", "2"],
        ["3", "1", "1", "3"],
    ]
    assert [start.node for start in starts] == [0, 0, 1, 1]
    for start in starts:
        told = start.environment
        assert told["WORLD_SIZE"] == told["ROLE_WORLD_SIZE"] == "4"
        assert told["LOCAL_WORLD_SIZE"] == told["GROUP_WORLD_SIZE"] == "2"
        assert (told["MASTER_ADDR"], told["MASTER_PORT"]) == ("10.77.0.1", "29500")
        assert told["GLOO_SOCKET_IFNAME"] == "slip0"
        assert told["OMP_NUM_THREADS"] == "3"
        assert told["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        assert not {"SLURM_PROCID", "PET_NNODES"} & set(told)
    assert len({start.environment["TORCHELASTIC_RUN_ID"] for start in starts}) == 1


def test_torchrun_is_told_each_node_what_a_real_cluster_tells_it() -> None:
    settings = LabSettings(2, 3, 1e9, ("true", "--rank"), agents=True)
    starts = plan_starts(settings, {"PATH": "/usr/bin:/bin"})
    assert [(start.node, start.rank, start.name) for start in starts] == [
        (0, 0, "node0"),
        (1, 3, "node1"),
    ]
    second = starts[1].arguments
    assert second[:3] == (sys.executable, "-m", "torch.distributed.run")
    assert {"--nnodes=2", "--node-rank=1", "--nproc-per-node=3", "--rdzv-backend=static"} <= set(
        second
    )
    assert second[-3:] == ("--no-python", shutil.which("true", path="/usr/bin:/bin"), "--rank")


def test_commands_are_found_beside_this_python_first(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    names = {("python",): os.path.dirname(sys.executable), (str(script), "-x"): sys.executable}
    for command, beginning in names.items():
        start = plan_starts(LabSettings(1, 1, 1e9, command), {"PATH": "/usr/bin:/bin"})[0]
        assert start.arguments[0].startswith(beginning)
        assert start.arguments[-1] == command[-1] or command == ("python",)
    for program in ("no-such-program", "n" * 300 + ".py"):
        with pytest.raises(LabError, match="is neither on the PATH nor beside"):
            plan_starts(LabSettings(1, 1, 1e9, (program,)), {})
    with pytest.raises(LabError, match="no-such-program"):
        plan_starts(LabSettings(1, 1, 1e9, ("no-such-program",)), {})


def test_missing_iproute2_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    with pytest.raises(LabError, match=r"`ip` of iproute2.*apt-get install iproute2"):
        run_lab(TWO_BY_TWO)


@pytest.mark.parametrize("agents", [False, True])
def test_files_of_ranks_that_exist_are_refused_by_name(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, agents: bool
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path: f"/bin/{name}")
    monkeypatch.setattr(lab_run, "_run_inside", answered)
    settings = LabSettings(2, 2, 1e9, ("true",), agents=agents)
    mine = "node1.log" if agents else "rank-2.log"
    # Nobody writes these: rank 0 prints to the lab's own output.
    for other in ("node0.log", "rank-0.log", "rank-4.log", "notes.txt"):
        (tmp_path / other).write_text("kept")
    assert run_lab(settings, logs=tmp_path).exit_code == 0
    (tmp_path / mine).write_text("kept")
    with pytest.raises(SlipstreamError, match=rf"{mine} exists and was .* --logs, or .*--overwr"):
        run_lab(settings, logs=tmp_path)
    assert run_lab(settings, logs=tmp_path, overwrite=True).exit_code == 0


def test_a_file_of_a_rank_that_appears_late_stays(tmp_path: Path) -> None:
    (tmp_path / "rank-1.log").write_text("kept")
    starts = plan_starts(LabSettings(1, 2, 1e9, ("true",)), {"PATH": "/usr/bin:/bin"})[1:]
    with pytest.raises(LabError, match=r"rank-1\.log cannot be written \(File exists\)"):
        list(start_members(Network(Tools("", ""), (), HERE), starts, tmp_path, overwrite=False))
    assert (tmp_path / "rank-1.log").read_text() == "kept"


def test_counters_of_an_interface_that_is_not_there_are_refused() -> None:
    with pytest.raises(LabError, match="interface slip99"):
        interface_bytes("slip99")
    assert interface_bytes("lo").sent >= 0


def test_only_folders_of_dead_runs_are_removed(place: Path) -> None:
    assert lab_place() == place
    dead, alive, foreign = place / "run-1-dead", place / "run-2-alive", place / "run-3-foreign"
    for folder in (dead, alive, foreign):
        folder.mkdir()
        (folder / "hosts").write_text("")
    (place / "run-1-dead.lock").touch()
    with (place / "run-2-alive.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert remove_leftovers(place) == [dead]
        with run_folder(place) as mine:
            assert remove_leftovers(place) == []
            assert mine.is_dir()
    assert sorted(path.name for path in place.iterdir()) == [
        "run-2-alive",
        "run-2-alive.lock",
        "run-3-foreign",
    ]


def test_a_place_that_others_may_write_to_is_refused(place: Path) -> None:
    place.mkdir(mode=0o700)
    place.chmod(0o777)
    with pytest.raises(LabError, match=str(place)):
        lab_place()
    place.rmdir()
    place.write_text("no folder at all")
    with pytest.raises(LabError, match=f"{place} is not a folder of this user alone"):
        lab_place()
