"""The records of `metrics.jsonl` that the loop writes, from what it has added up."""

from __future__ import annotations

from typing import Any

from slipstream.sync import NonFinite
from slipstream.train.evaluate import Evaluation
from slipstream.train.progress import Progress, Totals
from slipstream.train.step import StepResult

Record = dict[str, Any]


def step_record(progress: Progress, window: Totals, last: StepResult) -> Record:
    """The steps of `window`, of which `last` is the newest; seconds are those of a mean step."""
    norm = last.gradient_norm
    return {
        "kind": "step",
        "step": progress.step,
        "epoch": progress.epochs + 1,
        "loss": window.mean_loss,
        "accuracy": window.accuracy,
        "learning_rate": last.learning_rate,
        "images_per_second": window.images_per_second,
        "communication_hidden_seconds": window.hidden_seconds / window.steps,
        "communication_exposed_seconds": window.exposed_seconds / window.steps,
        "gradient_norm": None if norm is None else float(norm),
        "input_wait_seconds": window.input_wait_seconds / window.steps,
    }


def epoch_record(progress: Progress) -> Record:
    """The epoch under way, all of whose steps are done."""
    return {
        "kind": "epoch",
        "step": progress.step,
        "epoch": progress.epochs + 1,
        "train_loss": progress.epoch.mean_loss,
        "train_accuracy": progress.epoch.accuracy,
        "seconds": progress.epoch.seconds,
        "images_per_second": progress.epoch.images_per_second,
    }


def evaluation_record(progress: Progress, result: Evaluation) -> Record:
    """An evaluation at the end of the epoch under way."""
    return {
        "kind": "evaluation",
        "step": progress.step,
        "epoch": progress.epochs + 1,
        "test_loss": result.loss,
        "test_accuracy": result.accuracy,
    }


def skip_record(step: int, nonfinite: NonFinite) -> Record:
    """A step (counted from 1) that was left out because its gradients were not finite."""
    return {
        "kind": "skip",
        "step": step,
        "ranks": list(nonfinite.ranks),
        "parameter": nonfinite.parameter,
    }


def place_of(step: int, nonfinite: NonFinite) -> str:
    """Where gradients stopped being finite, as part of a sentence."""
    ranks = ", ".join(str(rank) for rank in nonfinite.ranks)
    plural = "s" if len(nonfinite.ranks) > 1 else ""
    return f"at step {step} on rank{plural} {ranks}, first in {nonfinite.parameter}"
