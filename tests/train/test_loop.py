"""A whole run: what it leaves, that it repeats, resumes, and learns what one process learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ranks import run_ranks_settled
from slipstream.cluster import Cluster
from slipstream.data import Batch
from slipstream.errors import CheckpointError, RecipeError, TrainingStopped
from slipstream.report.records import of_kind, read_metrics
from slipstream.train import loop
from slipstream.train.build import deal
from slipstream.train.checkpoint import CheckpointWriter, find_checkpoint, load
from slipstream.train.checkpoint.store import Store
from slipstream.train.distributed import Job
from slipstream.train.loop import train
from slipstream.train.recipe import parse_recipe
from slipstream.train.stopping import StopAgreement
from training_runs import (
    Request,
    Watch,
    job_of,
    run_all,
    run_one,
    tiny_images,
    tiny_recipe,
)

WORLD_SIZES = [1, 2, 4]


def stop_in(step_to_stop: int, rank: int) -> Watch:
    """A watcher that asks one rank to stop when it takes the batch of a step (counted from 0)."""

    def watch(batch: Batch, job: Job, request: Request) -> Batch:
        if job.rank == rank and batch.epoch * 5 + batch.step == step_to_stop:
            request.requested = True
        return batch

    return watch


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_run_leaves_its_folder_and_its_summary(world_size: int, tmp_path: Path) -> None:
    summaries = run_all(tiny_recipe(), world_size, tmp_path)
    assert all(summary == summaries[0] for summary in summaries)
    assert json.loads((tmp_path / "summary.json").read_text()) == summaries[0]
    names = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert names == {
        "checkpoints",
        "environment.json",
        "metrics.jsonl",
        "plan.json",
        "plans.json",
        "recipe.toml",
        "report.html",
        "summary.json",
    }
    assert summaries[0]["steps"] == 10 and summaries[0]["epochs"] == 2
    assert summaries[0]["world_size"] == world_size
    assert summaries[0]["skipped_steps"] == 0
    assert summaries[0]["peak_memory_bytes"] > 2**20


def test_metrics_hold_each_step_window_each_epoch_and_each_evaluation(tmp_path: Path) -> None:
    run_all(tiny_recipe(), 2, tmp_path)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in of_kind(records, "step")] == [2, 4, 6, 8, 10]
    assert [r["epoch"] for r in of_kind(records, "step")] == [1, 1, 2, 2, 2]
    assert [r["step"] for r in of_kind(records, "epoch")] == [5, 10]
    evaluations = of_kind(records, "evaluation")
    assert [r["step"] for r in evaluations] == [5, 10]
    # 22 test images, each counted once: the accuracy is a multiple of 1 / 22.
    assert all(
        (r["test_accuracy"] * 22) == pytest.approx(round(r["test_accuracy"] * 22))
        for r in evaluations
    )
    spans = of_kind(records, "timeline")[0]["spans"]
    assert {span["row"] for span in spans} >= {"input", "forward", "backward", "wait", "update"}
    assert any(span["row"] == "communication" and span["bytes"] > 0 for span in spans)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("wait", ["backward", "update"])
def test_two_runs_with_one_seed_give_the_same_bits(
    world_size: int, wait: str, tmp_path: Path
) -> None:
    recipe = tiny_recipe(f"sync.wait={wait}", "train.clip_grad_norm=0.5")
    first = run_all(recipe, world_size, tmp_path / "first")
    second = run_all(recipe, world_size, tmp_path / "second")
    assert first[0]["weights_sha256"] == second[0]["weights_sha256"]


Whole = tuple[list[dict[str, Any]], Path]


@pytest.fixture(scope="module", params=WORLD_SIZES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """An uninterrupted run at each world size: its summaries and its folder, to be read only."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "whole"
    return run_all(tiny_recipe(), request.param, folder), folder


def test_another_seed_gives_other_bits(whole: Whole, tmp_path: Path) -> None:
    summaries, _ = whole
    other = run_all(tiny_recipe("train.seed=8"), len(summaries), tmp_path)
    assert other[0]["weights_sha256"] != summaries[0]["weights_sha256"]


@pytest.mark.parametrize("stop_step", [1, 2, 4, 6])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    whole: Whole, stop_step: int, tmp_path: Path
) -> None:
    recipe = tiny_recipe()
    summaries, folder = whole
    world_size = len(summaries)
    run = tmp_path / "run"
    with pytest.raises(TrainingStopped, match=f"--resume {run}"):
        run_all(recipe, world_size, run, watch=stop_in(stop_step, rank=world_size - 1))
    stopped = load(find_checkpoint(run))
    # Ranks agree in the background, so the end comes at most one step after the request.
    assert stop_step + 1 <= stopped.step <= stop_step + 2
    resumed = run_all(recipe, world_size, run, resume=run)
    assert resumed[0]["weights_sha256"] == summaries[0]["weights_sha256"]
    assert resumed[0]["test_accuracy"] == summaries[0]["test_accuracy"]
    assert resumed[0]["train_loss"] == pytest.approx(summaries[0]["train_loss"], rel=1e-12)
    assert final_state(run) == final_state(folder)


def test_a_resume_may_change_momentum_and_decay(whole: Whole, tmp_path: Path) -> None:
    """What the recipe says now counts, not what the checkpoint's optimizer had."""
    summaries, _ = whole
    run, world_size = tmp_path / "run", len(summaries)
    with pytest.raises(TrainingStopped):
        run_all(tiny_recipe(), world_size, run, watch=stop_in(2, rank=0))
    changed = tiny_recipe("optimizer.momentum=0.5", "optimizer.weight_decay=0.01")
    resumed = run_all(changed, world_size, run, resume=run)
    assert resumed[0]["weights_sha256"] != summaries[0]["weights_sha256"]
    options = [group.options for group in load(find_checkpoint(run)).optimizer_groups]
    assert [group["momentum"] for group in options] == [0.5, 0.5]
    assert [group["weight_decay"] for group in options] == [0.01, 0.0]


def test_a_run_that_stops_and_resumes_twice_has_no_gap_and_no_overlap(tmp_path: Path) -> None:
    recipe = tiny_recipe("run.log_every_steps=1")
    seen: list[tuple[int, int, list[int]]] = []

    def look(batch: Batch, job: Job, request: Request) -> Batch:
        seen.append((batch.epoch, batch.step, batch.labels.tolist()))
        request.requested = len(seen) in (3, 8)
        return batch

    for _ in range(2):
        with pytest.raises(TrainingStopped):
            run_all(recipe, 1, tmp_path, watch=look, resume=tmp_path if seen else None)
    run_all(recipe, 1, tmp_path, watch=look, resume=tmp_path)
    trained = [(epoch, step) for epoch, step, _ in seen]
    assert trained == [(epoch, step) for epoch in range(2) for step in range(5)]
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in of_kind(records, "step")] == list(range(1, 11))
    assert [r["step"] for r in of_kind(records, "resume")] == [3, 8]
    assert [r["step"] for r in of_kind(records, "evaluation")] == [5, 10]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Path:
        raise OSError("no space left on device")

    monkeypatch.setattr(Store, "publish", refuse)
    defaults = {**(CheckpointWriter.__init__.__kwdefaults__ or {}), "retry_delays_seconds": (0.0,)}
    monkeypatch.setattr(CheckpointWriter.__init__, "__kwdefaults__", defaults)


@pytest.mark.usefixtures("full_disk")
def test_a_stop_that_could_not_save_says_so_on_every_rank(tmp_path: Path) -> None:
    outcomes = run_ranks_settled(
        lambda rank: run_one(tiny_recipe(), job_of(rank), tmp_path, watch=stop_in(1, rank=0)), 2
    )
    for outcome in outcomes:
        assert isinstance(outcome, TrainingStopped)
        assert "no space left on device" in str(outcome)
        assert "--resume" not in str(outcome)


@pytest.mark.usefixtures("full_disk")
def test_a_run_whose_last_weights_are_lost_has_failed_on_every_rank(tmp_path: Path) -> None:
    outcomes = run_ranks_settled(lambda rank: run_one(tiny_recipe(), job_of(rank), tmp_path), 2)
    for outcome in outcomes:
        assert isinstance(outcome, CheckpointError)
        assert "last epoch, but the checkpoint of step 10 could not be written" in str(outcome)
    assert not (tmp_path / "summary.json").exists()


def test_fewer_epochs_than_are_trained_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingStopped):
        run_all(tiny_recipe(), 1, tmp_path, watch=stop_in(6, rank=0))
    with pytest.raises(RecipeError, match=r"beyond train\.epochs=1 of 5 steps.*epochs=2 or more"):
        run_all(tiny_recipe("train.epochs=1"), 1, tmp_path, resume=tmp_path)
    assert not (tmp_path / "summary.json").exists()


def test_a_checkpoint_of_another_model_or_layout_is_refused(tmp_path: Path) -> None:
    run_all(tiny_recipe(), 1, tmp_path)
    ways = {
        "model.width=8": r"leave out --set model.*without --resume\.$",
        "model.name=resnet18": r"leave out --set model.*without --resume\.$",
        "train.global_batch_size=8": r"Resume with 16, .*without --resume\.$",
        "train.seed=5": r"train\.seed=7 and this job has 5.*Resume with 7",
        "data.dataset=fashion": r"data\.dataset=digits and this job has fashion",
    }
    on_file = (tmp_path / "recipe.toml").read_text()
    left = sorted(path.name for path in tmp_path.iterdir())
    for override, way in ways.items():
        with pytest.raises(CheckpointError, match=f"(?s)step-.*{way}") as caught:
            run_all(tiny_recipe(override, "train.epochs=3"), 1, tmp_path, resume=tmp_path)
        assert "allow" not in str(caught.value)
    assert (tmp_path / "recipe.toml").read_text() == on_file
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_other_samples_under_the_same_name_are_refused(tmp_path: Path) -> None:
    run_all(tiny_recipe(), 1, tmp_path)
    job = Job(0, Cluster((1,)))
    recipe = tiny_recipe("train.epochs=3")
    data = deal(recipe, job, tiny_images(64), tiny_images(22, seed=1))
    stop = StopAgreement(job, Request())
    with pytest.raises(CheckpointError, match="with 80 training samples and this job has 64"):
        train(recipe, job, data, stop, run_folder=tmp_path, resume=tmp_path)


def test_a_resume_that_fails_before_it_trains_leaves_recipe_and_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_all(tiny_recipe(), 1, tmp_path)
    before = [(tmp_path / name).read_text() for name in ("recipe.toml", "summary.json")]

    def refuse(*_: object, **__: object) -> CheckpointWriter:
        raise CheckpointError("checkpoints cannot be written")

    monkeypatch.setattr(loop, "CheckpointWriter", refuse)
    with pytest.raises(CheckpointError, match="checkpoints cannot be written"):
        run_all(tiny_recipe("train.epochs=3"), 1, tmp_path, resume=tmp_path)
    assert [(tmp_path / name).read_text() for name in ("recipe.toml", "summary.json")] == before


def test_a_run_that_goes_on_is_not_finished_any_more(tmp_path: Path) -> None:
    run_all(tiny_recipe(), 1, tmp_path)
    longer = tiny_recipe("train.epochs=3")
    with pytest.raises(TrainingStopped):
        run_all(longer, 1, tmp_path, resume=tmp_path, watch=stop_in(11, rank=0))
    assert not (tmp_path / "summary.json").exists()
    assert parse_recipe((tmp_path / "recipe.toml").read_text(), "it") == longer
    assert run_all(longer, 1, tmp_path, resume=tmp_path)[0]["steps"] == 15


def test_checkpoints_follow_the_recipe(tmp_path: Path) -> None:
    recipe = tiny_recipe(
        "checkpoint.every_steps=3", "checkpoint.every_epochs=0", "checkpoint.keep_last=9"
    )
    run_all(recipe, 2, tmp_path)
    steps = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    # The last state is kept whatever the intervals say: a run without weights is worth nothing.
    assert steps == ["step-00000003", "step-00000006", "step-00000009", "step-00000010"]


def final_state(run: Path) -> object:
    """Everything of the last checkpoint that decides how training would go on."""
    saved = load(find_checkpoint(run))
    tensors = {name: tensor.tolist() for name, tensor in saved.model.items()}
    momentum = {
        name: state["momentum_buffer"].tolist() for name, state in saved.optimizer_state.items()
    }
    return saved.step, saved.position, saved.plan, saved.counters["updates"], tensors, momentum
