"""One training step: forward and backward of each micro-batch, wait, check, update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream.data import Batch
from slipstream.optim.schedules import Schedule
from slipstream.sync import GradientSync, NonFinite
from slipstream.train.guard import BufferGuard
from slipstream.train.recipe.settings import TrainSettings
from slipstream.train.record.spans import StepClock

_MASK = 2**64 - 1


@dataclass(frozen=True)
class StepResult:
    """What a step did on this rank.

    loss: mean over micro-batches of their mean losses (scalar, detached); correct: correctly
    classified samples (scalar int64); learning_rate: of this update; gradient_norm: of the averaged
    gradients before clipping, None where nobody asked; nonfinite: where gradients were infinite or
    NaN, the same on every rank; the weights, momentum and buffers then are as before the step.
    """

    loss: Tensor
    correct: Tensor
    samples: int
    learning_rate: float
    gradient_norm: Tensor | None
    nonfinite: NonFinite | None


class Stepper:
    """Trains one step at a time; mutates model, optimizer and (through `sync`) gradients.

    The random streams of layers such as dropout are a function of (seed, step, rank), so a resumed
    run needs no generator state.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        sync: GradientSync,
        schedule: Schedule,
        settings: TrainSettings,
        *,
        device: torch.device,
    ) -> None:
        self.clock = StepClock()
        self._model = model
        self.optimizer = optimizer
        self._sync = sync
        self._schedule = schedule
        self._settings = settings
        self._device = device
        self._guard = BufferGuard(model) if settings.on_nonfinite == "skip" else None

    def run(
        self, window: Sequence[Batch], *, step: int, update: int, measure_norm: bool = False
    ) -> StepResult:
        """Trains on the micro-batches of `window`, weighting each by 1 / len(window).

        step: seeds the random streams; update: decides the learning rate; measure_norm: also
        computes the gradient norm where nothing is clipped.
        """
        self._prepare(step)
        *early, last = window
        with self._sync.no_sync():
            parts = [self._backward(batch, len(window)) for batch in early]
        parts.append(self._backward(last, len(window)))
        nonfinite = self._sync.nonfinite()
        self.clock.cut("wait", "wait for gradients")
        rate = self._schedule.rate(update)
        norm = None if nonfinite else self._update(rate, measure_norm)
        if nonfinite and self._guard:
            self._guard.restore()
        self.clock.cut("update")
        return StepResult(
            loss=torch.stack([loss for loss, _ in parts]).sum(),
            correct=torch.stack([correct for _, correct in parts]).sum(),
            samples=sum(batch.labels.numel() for batch in window),
            learning_rate=rate,
            gradient_norm=norm,
            nonfinite=nonfinite,
        )

    def _prepare(self, step: int) -> None:
        self.optimizer.zero_grad()
        if self._guard:
            self._guard.remember()
        torch.manual_seed(stream_seed(self._settings.seed, step, self._sync.rank))

    def _backward(self, batch: Batch, num_parts: int) -> tuple[Tensor, Tensor]:
        """Adds one of `num_parts` micro-batches to the gradients.

        Returns its share of the step's loss and the number of correctly classified samples.
        """
        labels = batch.labels.to(self._device, non_blocking=True)
        logits = self._model(batch.images.to(self._device, non_blocking=True))
        smoothing = self._settings.label_smoothing
        loss = F.cross_entropy(logits, labels, label_smoothing=smoothing) / num_parts
        self.clock.cut("forward")
        loss.backward()
        self.clock.cut("backward")
        return loss.detach(), (logits.detach().argmax(dim=1) == labels).sum()

    def _update(self, rate: float, measure_norm: bool) -> Tensor | None:
        """Clips and steps at the given rate; returns the gradient norm where it was computed."""
        norm = None
        limit = self._settings.clip_grad_norm or math.inf  # which leaves every bit as it is
        if measure_norm or limit < math.inf:
            norm = self._sync.clip_grad_norm_(limit)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return norm


def windows(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Groups micro-batches into steps of `size`; the last window may hold fewer.

    A window is complete without a look at the batch after it, so no step waits for the next one's.
    """
    window: list[Batch] = []
    for batch in batches:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def stream_seed(seed: int, step: int, rank: int) -> int:
    """A seed of its own for each (seed, step, rank): no two ranks or steps share a stream."""
    mixed = 0
    for coordinate in (seed, step, rank):
        # The finaliser of SplitMix64, which is one-to-one: streams that differ in one coordinate
        # never meet.
        mixed = ((mixed ^ coordinate) + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed
