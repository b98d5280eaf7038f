"""What ends or disturbs a run: bad gradients, failing ranks; and what must survive it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ranks import run_ranks_settled
from slipstream.data import Batch
from slipstream.errors import (
    DataError,
    NonFiniteGradients,
    RankFailure,
    RunFolderError,
    TrainingStopped,
)
from slipstream.report.records import of_kind, read_metrics
from slipstream.train.checkpoint import find_checkpoint, load
from slipstream.train.distributed import Job
from slipstream.train.run_folder import claim_run_folder
from training_runs import Request, Watch, job_of, run_all, run_one, tiny_recipe

EVERY_STEP = ("checkpoint.every_steps=1", "train.clip_grad_norm=1.0", "checkpoint.keep_last=3")

FOR_THREE = tiny_recipe("train.global_batch_size=15")


def poison_step_3(batch: Batch, job: Job, request: Request) -> Batch:
    """Gives the last rank one NaN in the third step's images."""
    if (batch.epoch, batch.step) == (0, 2) and job.rank == job.world_size - 1:
        batch.images[0, 0, 0, 0] = float("nan")
    return batch


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_policy_stop_names_step_rank_and_parameter_and_keeps_good_checkpoints(
    world_size: int, tmp_path: Path
) -> None:
    """Case 26."""
    recipe = tiny_recipe(*EVERY_STEP)
    with pytest.raises(NonFiniteGradients) as caught:
        run_all(recipe, world_size, tmp_path, watch=poison_step_3)
    message = str(caught.value)
    assert f"at step 3 on rank {world_size - 1}, first in " in message
    assert "train.on_nonfinite=skip" in message
    last = load(find_checkpoint(tmp_path))
    assert last.step == 2
    assert all(torch.isfinite(tensor).all() for tensor in last.model.values())


def test_policy_stop_is_raised_on_every_rank(tmp_path: Path) -> None:
    outcomes = run_ranks_settled(
        lambda rank: run_one(FOR_THREE, job_of(rank), tmp_path, watch=poison_step_3), 3
    )
    assert [type(outcome) for outcome in outcomes] == [NonFiniteGradients] * 3
    assert len({str(outcome) for outcome in outcomes}) == 1


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_policy_skip_goes_on_and_tells_it(world_size: int, tmp_path: Path) -> None:
    """Cases 25 and 26: counted, visible, and the schedule waits."""
    recipe = tiny_recipe(*EVERY_STEP, "train.on_nonfinite=skip", "run.log_every_steps=1")
    summary = run_all(recipe, world_size, tmp_path, watch=poison_step_3)[0]
    assert summary["steps"] == 10 and summary["skipped_steps"] == 1
    records = read_metrics(tmp_path / "metrics.jsonl")
    [skip] = of_kind(records, "skip")
    assert skip["step"] == 3 and skip["ranks"] == [world_size - 1] and skip["parameter"]
    steps = of_kind(records, "step")
    assert [record["step"] for record in steps] == [1, 2, 4, 5, 6, 7, 8, 9, 10]
    whole = tmp_path / "whole"
    run_all(recipe, world_size, whole)
    rates = [
        record["learning_rate"] for record in of_kind(read_metrics(whole / "metrics.jsonl"), "step")
    ]
    assert [record["learning_rate"] for record in steps] == rates[:9]
    assert all(torch.isfinite(t).all() for t in load(find_checkpoint(tmp_path)).model.values())


def poisoned(*steps: int) -> Watch:
    """Gives the last rank a NaN in the images of these steps, counted from 1 over the run."""

    def watch(batch: Batch, job: Job, request: Request) -> Batch:
        step = 5 * batch.epoch + batch.step + 1
        if step in steps and job.rank == job.world_size - 1:
            batch.images[0, 0, 0, 0] = float("nan")
        return batch

    return watch


@pytest.mark.parametrize("world_size", [1, 2])
def test_policy_skip_ends_a_run_that_makes_no_way_any_more(world_size: int, tmp_path: Path) -> None:
    recipe = tiny_recipe("train.on_nonfinite=skip", "train.epochs=9")
    with pytest.raises(NonFiniteGradients) as caught:
        run_all(recipe, world_size, tmp_path, watch=poisoned(*range(4, 99)))
    message = str(caught.value)
    assert "Not one of the last 5 steps could update" in message
    assert f"at step 4 on rank {world_size - 1}, first in " in message
    assert "optimizer.learning_rate" in message and "--resume" in message
    skips = of_kind(read_metrics(tmp_path / "metrics.jsonl"), "skip")
    assert [record["step"] for record in skips] == [4, 5, 6, 7, 8]
    assert (tmp_path / "report.html").exists() and not (tmp_path / "summary.json").exists()


def test_policy_skip_goes_on_while_some_steps_can_be_applied(tmp_path: Path) -> None:
    recipe = tiny_recipe("train.on_nonfinite=skip")
    summary = run_all(recipe, 2, tmp_path, watch=poisoned(1, 2, 3, 4, 6, 8, 9, 10))[0]
    assert summary["skipped_steps"] == 8


def test_an_epoch_that_was_skipped_before_and_after_a_resume_ends_the_run(tmp_path: Path) -> None:
    recipe = tiny_recipe("train.on_nonfinite=skip", "train.epochs=1", "checkpoint.every_steps=1")
    poison = poisoned(*range(1, 6))

    def stop_after_3(batch: Batch, job: Job, request: Request) -> Batch:
        request.requested = batch.step == 2
        return poison(batch, job, request)

    with pytest.raises(TrainingStopped):
        run_all(recipe, 1, tmp_path, watch=stop_after_3)
    with pytest.raises(NonFiniteGradients, match="Not one of the last 2 steps"):
        run_all(recipe, 1, tmp_path, watch=poison, resume=tmp_path)
    with pytest.raises(NonFiniteGradients, match=r"Not one of the epoch's steps .* up to step 5"):
        run_all(recipe, 1, tmp_path, watch=poison, resume=tmp_path)


def test_a_rank_that_fails_is_named_on_the_others(tmp_path: Path) -> None:
    def fail_on_rank_1(batch: Batch, job: Job, request: Request) -> Batch:
        if job.rank == 1 and batch.step == 3:
            raise DataError("the file of rank 1 is damaged")
        return batch

    def body(rank: object) -> object:
        job = job_of(rank, timeout_seconds=3.0)  # type: ignore[arg-type]
        with job.telling_peers("training"):
            return run_one(FOR_THREE, job, tmp_path, watch=fail_on_rank_1)

    outcomes = run_ranks_settled(body, 3)
    assert isinstance(outcomes[1], DataError)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], RankFailure)
        assert "rank 1: the file of rank 1 is damaged" in str(outcomes[rank])


def test_a_run_folder_of_a_living_job_is_refused_on_every_rank(tmp_path: Path) -> None:
    lock = claim_run_folder(tmp_path)
    outcomes = run_ranks_settled(lambda rank: run_one(tiny_recipe(), job_of(rank), tmp_path), 2)
    lock.release()
    assert isinstance(outcomes[0], RunFolderError)
    assert all("still running" in str(outcome) for outcome in outcomes)
    assert not (tmp_path / "metrics.jsonl").exists()
