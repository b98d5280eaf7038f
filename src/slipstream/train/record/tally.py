"""Sums of what this rank has trained since the last exchange; one small reduction shares them."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.train.distributed import Job
from slipstream.train.progress import Totals


class Tally:
    """Adds up steps on one rank, on its device, so that no step has to wait for a number.

    `share` replaces the sums by those over all ranks; every rank calls it after the same step.
    """

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._correct = torch.zeros((), dtype=torch.int64, device=device)
        self._local = Totals()

    def add(
        self,
        *,
        loss: Tensor,
        correct: Tensor,
        samples: int,
        seconds: float,
        hidden_seconds: float,
        exposed_seconds: float,
        input_wait_seconds: float,
    ) -> None:
        """Adds one step: its mean loss (scalar) and this rank's counts and seconds."""
        self._loss += loss
        self._correct += correct
        self._local.add(
            Totals(
                steps=1,
                samples=samples,
                seconds=seconds,
                hidden_seconds=hidden_seconds,
                exposed_seconds=exposed_seconds,
                input_wait_seconds=input_wait_seconds,
            )
        )

    def share(self, job: Job) -> Totals:
        """The sums over all ranks since the last call, the same everywhere; starts anew."""
        local = self._local
        sums = torch.tensor(
            [
                float(self._loss),
                float(self._correct),
                local.samples,
                local.seconds,
                local.hidden_seconds,
                local.exposed_seconds,
                local.input_wait_seconds,
            ],
            dtype=torch.float64,
        )
        loss, correct, samples, seconds, hidden, exposed, waited = job.sum(
            sums, "sharing metrics"
        ).tolist()
        ranks = job.world_size
        self._loss.zero_()
        self._correct.zero_()
        self._local = Totals()
        return Totals(
            steps=local.steps,
            loss=loss / ranks,
            correct=round(correct),
            samples=round(samples),
            seconds=seconds / ranks,
            hidden_seconds=hidden / ranks,
            exposed_seconds=exposed / ranks,
            input_wait_seconds=waited / ranks,
        )
