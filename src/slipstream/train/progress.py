"""How far a run has come: the counters that a checkpoint carries, and sums of what was trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from slipstream.errors import CheckpointError


@dataclass
class Totals:
    """Sums over steps, the same on every rank.

    loss: sum over steps of the mean over ranks of each rank's mean over its samples, which is the
    rule by which gradients are averaged, too; correct, samples: over all ranks; seconds: of the
    steps, and of communication and waiting for input within them (means over ranks).
    """

    steps: int = 0
    loss: float = 0.0
    correct: int = 0
    samples: int = 0
    seconds: float = 0.0
    hidden_seconds: float = 0.0
    exposed_seconds: float = 0.0
    input_wait_seconds: float = 0.0

    def add(self, other: Totals) -> None:
        """Adds the sums of `other` to these, in place."""
        for entry in fields(self):
            setattr(self, entry.name, getattr(self, entry.name) + getattr(other, entry.name))

    @property
    def mean_loss(self) -> float:
        """Loss of a mean step; NaN before the first."""
        return self.loss / self.steps if self.steps else float("nan")

    @property
    def images_per_second(self) -> float:
        """Samples per second of all ranks together, over these steps; 0 before the first."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def step_seconds(self) -> float:
        """Length of a mean step; 0 before the first."""
        return self.seconds / self.steps if self.steps else 0.0

    @property
    def accuracy(self) -> float:
        """Share of the samples that were classified correctly while training; NaN without any."""
        return self.correct / self.samples if self.samples else float("nan")


@dataclass
class Progress:
    """The position of a run, and what it has added up; rates and data order follow from it.

    step: steps done, skipped ones included; updates: steps in which the optimizer moved the
    weights; epochs: epochs done, evaluation included; run, epoch: sums over the whole run and over
    the current epoch; train_seconds: wall time of training, evaluation and saving.
    """

    step: int = 0
    updates: int = 0
    epochs: int = 0
    run: Totals = field(default_factory=Totals)
    epoch: Totals = field(default_factory=Totals)
    train_seconds: float = 0.0
    test_accuracy: float | None = None

    @property
    def skipped_steps(self) -> int:
        """Steps whose gradients were not finite and which left the weights alone."""
        return self.step - self.updates

    def to_counters(self) -> dict[str, Any]:
        """The progress as JSON values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_counters(cls, counters: Mapping[str, Any], where: str) -> Self:
        """The inverse of `to_counters`; `where` names the checkpoint.

        Raises CheckpointError when a counter is missing, unknown or of another type.
        """
        try:
            progress = cls(**counters)
            progress.run, progress.epoch = Totals(**counters["run"]), Totals(**counters["epoch"])
            if not 0 <= progress.updates <= progress.step:
                raise ValueError(f"{progress.updates} updates in {progress.step} steps")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{where} does not hold the counters of a training run ({error}); "
                "resume from another checkpoint."
            ) from error
        return progress
