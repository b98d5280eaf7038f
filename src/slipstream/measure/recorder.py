"""From the events of a training loop to steps with a beginning, a forward, a backward and an end.

    began | input | forward, modules called one by one | backward, gradients one by one | ended

A step may hold several forwards and backwards (accumulation): what counts is the last backward, in
which gradients are averaged; everything before it is forward. Forwards without gradient, as in an
evaluation, and those that autograd repeats inside a backward (checkpointing) are no events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.graph_reads import first_readers, output_nodes, sequence_number
from slipstream.measure.clocks import Clock

_OUTSIDE_BACKWARD = -1


@dataclass
class RawStep:
    """The moments of one step, as marks of a clock; `ready` by parameter, `points` by module."""

    began: Any = None
    points: dict[int, Any] = field(default_factory=dict)
    backward: Any = None
    ready: dict[str, Any] = field(default_factory=dict)
    ended: Any = None
    waited_seconds: float = 0.0
    samples: int = 0


class Recorder:
    """Sorts what the hooks of a model report into steps.

    clock: takes the moments. names: of the parameters, by id(). warmup: whole steps that are not
    kept, at least 1: the first is the one that is looked into (`calls`, `readers`). waited: the
    seconds for which the step that has just ended waited for averages after its backward.
    """

    def __init__(
        self,
        clock: Clock,
        names: dict[int, str],
        *,
        warmup: int,
        waited: Callable[[], float] | None,
    ) -> None:
        self.steps: list[RawStep] = []
        self.calls: list[tuple[int, int]] = []
        self.readers: dict[str, int] = {}
        self._skipped = 0
        self._warmup = warmup
        self._clock = clock
        self._names = names
        self._waited = waited
        self._step = RawStep()
        self._forward_is_over = False
        self._inside = 0

    def begin(self) -> None:
        """A step begins here; what was seen of an unfinished one is forgotten."""
        self._step = RawStep(began=self._clock.mark())
        self._forward_is_over = False
        self._inside = 0

    def end(self) -> None:
        """The step's update is done, as far as is known: a later call moves its end."""
        if self._step.ready:
            self._step.ended = self._clock.mark()
            self._step.waited_seconds = self._waited() if self._waited else 0.0

    def close(self) -> None:
        """Keeps the step if it was whole, and begins the next one where it ended."""
        step, self._step = self._step, RawStep(began=self._step.ended)
        self._forward_is_over = False
        if step.ended is None or not step.ready:
            return
        if self._skipped < self._warmup or step.began is None:
            self._skipped += 1
        else:
            self.steps.append(step)

    def enter(self, point: int, samples: int) -> None:
        """A watched module is called; `samples`: of the batch, where it is the model itself."""
        if not self._is_training():
            return
        if self._step.ended is not None:
            self.close()
        if self._forward_is_over:  # one more micro-batch: the backward before it was not the last
            self._forward_is_over = False
            self._step.ready.clear()
            self._step.backward = None
        if point == 0:
            self._inside += 1
            self._step.samples += samples
        if not self._skipped:
            self.calls.append((sequence_number(), point))
        self._step.points.setdefault(point, self._clock.mark())

    def leave(self, output: object) -> None:
        """The model's forward has ended, or failed (then the output is None)."""
        if not self._inside or torch._C._current_graph_task_id() != _OUTSIDE_BACKWARD:
            return
        self._inside -= 1
        nodes = output_nodes(output)
        for node in nodes:
            node.register_prehook(self._backward_began)
        if not self._skipped and not self.readers:
            self.readers = first_readers(nodes, self._names)

    def ready(self, name: str) -> None:
        """A gradient has been accumulated."""
        self._step.ready[name] = moment = self._clock.mark()
        self._forward_is_over = True
        if self._step.backward is None:
            self._step.backward = moment

    def _backward_began(self, _gradients: object) -> None:
        if self._step.backward is None:
            self._step.backward = self._clock.mark()
            self._forward_is_over = True

    def _is_training(self) -> bool:
        if torch._C._current_graph_task_id() != _OUTSIDE_BACKWARD:
            return False
        return self._inside > 0 or torch.is_grad_enabled()
