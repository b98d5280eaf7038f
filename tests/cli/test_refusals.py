"""What a stranger types: no traceback, one sentence that names it and the way out."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from closed import close_folder
from slipstream.cli.output import end_by_refusal
from slipstream.costs import ClusterSpec

TEN_GIGABIT = Path(__file__).parents[2] / "examples" / "clusters" / "10gbe.json"
QUESTION = ["--trace", "alexnet", "--cluster", str(TEN_GIGABIT)]
LONG = "n" * 300
DIGITS = "9" * 5000


@pytest.fixture
def slipstream(slipstream: Any) -> Any:
    """Runs the command line; standard error on one line."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code, out, error = slipstream(*arguments)
        return code, out, " ".join(error.split())

    return run


@pytest.mark.parametrize(
    ("command", "option", "name"),
    [
        ("plan", "--output", "plan.json"),
        ("simulate", "--plot", "plot.svg"),
        ("simulate", "--timeline", "timeline.json"),
    ],
)
def test_a_place_that_cannot_be_looked_at_is_named(
    slipstream: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    option: str,
    name: str,
) -> None:
    long = tmp_path / f"{LONG}{name}"
    code, out, err = slipstream(command, *QUESTION, option, long)
    assert (code, out) == (1, "")
    assert err.endswith(f"{name} cannot be written (File name too long); choose another {option}.")
    close_folder(monkeypatch, tmp_path)
    code, out, err = slipstream(command, *QUESTION, option, tmp_path / name)
    assert (code, out) == (1, "")
    said = f"{name} cannot be written (Permission denied); choose another {option}."
    assert err == f"slipstream: {tmp_path / said}"


def test_a_path_that_nobody_foresaw_is_named_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    closed = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/closed/place")
    with pytest.raises(SystemExit) as ended:
        end_by_refusal(closed)
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "slipstream: /closed/place cannot be used (Permission denied); name another path, or give"
        " this user the right to it\n"
    )
    missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "ours")
    with pytest.raises(FileNotFoundError):
        end_by_refusal(missing)


def test_a_report_of_a_name_that_is_too_long(slipstream: Any) -> None:
    code, out, err = slipstream("report", LONG)
    assert (code, out) == (1, "")
    assert "cannot be read (File name too long); name the folder that training printed" in err


def test_two_results_never_go_to_one_file(
    slipstream: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "w"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    for other in ("../w/p.svg", folder / "p.svg", "../link/p.svg"):
        arguments = ["--plot", "p.svg", "--timeline", other, "--overwrite"]
        code, out, err = slipstream("simulate", *QUESTION, *arguments)
        assert (code, out) == (2, "")
        assert "--plot and --timeline name one file, p.svg" in err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", DIGITS], "is no number of nodes from 1 to 1,048,576; write --nodes 4,16,64"),
        (["--planner", f"ddp:cap_bytes={DIGITS}"], "planner 'ddp' is too large"),
        (["--planner", "ddp:planner=3"], "no option 'planner'; it takes first_bytes, cap_bytes"),
        (["--planner", "ddp:gradients=3"], "no option 'gradients'; it takes first_bytes, cap_byt"),
        (["--planner", "optimal:trace=3"], "no option 'trace'; it takes no options of its own"),
        (["--planner", "mgwfbp:costs=3"], "Planner 'mgwfbp' has no option 'costs'; it takes vari"),
        (["--seed", DIGITS], "--seed"),
    ],
)
def test_numbers_and_options_that_there_are_not(
    slipstream: Any, arguments: list[str], words: str
) -> None:
    code, out, err = slipstream("simulate", *QUESTION, *arguments)
    assert code in (1, 2) and out == ""
    assert words in err and len(err) < 6000


@pytest.mark.parametrize("seconds", ["inf", "1e300"])
def test_a_probe_ends_within_a_month(slipstream: Any, seconds: str) -> None:
    code, _, err = slipstream("probe", "--seconds", seconds)
    assert code == 2
    assert "--seconds" in err and "2592000" in err


def test_one_node_is_not_called_nodes(
    slipstream: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = json.loads(TEN_GIGABIT.read_text())
    points = [[2**power, 1e-3 + 2**power * 1e-9] for power in range(10, 20)]
    cost = {"collective": "native", "points": points, "spread_seconds": [0.0] * len(points)}
    document |= {"nodes": 1, "ranks_per_node": 2, "note": "", "costs": [cost]}
    spec = ClusterSpec.from_json(json.dumps(document))
    monkeypatch.setattr("slipstream.cli.measuring.measure", lambda *_, **__: spec)
    code, out, _ = slipstream("probe", "--output", tmp_path / "cluster.json")
    assert code == 0
    assert out.splitlines()[0].startswith(f"{spec.backend} on 1 node, 2 ranks.")
