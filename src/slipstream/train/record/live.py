"""The live panel on a terminal."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.report.records import finite, number
from slipstream.train.record.display import Clock, Display, loss_text
from slipstream.train.record.pace import Pace
from slipstream.words import count, duration, percent

_REFRESH_PER_SECOND = 4
_SPARK = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 32
_BAR_WIDTH = 24


def is_capable(stream: TextIO) -> bool:
    """Whether `stream`, a terminal, can move its cursor and show the panel's characters."""
    encoding = (getattr(stream, "encoding", None) or "").lower().replace("-", "")
    return os.environ.get("TERM", "") not in ("", "dumb") and encoding.startswith("utf")


class LiveDisplay(Display):
    """A panel that redraws itself four times a second, below the notes and evaluations so far.

    `step` only stores the record: drawing happens in rich's own thread.
    """

    def __init__(
        self, stream: TextIO, clock: Clock = time.monotonic, console: Console | None = None
    ) -> None:
        self._console = console or Console(file=stream, highlight=False)
        self._pace = Pace(clock)
        self._panel = _Panel(self._pace)
        self._live: Live | None = None

    def start(self, title: str, *, total_steps: int, num_epochs: int, first_step: int = 0) -> None:
        """Puts the panel on the terminal."""
        self._pace.start(total_steps, first_step)
        self._panel.title = title
        self._panel.num_epochs = num_epochs
        self._live = Live(
            self._panel,
            console=self._console,
            refresh_per_second=_REFRESH_PER_SECOND,
            redirect_stdout=False,  # stdout belongs to the summary that machines read
        )
        self._live.start()

    def step(self, record: Mapping[str, Any]) -> None:
        """Takes the record for the next redraw."""
        self._pace.advance(record["step"])
        loss = finite(record, "loss")
        if loss is not None:
            self._panel.losses = (*self._panel.losses, loss)[-_SPARK_WIDTH:]
        self._panel.record = record

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Takes test loss and accuracy into the panel."""
        self._panel.evaluation = record
        accuracy = finite(record, "test_accuracy")
        if accuracy is not None:
            self._panel.best_accuracy = max(self._panel.best_accuracy or 0.0, accuracy)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Leaves a line about the epoch above the panel."""
        self.note(
            f"epoch {record.get('epoch', '?')}/{self._panel.num_epochs}  "
            f"train loss {loss_text(number(record, 'train_loss'))}  "
            f"train accuracy {percent(finite(record, 'train_accuracy'))}  "
            f"{count(finite(record, 'images_per_second'))} images/s  "
            f"took {duration(finite(record, 'seconds'))}"
        )

    def note(self, text: str) -> None:
        """Leaves a line above the panel."""
        self._console.print(Text(text))

    def stop(self) -> None:
        """Draws the panel a last time and lets go of the terminal; a second call does nothing."""
        if self._live is not None:
            self._live.stop()
            self._live = None


@dataclass
class _Panel:
    """What the panel shows; fields are replaced whole, so the drawing thread sees no half state."""

    pace: Pace
    title: str = ""
    num_epochs: int = 0
    record: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    best_accuracy: float | None = None
    losses: tuple[float, ...] = ()

    def __rich__(self) -> RenderableType:
        body = Group(self._progress(), Text(), self._numbers(), self._communication())
        return Panel(
            body,
            title=Text.assemble(("slipstream ", "bold cyan"), self.title),
            title_align="left",
            border_style="cyan",
            padding=(0, 1),
        )

    def _progress(self) -> RenderableType:
        pace = self.pace
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        bar = ProgressBar(total=max(pace.total_steps, 1), completed=pace.done_steps)
        grid.add_row(
            Text(f"epoch {self.record.get('epoch', '-')}/{self.num_epochs}", "bold"),
            f"step {count(pace.done_steps)}/{count(pace.total_steps)}",
            bar,
            f"{duration(pace.elapsed_seconds)} · eta {duration(pace.eta_seconds)}",
        )
        return grid

    def _numbers(self) -> RenderableType:
        record, evaluation = self.record, self.evaluation
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(no_wrap=True, min_width=9)
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(no_wrap=True, min_width=9)
        grid.add_column(no_wrap=True)
        grid.add_row(
            "loss",
            Text(loss_text(number(record, "loss")), "bold"),
            "accuracy",
            Text(percent(finite(record, "accuracy")), "bold"),
            Text(sparkline(self.losses), "cyan"),
        )
        grid.add_row(
            "test loss",
            Text(loss_text(number(evaluation, "test_loss")), "bold"),
            "test accuracy",
            Text(percent(finite(evaluation, "test_accuracy")), "bold green"),
            f"best {percent(self.best_accuracy)}",
        )
        grid.add_row(
            "images/s",
            Text(count(finite(record, "images_per_second")), "bold"),
            "learning rate",
            loss_text(finite(record, "learning_rate")),
            f"input wait {duration(finite(record, 'input_wait_seconds'))}",
        )
        return grid

    def _communication(self) -> RenderableType:
        hidden = finite(self.record, "communication_hidden_seconds")
        exposed = finite(self.record, "communication_exposed_seconds")
        text = Text.assemble(("communication  ", "dim"))
        if hidden is None or exposed is None or hidden + exposed <= 0:
            return text.append("none yet" if not self.record else "none")
        filled = round(_BAR_WIDTH * hidden / (hidden + exposed))
        text.append("━" * filled, "green").append("━" * (_BAR_WIDTH - filled), "red")
        text.append(f"  {duration(hidden)} hidden", "green")
        text.append(f" + {duration(exposed)} exposed", "red")
        return text


def sparkline(values: Sequence[float]) -> str:
    """`values` as a row of small bars, the lowest at the bottom."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    top = len(_SPARK) - 1
    return "".join(_SPARK[round(top * (value - low) / span)] for value in values)
