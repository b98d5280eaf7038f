"""What a user sees while a run goes on, all of it on stderr; rank 0 shows, other ranks are silent.

A terminal gets a live panel, anything else plain lines. The records are those of `metrics.jsonl`
(see `slipstream.train.record.metrics`), so one dictionary serves both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

Clock = Callable[[], float]


class Display(ABC):
    """One run's progress. Use as a context manager, so that the terminal is restored on errors."""

    @abstractmethod
    def start(self, title: str, *, total_steps: int, num_epochs: int, first_step: int = 0) -> None:
        """Begins to show a run of `total_steps` steps that goes on after `first_step`."""

    @abstractmethod
    def step(self, record: Mapping[str, Any]) -> None:
        """Shows a record of kind "step"; cheap enough for every step."""

    @abstractmethod
    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Shows a record of kind "evaluation"."""

    @abstractmethod
    def epoch(self, record: Mapping[str, Any]) -> None:
        """Shows a record of kind "epoch"."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Shows one line of text that stays: a skipped step, a checkpoint, a warning."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the display and leaves the terminal as it was; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def loss_text(value: float | None) -> str:
    """A loss with four digits; non-finite values are shown as they are."""
    return "-" if value is None else f"{value:.4g}"
