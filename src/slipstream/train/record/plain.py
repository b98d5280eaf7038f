"""Displays without a panel: plain lines for logs and pipes, nothing for ranks other than 0."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TextIO

from slipstream.report.records import finite, number
from slipstream.train.record.display import Clock, Display, loss_text
from slipstream.train.record.pace import Pace
from slipstream.words import count, counted, duration, percent

_PLAIN_EVERY_SECONDS = 2.0


class SilentDisplay(Display):
    """The display of every rank but 0."""

    def start(self, title: str, *, total_steps: int, num_epochs: int, first_step: int = 0) -> None:
        """Shows nothing."""

    def step(self, record: Mapping[str, Any]) -> None:
        """Shows nothing."""

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Shows nothing."""

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Shows nothing."""

    def note(self, text: str) -> None:
        """Shows nothing."""

    def stop(self) -> None:
        """Does nothing."""


class PlainDisplay(Display):
    """Lines of text for logs and pipes: at most one step line in two seconds, everything else."""

    def __init__(self, stream: TextIO, clock: Clock = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._pace = Pace(clock)
        self._num_epochs = 0
        self._last_line_seconds: float | None = None

    def start(self, title: str, *, total_steps: int, num_epochs: int, first_step: int = 0) -> None:
        """Prints the title and the size of the run."""
        self._pace.start(total_steps, first_step)
        self._num_epochs = num_epochs
        resumed = f", resumed after step {count(first_step)}" if first_step else ""
        self.note(
            f"{title}: {counted(num_epochs, 'epoch')}, {counted(total_steps, 'step')}{resumed}"
        )

    def step(self, record: Mapping[str, Any]) -> None:
        """Prints the record unless a step line was printed less than two seconds ago."""
        self._pace.advance(record["step"])
        now = self._clock()
        last = self._last_line_seconds
        if last is not None and now - last < _PLAIN_EVERY_SECONDS and not self._pace.is_done:
            return
        self._last_line_seconds = now
        self._line(record, *step_phrases(record), f"eta {duration(self._pace.eta_seconds)}")

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Prints test loss and test accuracy."""
        self._line(
            record,
            f"test loss {loss_text(number(record, 'test_loss'))}",
            f"test accuracy {percent(finite(record, 'test_accuracy'))}",
        )

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Prints the epoch's means and its time."""
        self._line(
            record,
            f"train loss {loss_text(number(record, 'train_loss'))}",
            f"train accuracy {percent(finite(record, 'train_accuracy'))}",
            f"{count(finite(record, 'images_per_second'))} images/s",
            f"took {duration(finite(record, 'seconds'))}",
        )

    def note(self, text: str) -> None:
        """Prints `text`."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def stop(self) -> None:
        """Nothing is left to do."""

    def _line(self, record: Mapping[str, Any], *phrases: str) -> None:
        where = (
            f"epoch {record.get('epoch', '?')}/{self._num_epochs}",
            f"step {record['step']}/{self._pace.total_steps}",
        )
        self.note("  ".join((*where, *phrases)))


def step_phrases(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Loss, accuracy, images/s and communication of a step record, in words."""
    hidden = finite(record, "communication_hidden_seconds")
    exposed = finite(record, "communication_exposed_seconds")
    return (
        f"loss {loss_text(number(record, 'loss'))}",
        f"accuracy {percent(finite(record, 'accuracy'))}",
        f"{count(finite(record, 'images_per_second'))} images/s",
        f"communication {duration(hidden)} hidden + {duration(exposed)} exposed",
    )
