"""Stopping together: a signal on any rank ends training after the same step on all ranks."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from slipstream.train.distributed import Job


class StopRequest(Protocol):
    """Says whether this process was asked to stop; `StopSignal` is the one that users meet."""

    @property
    def requested(self) -> bool:
        """True from the first request on."""
        ...


class StopAgreement:
    """Asks all ranks whether any was told to stop, without making a step wait for the answer.

    The question of one step is a reduction of one number in the background; its answer is read
    after the next step, so it is there already, and every rank reads it after the same step.
    Questions are `seconds_apart`, as nearly as whole steps allow, and nearly all of the grace time
    is left to save in.
    """

    def __init__(self, job: Job, request: StopRequest, *, seconds_apart: float = 1.0) -> None:
        self._job = job
        self._request = request
        self._seconds_apart = seconds_apart
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._question: dist.Work | None = None
        self._every_steps = 1
        self._asked_step: int | None = None

    def pace(self, step_seconds: float) -> None:
        """Sets the distance of questions from a step time that is the same on every rank.

        It counts from the last question on: a question whose time has come already is next.
        """
        self._every_steps = max(1, int(self._seconds_apart / max(step_seconds, 1e-6)))

    def reached(self, step: int) -> bool:
        """Whether training ends after `step`; every rank calls this after every step."""
        if self._job.group is None:
            return self._request.requested
        stop = self._answer()
        if not stop and self._is_due(step):
            self._ask(step)
        return stop

    def close(self) -> None:
        """Waits for the last question, so that the group can be left."""
        self._answer()

    def _is_due(self, step: int) -> bool:
        return self._asked_step is None or step - self._asked_step >= self._every_steps

    def _ask(self, step: int) -> None:
        self._asked_step = step
        self._flag.fill_(self._request.requested)
        with self._job.named_failure("asking whether to stop"):
            self._question = dist.all_reduce(
                self._flag, dist.ReduceOp.MAX, group=self._job.group, async_op=True
            )

    def _answer(self) -> bool:
        """Whether a rank had been told to stop at the last question, if that is still open."""
        question, self._question = self._question, None
        if question is None:
            return False
        with self._job.named_failure("asking whether to stop"):
            question.wait()
        return bool(self._flag)
