"""A disk that is full while a run writes its record: it trains on, says it once, and tells the end.

The disk is made up: one function of the run's is refused, for files of some names.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from ranks import run_ranks_settled
from slipstream.data import Batch
from slipstream.errors import RunFolderError, TrainingStopped
from slipstream.report.records import read_metrics
from slipstream.train import ending, plans
from slipstream.train.checkpoint import find_checkpoint, load
from slipstream.train.distributed import Job
from slipstream.train.record.metrics import MetricsWriter
from training_runs import Request, job_of, run_all, run_one, tiny_recipe

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def refuse(monkeypatch: pytest.MonkeyPatch, module: object, names: Collection[str]) -> None:
    """Lets `module` find no space for files of `names`, as long as `names` holds them."""
    write: Callable[[Path, str], None] = module.write_text_atomic  # type: ignore[attr-defined]

    def write_or_refuse(path: Path, text: str) -> None:
        if path.name in names:
            raise FULL
        write(path, text)

    monkeypatch.setattr(module, "write_text_atomic", write_or_refuse)


def test_plans_are_written_once_there_is_space_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    names = {"plans.json"}
    refuse(monkeypatch, plans, names)

    def make_space(batch: Batch, job: Job, request: Request) -> Batch:
        if (batch.epoch, batch.step) == (1, 0):
            assert not (tmp_path / "plans.json").exists()
            names.clear()
        return batch

    summary = run_all(tiny_recipe(), 1, tmp_path, watch=make_space)[0]
    assert summary["steps"] == 10
    assert (tmp_path / "plans.json").exists() and (tmp_path / "plan.json").exists()
    said = capfd.readouterr().err
    assert said.count("plans.json cannot be written (No space left on device)") == 1


@pytest.mark.parametrize("name", ["plans.json", "plan.json"])
def test_plans_that_are_lost_end_the_run_on_every_rank_and_a_resume_finishes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with monkeypatch.context() as patch:
        refuse(patch, plans, {name})
        outcomes = run_ranks_settled(lambda rank: run_one(tiny_recipe(), job_of(rank), tmp_path), 2)
    assert isinstance(outcomes[0], RunFolderError)
    for outcome in outcomes:
        assert f"its weights are saved, but {tmp_path / name} cannot be written" in str(outcome)
        assert str(outcome).endswith(f"finish by: slipstream train --resume {tmp_path}")
    assert load(find_checkpoint(tmp_path)).step == 10
    summary = run_all(tiny_recipe(), 2, tmp_path, resume=tmp_path)[0]
    assert summary["steps"] == 10
    assert (tmp_path / name).exists() and (tmp_path / "report.html").exists()


def test_a_summary_that_finds_no_space_is_named_and_a_resume_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_all(tiny_recipe(), 1, tmp_path / "whole")[0]
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        refuse(patch, ending, {"summary.json"})
        with pytest.raises(RunFolderError, match=r"summary\.json cannot be written .* --resume"):
            run_all(tiny_recipe(), 1, run)
    again = run_all(tiny_recipe(), 1, run, resume=run)[0]
    assert again["weights_sha256"] == whole["weights_sha256"]
    assert again["test_accuracy"] == whole["test_accuracy"]


def no_report(run_folder: Path) -> Path:
    raise RunFolderError(f"{run_folder / 'report.html'} cannot be written: No space left.")


def test_a_report_that_finds_no_space_is_named_after_the_summary_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "build_report", no_report)
    with pytest.raises(RunFolderError, match=rf"finish by: slipstream report {tmp_path}$"):
        run_all(tiny_recipe(), 1, tmp_path)
    assert (tmp_path / "summary.json").exists()


def test_a_run_that_is_stopped_says_so_although_its_report_finds_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def stop_at_once(batch: Batch, job: Job, request: Request) -> Batch:
        request.requested = True
        return batch

    monkeypatch.setattr(ending, "build_report", no_report)
    with pytest.raises(TrainingStopped, match="--resume"):
        run_all(tiny_recipe(), 1, tmp_path, watch=stop_at_once)
    assert "report.html cannot be written" in capfd.readouterr().err


def test_metrics_that_are_lost_are_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Refusing:
        closed = False

        def write(self, data: bytes) -> int:
            raise FULL

        def close(self) -> None:
            self.closed = True

    def open_full(writer: MetricsWriter, path: Path, **options: object) -> None:
        opened(writer, path, **options)  # type: ignore[arg-type]
        writer._file.close()
        writer._file = Refusing()  # type: ignore[assignment]

    opened = MetricsWriter.__init__
    with monkeypatch.context() as patch:
        patch.setattr(MetricsWriter, "__init__", open_full)
        with pytest.raises(RunFolderError, match=r"saved, but .*metrics\.jsonl cannot be written"):
            run_all(tiny_recipe(), 1, tmp_path)
    assert capfd.readouterr().err.count("metrics.jsonl cannot be written") == 1
    assert run_all(tiny_recipe(), 1, tmp_path, resume=tmp_path)[0]["steps"] == 10
    assert [record["kind"] for record in read_metrics(tmp_path / "metrics.jsonl")] == ["resume"]
