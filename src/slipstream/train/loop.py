"""One rank's run from its recipe to its summary: join, build, restore, train, sum up."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from slipstream.cluster import Cluster
from slipstream.errors import NonFiniteGradients, RecipeError, TrainingStopped
from slipstream.report import environment
from slipstream.train.build import Data, build_data, build_model, build_optimizer, build_schedule
from slipstream.train.checkpoint import (
    CheckpointWriter,
    LoadedCheckpoint,
    StopSignal,
    apply,
    find_checkpoint,
    load,
)
from slipstream.train.distributed import Job, join_job
from slipstream.train.ending import SUMMARY_FILE, finish_folder, report_early_end
from slipstream.train.plans import build_sync, gathers, noting
from slipstream.train.progress import Progress
from slipstream.train.recipe import Recipe
from slipstream.train.record.choose import open_display
from slipstream.train.record.metrics import MetricsWriter, truncate_after
from slipstream.train.record.recorder import Recorder
from slipstream.train.record.summary import summarise
from slipstream.train.residuals import restore_residuals
from slipstream.train.run_folder import (
    CHECKPOINTS,
    RECIPE_FILE,
    claim_run_folder,
    write_text_atomic,
    writing,
)
from slipstream.train.stopping import StopAgreement
from slipstream.train.training import Outputs, Parts, Training
from slipstream.words import counted

_WAY_OUT = (
    "resume with the model and the data that the run was started with (leave out --set model... and"
    " --set data...), or train what is new in a run of its own, without --resume"
)
_FROM_RECIPE = ("momentum", "nesterov", "weight_decay")
"""What a resume may change; the schedule sets the rate before every step."""


def run_training(
    recipe: Recipe, *, run_folder: Path, cluster: Cluster, resume: Path | None = None
) -> dict[str, Any]:
    """Trains as one rank of the job around this process; returns the summary, on every rank.

    run_folder: exists and is this run's own; rank 0 writes into it. resume: a checkpoint, or the
    folder of a run. SIGTERM and SIGINT save and raise TrainingStopped. Raises SlipstreamErrors for
    everything that a user can mend.
    """
    with (
        StopSignal(recipe.checkpoint.grace_seconds) as request,
        join_job(cluster, timeout_seconds=recipe.sync.timeout_seconds) as job,
    ):
        set_threads(recipe, job)
        with job.telling_peers("training"):
            recipe.validate_for(job.world_size)
            data = build_data(recipe, job)
            stop = StopAgreement(job, request)
            return train(recipe, job, data, stop, run_folder=run_folder, resume=resume)


def set_threads(recipe: Recipe, job: Job) -> None:
    """Sets this process's CPU threads: the recipe's, or its fair share of this machine's cores."""
    node = job.cluster.ranks_of_node(job.cluster.node_of(job.rank))
    # Logical nodes share one machine: the launcher's count knows that, the cluster does not.
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", len(node)))
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(recipe.train.threads_per_rank or max(1, cores // ranks_here))


def train(
    recipe: Recipe,
    job: Job,
    data: Data,
    stop: StopAgreement,
    *,
    run_folder: Path,
    resume: Path | None = None,
) -> dict[str, Any]:
    """Trains on data that is already dealt to the job's ranks; returns the summary on every rank.

    Changes nothing of the process around it, so that ranks may be threads.
    """
    loaded = load(find_checkpoint(resume)) if resume else None
    progress = Progress()
    if loaded is not None:
        progress = Progress.from_counters(loaded.counters, str(loaded.path))
    parts = _build_parts(
        recipe, job, data, loaded, run_folder
    )  # before anything in the folder is touched
    if loaded is not None:
        _refuse_finished(recipe, progress, data.sampler.steps_per_epoch, job, run_folder)
    with _outputs(recipe, job, run_folder, loaded) as outputs:
        if loaded is not None:
            outputs.recorder.write({"kind": "resume", "step": progress.step})
        steps_per_epoch = data.sampler.steps_per_epoch
        outputs.recorder.start(
            f"{recipe.name}, {recipe.model.name} on {counted(job.world_size, 'rank')}",
            total_steps=recipe.train.epochs * steps_per_epoch,
            num_epochs=recipe.train.epochs,
            first_step=progress.step,
        )
        if loaded is not None:
            restore_residuals(parts.sync, job, loaded, outputs.recorder.note)
        training = Training(recipe, job, data, parts, outputs, stop, progress)
        try:
            with noting(outputs.recorder.note, job.rank):
                training.run()
        except (TrainingStopped, NonFiniteGradients):
            if job.rank == 0:
                report_early_end(run_folder, outputs.recorder.note)
            raise
        summary = summarise(recipe, job, parts.model, progress, run_folder)
        parts.sync.close()
        job.on_rank_zero(
            lambda: finish_folder(run_folder, summary, training.write_records()),
            "writing the report",
        )
    return summary


def _refuse_finished(
    recipe: Recipe, progress: Progress, steps_per_epoch: int, job: Job, run_folder: Path
) -> None:
    """Raises RecipeError, on all ranks, for a run whose last epoch is trained and summed up.

    Also for one that has gone beyond it: its weights are not those of so many epochs.
    """
    epochs = recipe.train.epochs

    def look() -> None:
        if progress.step > epochs * steps_per_epoch:
            raise RecipeError(
                f"{run_folder} stands at step {progress.step}, which is beyond train.epochs="
                f"{epochs} of {steps_per_epoch} steps each; to train on, raise the number: --set "
                f"train.epochs={-(-progress.step // steps_per_epoch)} or more."
            )
        if progress.epochs >= epochs and os.path.lexists(run_folder / SUMMARY_FILE):
            raise RecipeError(
                f"{run_folder} has trained all of its {epochs} epochs; to train on, raise the "
                f"number: --set train.epochs={epochs + 1} or more."
            )

    job.on_rank_zero(look, "looking for what is left to train")


def _build_parts(
    recipe: Recipe, job: Job, data: Data, loaded: LoadedCheckpoint | None, run_folder: Path
) -> Parts:
    """Model, optimizer and engine, as the recipe starts them or as a checkpoint holds them."""
    model = build_model(recipe, data.train, job.device)
    optimizer = build_optimizer(recipe, model)
    if loaded is not None:
        loaded.require_layout(
            world_size=job.world_size,
            global_batch_size=recipe.train.global_batch_size,
            seed=recipe.train.seed,
            dataset=recipe.data.dataset,
            num_samples=data.sampler.num_samples,
        )
        loaded.require_steps_per_epoch(data.sampler.steps_per_epoch)
        recipes = [{key: group[key] for key in _FROM_RECIPE} for group in optimizer.param_groups]
        apply(loaded, model, optimizer, way_out=_WAY_OUT)
        for group, options in zip(optimizer.param_groups, recipes, strict=True):
            group.update(options)
    steps_per_epoch = data.sampler.steps_per_epoch
    sync = build_sync(
        recipe,
        job,
        model,
        num_steps=recipe.train.epochs * steps_per_epoch,
        loaded=loaded,
        run_folder=run_folder,
    )
    schedule = build_schedule(recipe, steps_per_epoch)
    if recipe.corrects_momentum:
        sync.correct_momentum(
            optimizer,
            recipe.optimizer.momentum,
            nesterov=recipe.optimizer.nesterov,
            clip_norm=recipe.sparse.clip_norm or None,
        )
    if gathers(recipe, sync):
        return Parts(model, optimizer, sync.deferred(optimizer), sync, schedule)
    if recipe.sync.wait == "update":
        sync.attach(optimizer)
    return Parts(model, optimizer, optimizer, sync, schedule)


@contextmanager
def _outputs(
    recipe: Recipe, job: Job, run_folder: Path, loaded: LoadedCheckpoint | None
) -> Iterator[Outputs]:
    """Opens what the run writes to, on rank 0, and closes it at the end.

    The recipe is replaced last: a resume that fails before leaves the run's own, and its summary.
    """
    metrics_file = run_folder / "metrics.jsonl"
    with ExitStack() as stack:
        display = stack.enter_context(open_display(rank=job.rank))
        metrics: MetricsWriter | None = None

        def open_folder() -> None:
            nonlocal metrics
            resumed = loaded is not None
            stack.callback(claim_run_folder(run_folder, resumed=resumed).release)
            with writing(run_folder, resumed=resumed):
                if loaded is not None:
                    truncate_after(metrics_file, loaded.step)
                write_text_atomic(
                    run_folder / "environment.json", json.dumps(environment(), indent=1) + "\n"
                )
            metrics = stack.enter_context(MetricsWriter(metrics_file, note=display.note))

        def accept() -> None:
            with writing(run_folder, resumed=loaded is not None):
                write_text_atomic(run_folder / RECIPE_FILE, recipe.to_toml())
                # A run that goes on is not finished any more, if it was.
                (run_folder / SUMMARY_FILE).unlink(missing_ok=True)

        job.on_rank_zero(open_folder, "opening the run folder")
        checkpoints = stack.enter_context(
            CheckpointWriter(
                run_folder / CHECKPOINTS,
                keep_last=recipe.checkpoint.keep_last,
                keep_best=int(recipe.checkpoint.keep_best),
                is_writer=job.rank == 0,
                warn=display.note,
            )
        )
        job.on_rank_zero(accept, "writing the recipe")
        yield Outputs(Recorder(display, metrics), checkpoints, run_folder)
