"""The training loop: epochs of steps, with evaluation, saving and stopping in between."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from slipstream.auto import GradientSync
from slipstream.errors import CheckpointError, NonFiniteGradients, TrainingStopped
from slipstream.optim.schedules import Schedule
from slipstream.sync import NonFinite
from slipstream.train.build import Data
from slipstream.train.checkpoint import CheckpointWriter, Position, Save, TrainState
from slipstream.train.distributed import Job
from slipstream.train.evaluate import evaluate
from slipstream.train.plans import PlanFiles
from slipstream.train.progress import Progress, Totals
from slipstream.train.recipe import Recipe
from slipstream.train.record.recorder import Recorder
from slipstream.train.record.records import (
    epoch_record,
    evaluation_record,
    place_of,
    skip_record,
    step_record,
)
from slipstream.train.record.tally import Tally
from slipstream.train.residuals import gather_residuals, sparse_record
from slipstream.train.step import Stepper, StepResult, windows
from slipstream.train.stopping import StopAgreement
from slipstream.words import counted

MOST_SKIPS = 100
"""So many steps in a row may be skipped, and fewer than those of an epoch: then a run stands."""


@dataclass(frozen=True)
class Parts:
    """What is trained, and by what; `sync` wraps `model` and reduces its gradients.

    optimizer: holds the state; stepping: what steps, which is another one where updates are put
    off into the next forward.
    """

    model: nn.Module
    optimizer: Optimizer
    stepping: Optimizer
    sync: GradientSync
    schedule: Schedule


@dataclass(frozen=True)
class Outputs:
    """Where a run leaves what it finds out; only rank 0 writes files."""

    recorder: Recorder
    checkpoints: CheckpointWriter
    run_folder: Path


class Training:
    """A run from where `progress` stands to its last epoch; every rank holds one.

    Mutates the parts and `progress`. All ranks take the same steps, and whatever ends or changes a
    run (a stop request, non-finite gradients) is decided by all of them together.
    """

    def __init__(
        self,
        recipe: Recipe,
        job: Job,
        data: Data,
        parts: Parts,
        outputs: Outputs,
        stop: StopAgreement,
        progress: Progress,
    ) -> None:
        self._recipe = recipe
        self._job = job
        self._data = data
        self._parts = parts
        self._outputs = outputs
        self._stop = stop
        self.progress = progress
        self._stepper = Stepper(
            parts.model,
            parts.stepping,
            parts.sync,
            parts.schedule,
            recipe.train,
            device=job.device,
        )
        self._tally = Tally(job.device)
        self._window = Totals()
        self._steps_per_epoch = data.sampler.steps_per_epoch
        self._timeline_epoch = -1
        self._timelines = (parts.sync.timeline, parts.sync.timeline)
        self._plan_files: PlanFiles | None = None
        if job.rank == 0:
            self._plan_files = PlanFiles(parts.sync, outputs.run_folder, outputs.recorder.note)
        self._began_seconds = 0.0
        self._skips_in_a_row: list[str] = []

    def run(self) -> None:
        """Trains until the last epoch is evaluated and saved.

        Raises NonFiniteGradients where the policy is to stop and where skipping makes no way any
        more (MOST_SKIPS), TrainingStopped when a rank was asked to stop (after saving),
        CheckpointError when the end could not be saved, and whatever data, collectives and disks
        raise.
        """
        progress = self.progress
        self._began_seconds = time.perf_counter() - progress.train_seconds
        self._parts.model.train()
        while progress.epochs < self._recipe.train.epochs:
            self._train_epoch()
            self._end_epoch()
        self._stop.close()
        progress.train_seconds = time.perf_counter() - self._began_seconds

    def write_records(self) -> list[str]:
        """Writes what the disk has refused so far; a sentence for each file that it still does."""
        tried = (self._write_plans(), self._outputs.recorder.flush())
        return [failure for failure in tried if failure is not None]

    def _train_epoch(self) -> None:
        """Trains what is left of the epoch under way."""
        progress = self.progress
        start_step = progress.step - progress.epochs * self._steps_per_epoch
        clock = self._stepper.clock
        if self._recipe.sync.may_be_sparse and self._recipe.sparse.density:
            sparsity = self._recipe.sparse.in_epoch(progress.epochs)
            self._parts.sync.set_sparsity(sparsity, f"the recipe's for epoch {progress.epochs + 1}")
        with self._data.batches(progress.epochs, start_step) as batches:
            clock.begin()
            for window in windows(batches, self._data.sampler.accumulation_steps):
                waited_seconds = clock.cut("input", "wait for input")
                is_logged = self._every(self._recipe.run.log_every_steps, progress.step + 1)
                result = self._stepper.run(
                    window, step=progress.step, update=progress.updates, measure_norm=is_logged
                )
                self._account(result, waited_seconds)
                if is_logged:
                    self._log(result)
                self._save_or_stop()
                clock.begin()

    def _account(self, result: StepResult, waited_seconds: float) -> None:
        """Counts a step that is done; a skipped one is no update, so the rate stays."""
        progress = self.progress
        if result.nonfinite is not None:
            self._refuse(result.nonfinite)
            progress.step += 1
            return
        progress.step += 1
        progress.updates += 1
        self._skips_in_a_row.clear()
        timeline = self._parts.sync.timeline
        self._timelines = (self._timelines[1], timeline)
        self._tally.add(
            loss=result.loss,
            correct=result.correct,
            samples=result.samples,
            seconds=self._stepper.clock.seconds,
            hidden_seconds=timeline.hidden_seconds,
            exposed_seconds=timeline.exposed_seconds,
            input_wait_seconds=waited_seconds,
        )

    def _refuse(self, nonfinite: NonFinite) -> None:
        """Ends the run or notes the skipped step, by the recipe's policy."""
        step = self.progress.step + 1
        place = place_of(step, nonfinite)
        if self._recipe.train.on_nonfinite == "stop":
            raise NonFiniteGradients(
                f"Gradients became infinite or NaN {place}; the weights are as after step "
                f"{step - 1}. Lower optimizer.learning_rate, set train.clip_grad_norm, or leave "
                "such steps out with train.on_nonfinite=skip."
            )
        self._outputs.recorder.write(skip_record(step, nonfinite))
        self._outputs.recorder.note(f"skipped an update: gradients were not finite {place}")
        self._skips_in_a_row.append(place)
        if len(self._skips_in_a_row) >= min(MOST_SKIPS, self._steps_per_epoch):
            raise self._standstill()

    def _standstill(self) -> NonFiniteGradients:
        """What ends a run whose steps are all skipped: no batch can change that any more."""
        places = self._skips_in_a_row
        steps, place = f"the last {counted(len(places), 'step')}", next(iter(places), "")
        if not places:  # resumed at the end of an epoch that was skipped whole
            steps, place = "the epoch's steps", f"up to step {self.progress.step}"
        return NonFiniteGradients(
            f"Not one of {steps} could update the weights: gradients became infinite or NaN"
            f" {place}, and so on. Lower optimizer.learning_rate or set"
            " train.clip_grad_norm, and begin anew or, where it is still sound, from an earlier"
            " checkpoint by --resume; if that does not help, look for infinite or NaN values in the"
            " data."
        )

    def _share(self) -> None:
        """Adds what all ranks have trained since the last time to the sums of the run."""
        totals = self._tally.share(self._job)
        for sums in (self._window, self.progress.epoch, self.progress.run):
            sums.add(totals)

    def _log(self, last: StepResult) -> None:
        """Records the steps since the last record, and once an epoch the timeline of this one."""
        self._share()
        self._write_plans()
        window, self._window = self._window, Totals()
        if window.steps == 0:
            return
        self._stop.pace(window.step_seconds)
        progress = self.progress
        self._outputs.recorder.write(step_record(progress, window, last))
        if self._timeline_epoch != progress.epochs and last.nonfinite is None:
            self._timeline_epoch = progress.epochs
            earlier, timeline = self._timelines
            record = self._stepper.clock.record(progress.step, timeline, earlier)
            self._outputs.recorder.write(record)

    def _save_or_stop(self) -> None:
        """Saves when that is due; saves and ends the run when a rank was asked to stop."""
        step = self.progress.step
        if self._every(self._recipe.checkpoint.every_steps, step):
            self._save()
        if self._stop.reached(step):
            self._stop_here()

    def _stop_here(self) -> None:
        """Saves and raises TrainingStopped, on all ranks with the same words."""
        self._stop.close()
        step, folder = self.progress.step, self._outputs.run_folder
        failure = self._job.peers.gather(self._save(block=True).error, "saving to stop")[0]
        if failure is None:
            raise TrainingStopped(
                f"Training stopped as asked after step {step}; "
                f"go on with: slipstream train --resume {shlex.quote(str(folder))}"
            )
        raise TrainingStopped(f"Training stopped as asked after step {step}, but {failure}")

    def _end_epoch(self) -> None:
        """Records the epoch, evaluates and saves where that is due."""
        self._share()
        progress = self.progress
        if not progress.epoch.steps:  # a resumed epoch has skipped the rest before
            raise self._standstill()
        number = progress.epochs + 1
        is_last = number == self._recipe.train.epochs
        self._outputs.recorder.write(epoch_record(progress))
        sparse = sparse_record(self._parts.sync, self._job, progress)
        if sparse is not None:
            self._outputs.recorder.write(sparse)
        accuracy = None
        if is_last or self._every(self._recipe.train.evaluate_every_epochs, number):
            accuracy = self._evaluate()
        progress.epochs = number
        progress.epoch = Totals()
        if is_last or self._every(self._recipe.checkpoint.every_epochs, number):
            save = self._save(metric=accuracy, block=is_last)
            if is_last:
                self._require_saved(save)

    def _require_saved(self, save: Save) -> None:
        """Raises CheckpointError, on all ranks, where the weights that a run is for are lost."""
        failure = self._job.peers.gather(save.error, "saving the last checkpoint")[0]
        if failure is not None:
            raise CheckpointError(f"Training has reached its last epoch, but {failure}")

    def _evaluate(self) -> float:
        """Evaluates with rank 0's buffers on every rank; returns the test accuracy."""
        self._parts.sync.sync_buffers()
        result = evaluate(
            self._parts.model, self._data.test, self._job, mean=self._data.mean, std=self._data.std
        )
        self.progress.test_accuracy = result.accuracy
        self._outputs.recorder.write(evaluation_record(self.progress, result))
        return result.accuracy

    def _save(self, metric: float | None = None, *, block: bool = False) -> Save:
        """Saves the run as it stands, in the background unless `block`."""
        self._write_plans()
        self._share()
        self._parts.sync.sync_buffers()
        progress = self.progress
        progress.train_seconds = time.perf_counter() - self._began_seconds
        position = Position(
            epoch=progress.epochs,
            step_in_epoch=progress.step - progress.epochs * self._steps_per_epoch,
            world_size=self._job.world_size,
            global_batch_size=self._recipe.train.global_batch_size,
            seed=self._recipe.train.seed,
            dataset=self._recipe.data.dataset,
            num_samples=self._data.sampler.num_samples,
        )
        state = TrainState(
            model=self._parts.model,
            optimizer=self._parts.optimizer,
            position=position,
            counters=progress.to_counters(),
            tensors=gather_residuals(self._parts.sync, self._job),
            plan=self._parts.sync.history.to_json(),
            recipe=self._recipe.to_toml(),
        )
        return self._outputs.checkpoints.save(state, progress.step, metric, block=block)

    def _write_plans(self) -> str | None:
        """Keeps the run folder's plans at those of the engine; a sentence where that fails."""
        return None if self._plan_files is None else self._plan_files.write()

    @staticmethod
    def _every(interval: int, count: int) -> bool:
        """Whether something that happens every `interval` (0 = never) is due at `count`."""
        return interval > 0 and count % interval == 0
