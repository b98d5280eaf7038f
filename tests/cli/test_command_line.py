"""The command line itself: help, mistakes, and what goes to which stream; nothing is trained."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream import __version__
from slipstream.cli.main import app, main
from slipstream.cli.output import print_summary, reserved_stdout
from slipstream.errors import DataError
from slipstream.train.launch.interruption import Interrupted
from slipstream.train.launch.request import Request

COMMANDS = ("train", "export", "report", "probe", "profile", "plan", "simulate")
SUMMARY = {
    "recipe": "digits",
    "world_size": 2,
    "test_accuracy": 0.98765,
    "train_seconds": 63.2,
    "images_per_second": 12345.6,
    "steps": 1200,
    "skipped_steps": 0,
    "run_folder": "runs/mine",
}


@pytest.fixture
def outside_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of ``slipstream ARGUMENTS``."""
    monkeypatch.setattr(sys, "argv", ["slipstream", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def stand_in(monkeypatch: pytest.MonkeyPatch, outcome: Exception | dict[str, Any]) -> list[Request]:
    """Let training end at once; the requests that it got."""
    requests: list[Request] = []

    def train_here(request: Request) -> dict[str, Any]:
        requests.append(request)
        print("chatter of a library")
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr("slipstream.train.launch.start.train_here", train_here)
    return requests


@pytest.mark.parametrize("arguments", [[], *([command] for command in COMMANDS)])
def test_every_command_has_help_with_an_example(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, [*arguments, "--help"])
    assert result.exit_code == 0
    assert "Example: slipstream" in result.output


def test_the_help_names_every_command_and_option() -> None:
    assert all(command in CliRunner().invoke(app, ["--help"]).output for command in COMMANDS)
    options = ("--set", "--nodes", "--per-node", "--run-folder", "--resume", "--json")
    output = CliRunner().invoke(app, ["train", "--help"]).output
    assert all(option in output for option in options)
    assert "[default: fashion]" in " ".join(output.split())


@pytest.mark.processes
def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from slipstream.cli.main import app; app(['--help'], standalone_mode=False);"
        "print(*sys.modules, file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    heavy = {"torch", "numpy", "pydantic", "torchvision", "matplotlib", "rich", "sklearn"}
    assert heavy.isdisjoint(result.stderr.split())


@pytest.mark.processes
def test_the_package_runs_as_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "slipstream", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == f"slipstream {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["train", "--nodez", "2"], "--nodes"),
        (["train", "--nodes", "0"], "greater than or equal to 1"),
        (["train", "--nodes", "two"], "valid integer"),
        (["export", "run"], "--output"),
    ],
)
def test_wrong_usage_is_refused_with_exit_code_2(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output


@pytest.mark.usefixtures("outside_of_jobs")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "fasion"], "there is no recipe or file fasion; did you mean fashion?"),
        (
            ["train", "digits", "--set", "train.epohcs=3"],
            "--set train.epohcs=3: there is no field train.epohcs; did you mean train.epochs?",
        ),
        (
            ["train", "--resume", "nowhere"],
            "nowhere is no run folder: it has no recipe.toml",
        ),
    ],
)
def test_a_mistake_is_one_sentence_on_stderr(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_main(monkeypatch, *arguments) == 1
    assert capfd.readouterr() == ("", f"slipstream: {sentence}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [["train", "fasion"], ["profile", "--set", "a=1"]])
def test_a_mistake_is_told_without_loading_torch(tmp_path: Path, arguments: list[str]) -> None:
    code = (
        "import sys; from slipstream.cli.main import main; sys.argv[1:] = "
        f"{arguments}\ntry:\n main()\nfinally:\n assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("slipstream: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        (">/dev/full", 1, "slipstream: the output cannot be written: No space left on device\n"),
        (">&-", 0, ""),
        ("2>&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        ("| true", 0, ""),
    ],
)
def test_standard_streams_may_be_full_closed_or_left(
    tmp_path: Path, shell: str, code: int, said: str
) -> None:
    (tmp_path / "recipe.toml").write_text("# all defaults\n")
    line = f"{sys.executable} -m slipstream report {tmp_path} --json {shell}"
    result = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (code, said)


@pytest.mark.processes
def test_characters_that_the_output_lacks_are_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "\N{GREEK SMALL LETTER MU}"
    folder.mkdir()
    (folder / "recipe.toml").write_text("# all defaults\n")
    result = subprocess.run(
        [sys.executable, "-m", "slipstream", "report", str(folder)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert "\\u03bc" in result.stdout


@pytest.mark.parametrize("command", ["export", "report"])
def test_a_folder_that_is_no_run_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    output = ["--output", "w.safetensors"] if command == "export" else []
    assert run_main(monkeypatch, command, "nowhere", *output) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("slipstream: ")
    assert "nowhere" in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("outside_of_jobs")
def test_options_become_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = stand_in(monkeypatch, SUMMARY)
    options = "digits --set train.epochs=3 --set run.folder=a --nodes 2 --per-node 3"
    run_main(monkeypatch, "train", *options.split(), "--run-folder", "b", "--resume", "c")
    overrides = ["train.epochs=3", "run.folder=a"]
    assert requests == [Request("digits", overrides, 2, 3, Path("b"), Path("c"))]


@pytest.mark.usefixtures("outside_of_jobs")
def test_json_is_alone_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, SUMMARY)
    assert run_main(monkeypatch, "train", "--json") == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == SUMMARY
    assert out.count("\n") == 1
    assert err == "chatter of a library\n"


@pytest.mark.usefixtures("outside_of_jobs")
def test_people_get_a_few_lines(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, SUMMARY)
    assert run_main(monkeypatch, "train") == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "test accuracy",
        "training time",
        "images/s",
        "ranks",
        "run folder",
    ]
    assert [line.split("  ")[-1].strip() for line in lines] == [
        "98.77%",
        "1 min 3 s",
        "12,346",
        "2",
        "runs/mine",
    ]


@pytest.mark.usefixtures("outside_of_jobs")
@pytest.mark.parametrize(
    ("outcome", "exit_code", "text"),
    [
        (DataError("rank 1: train.gz is damaged"), 1, "rank 1: train.gz is damaged"),
        (Interrupted(15, "Training stopped."), 143, "Training stopped."),
        (Interrupted(2, "Training stopped."), 130, "Training stopped."),
    ],
)
def test_the_end_of_ranks_has_an_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    outcome: Exception,
    exit_code: int,
    text: str,
) -> None:
    stand_in(monkeypatch, outcome)
    assert run_main(monkeypatch, "train", "--json") == exit_code
    out, err = capfd.readouterr()
    assert out == ""
    assert err == f"chatter of a library\nslipstream: {text}\n"


@pytest.mark.usefixtures("outside_of_jobs")
def test_ctrl_c_before_ranks_started_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(request: Request) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr("slipstream.train.launch.start.train_here", interrupted)
    assert run_main(monkeypatch, "train") == 130
    assert "Traceback" not in capfd.readouterr().err


def test_the_report_is_named_where_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.html").write_text("<html>")
    print_summary({**SUMMARY, "run_folder": str(tmp_path)}, sys.stdout)
    assert f"report         {tmp_path}/report.html\n" in capsys.readouterr().out


def test_skipped_steps_are_told_where_there_are_some(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary({**SUMMARY, "skipped_steps": 3}, sys.stdout)
    out = capsys.readouterr().out
    assert "skipped steps  3 of 1,200: gradients were infinite or NaN\n" in out


def test_reserved_stdout_holds_for_child_processes_and_ends(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ZeroDivisionError), reserved_stdout() as stdout:
        os.system("echo child")
        print("library")
        print("document", file=stdout)
        raise ZeroDivisionError
    print("after")
    sys.stdout.flush()
    out, err = capfd.readouterr()
    assert out == "document\nafter\n"
    assert sorted(err.split()) == ["child", "library"]
