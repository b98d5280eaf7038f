"""The whole command with real ranks: stopped by a signal in an epoch's middle, then resumed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipstream.report.records import read_metrics
from slipstream.train.checkpoint import find_checkpoint, load

pytestmark = pytest.mark.processes

COMMAND = [sys.executable, "-c", "from slipstream.cli.main import main; main()", "train"]
EPOCHS = 20  # several times what passes between a signal and the end
NEW_RUN = ["digits", "--nodes", "2", "--per-node", "1", "--json"]
NEW_RUN += ["--set", "sync.planner=ddp"]  # bits are compared
NEW_RUN += ["--set", f"train.epochs={EPOCHS}", "--set", "train.evaluate_every_epochs=10"]
STEPS_PER_EPOCH = 1437 // 64


def finish(arguments: list[str]) -> dict[str, object]:
    """Runs the command to its end; its summary."""
    ended = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended.stderr
    summary: dict[str, object] = json.loads(ended.stdout)
    return summary


def stop_after_step(step: int, arguments: list[str], run_folder: Path) -> str:
    """Runs the command until its metrics show `step`, then sends SIGTERM; what it said."""
    metrics = run_folder / "metrics.jsonl"
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 100
    while not (metrics.exists() and any(r["step"] >= step for r in read_metrics(metrics))):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    return said


@pytest.mark.timeout(400)
def test_two_ranks_stopped_by_a_signal_go_on_bit_for_bit(tmp_path: Path) -> None:
    whole = finish([*NEW_RUN, "--run-folder", str(tmp_path / "whole")])
    run = tmp_path / "run"
    said = stop_after_step(30, [*NEW_RUN, "--run-folder", str(run)], run)
    stopped = load(find_checkpoint(run))
    assert f"after step {stopped.step}" in said
    assert said.count("--resume") == 1
    assert 30 <= stopped.step < EPOCHS * STEPS_PER_EPOCH
    resumed = finish(["--resume", str(run), "--json"])
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["test_accuracy"] == whole["test_accuracy"]
    assert resumed["steps"] == whole["steps"] == EPOCHS * STEPS_PER_EPOCH
    assert isinstance(whole["test_accuracy"], float) and whole["test_accuracy"] > 0.8
