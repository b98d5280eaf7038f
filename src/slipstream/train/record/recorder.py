"""Where a run's records go: the metrics file and the display of rank 0, nowhere on other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.train.record.display import Display
from slipstream.train.record.metrics import MetricsWriter


class Recorder:
    """Writes each record to the metrics file, where there is one, and shows it."""

    def __init__(self, display: Display, metrics: MetricsWriter | None) -> None:
        self._display = display
        self._metrics = metrics

    def start(self, title: str, *, total_steps: int, num_epochs: int, first_step: int = 0) -> None:
        """Begins to show a run; see `Display.start`."""
        self._display.start(
            title, total_steps=total_steps, num_epochs=num_epochs, first_step=first_step
        )

    def write(self, record: Mapping[str, Any]) -> None:
        """Records one of the kinds that `slipstream.train.record.metrics` lists."""
        if self._metrics is not None:
            self._metrics.write(record)
        show = {
            "step": self._display.step,
            "epoch": self._display.epoch,
            "evaluation": self._display.evaluation,
        }.get(record["kind"])
        if show is not None:
            show(record)

    def flush(self) -> str | None:
        """Writes records that the disk has refused; a sentence about it where it still does."""
        return None if self._metrics is None else self._metrics.flush()

    def note(self, text: str) -> None:
        """Shows one line that stays."""
        self._display.note(text)
