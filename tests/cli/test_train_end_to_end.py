"""`slipstream train` for real: ranks of its own, then as ranks of torchrun; export and resume."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from typer.testing import CliRunner

import slipstream
from slipstream.cli.main import app

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

KEYS = {
    "recipe",
    "world_size",
    "epochs",
    "steps",
    "test_accuracy",
    "train_seconds",
    "images_per_second",
    "exposed_communication_seconds",
    "peak_memory_bytes",
    "weights_sha256",
    "run_folder",
}


def call(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    package = str(Path(slipstream.__file__).parents[1])
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
    }
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": package},
        capture_output=True,
        text=True,
        timeout=280,
    )


def summary_of(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert isinstance(summary, dict)
    return summary


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of two epochs on ranks that the command started itself."""
    folder = tmp_path_factory.mktemp("launched")
    options = "digits --set train.epochs=2 --set sync.planner=ddp --run-folder mine --json"
    result = call("slipstream", "train", *options.split(), folder=folder)
    assert "Traceback" not in result.stderr
    return folder, summary_of(result)


def test_the_summary_tells_the_run(launched: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = launched
    assert summary.keys() >= KEYS
    assert (summary["recipe"], summary["world_size"], summary["epochs"]) == ("digits", 2, 2)
    assert summary["run_folder"] == str(folder / "mine")
    assert summary == json.loads((folder / "mine/summary.json").read_text())


def test_the_run_folder_holds_what_a_run_leaves(launched: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = launched
    names = {path.name for path in (folder / "mine").iterdir()}
    assert names >= {
        "recipe.toml",
        "plan.json",
        "metrics.jsonl",
        "checkpoints",
        "summary.json",
        "report.html",
        "environment.json",
    }


def test_weights_are_exported_as_they_were_saved(
    launched: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, _ = launched
    output = tmp_path / "weights.safetensors"
    command = ["export", str(folder / "mine"), "--output", str(output)]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert json.loads(result.stdout)["output"] == str(output)
    weights = load(output.read_bytes())  # not a map of a file that is about to be cut
    assert weights["stem.weight"].dtype == torch.float32
    content = output.read_bytes()
    again = CliRunner().invoke(app, command)
    assert "weights.safetensors exists and was not overwritten" in str(again.exception)
    assert output.read_bytes() == content
    output.write_text("old")
    assert CliRunner().invoke(app, [*command, "--overwrite"]).exit_code == 0
    assert torch.equal(load(output.read_bytes())["stem.weight"], weights["stem.weight"])


def test_torchrun_gives_the_same_bits(
    launched: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, own = launched
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    options = ["digits", "--set", "train.epochs=2", "--set", "sync.planner=ddp", "--json"]
    result = call(*torchrun, "slipstream", "train", *options, folder=tmp_path)
    joined = summary_of(result)
    assert joined["world_size"] == 2
    assert joined["weights_sha256"] == own["weights_sha256"]
    assert Path(joined["run_folder"]).parent == tmp_path / "runs"


def test_a_mistake_in_a_joined_job_names_the_rank_once(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("years of work")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    options = ("train", "digits", "--run-folder", "mine")
    result = call(*torchrun, "slipstream", *options, folder=tmp_path)
    assert result.returncode != 0
    assert "slipstream: rank 0: run folder" in result.stderr
    assert "exists and is not empty (thesis.tex); nothing was overwritten" in result.stderr
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
