"""The display: plain lines by rule, a live panel on a terminal, silence on other ranks."""

from __future__ import annotations

import errno
import io
import os
import pty
from typing import Any, TextIO, cast

import pytest
from rich.console import Console

from slipstream.train.record.choose import open_display
from slipstream.train.record.display import Display
from slipstream.train.record.live import LiveDisplay, is_capable, sparkline
from slipstream.train.record.pace import Pace
from slipstream.train.record.plain import PlainDisplay, SilentDisplay
from slipstream.train.record.unfailing import UnfailingStream


class Clock:
    """A clock that stands until it is told otherwise."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def step(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": number,
        "epoch": 1,
        "loss": 0.51234,
        "accuracy": 0.8,
        "learning_rate": 0.1,
        "images_per_second": 1034.4,
        "communication_hidden_seconds": 0.0123,
        "communication_exposed_seconds": 0.0012,
        "gradient_norm": None,
        "input_wait_seconds": 0.0,
        **fields,
    }


EVALUATION = {"kind": "evaluation", "step": 10, "epoch": 1, "test_loss": 0.4, "test_accuracy": 0.9}
EPOCH = {
    "kind": "epoch",
    "step": 10,
    "epoch": 1,
    "train_loss": 0.5,
    "train_accuracy": 0.85,
    "seconds": 61.0,
    "images_per_second": 1000.0,
}


class Gone(io.StringIO):
    """A terminal whose connection ends after the first line."""

    def write(self, text: str) -> int:
        if self.getvalue():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().write(text)

    def flush(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def run_through(display: Display, clock: Clock) -> None:
    with display:
        display.start("fashion on 4 ranks", total_steps=20, num_epochs=2)
        for number in range(1, 11):
            clock.seconds += 0.5
            display.step(step(number))
        display.epoch(EPOCH)
        display.evaluation(EVALUATION)
        display.note("a [note] that is no markup")
    display.stop()


def test_plain_lines_say_everything() -> None:
    stream, clock = io.StringIO(), Clock()
    run_through(PlainDisplay(stream, clock), clock)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "fashion on 4 ranks: 2 epochs, 20 steps"
    assert lines[1] == (
        "epoch 1/2  step 1/20  loss 0.5123  accuracy 80.0 %  1,034 images/s  "
        "communication 12.3 ms hidden + 1.20 ms exposed  eta -"
    )
    assert lines[2].startswith("epoch 1/2  step 5/20")
    assert lines[2].endswith("eta 7.50 s")
    assert lines[3].startswith("epoch 1/2  step 9/20")
    assert lines[4:] == [
        "epoch 1/2  step 10/20  train loss 0.5  train accuracy 85.0 %  1,000 images/s  "
        "took 1 min 1 s",
        "epoch 1/2  step 10/20  test loss 0.4  test accuracy 90.0 %",
        "a [note] that is no markup",
    ]


def test_plain_lines_always_show_the_last_step_and_what_is_odd() -> None:
    stream, clock = io.StringIO(), Clock()
    display = PlainDisplay(stream, clock)
    display.start("digits", total_steps=12, num_epochs=1, first_step=10)
    display.step(step(11, loss=float("nan"), accuracy=None))
    display.step(step(12, loss=float("inf")))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "digits: 1 epoch, 12 steps, resumed after step 10"
    assert "loss nan  accuracy -" in lines[1]
    assert "step 12/12  loss inf" in lines[2]
    assert lines[2].endswith("eta 0 s")


def test_a_terminal_that_goes_away_ends_nothing() -> None:
    stream, clock = Gone(), Clock()
    run_through(open_display(rank=0, stream=stream), clock)
    assert stream.getvalue() == "fashion on 4 ranks: 2 epochs, 20 steps\n"
    run_through(LiveDisplay(cast(TextIO, UnfailingStream(stream)), clock), clock)


def test_the_live_panel_shows_everything() -> None:
    stream, clock = io.StringIO(), Clock()
    console = Console(file=stream, force_terminal=True, color_system=None, width=110)
    run_through(LiveDisplay(stream, clock, console), clock)
    shown = stream.getvalue()
    last = shown[shown.rindex("╭") :]
    for expected in (
        "fashion on 4 ranks",
        "epoch 1/2",
        "step 10/20",
        "5.00 s · eta 5.00 s",
        "0.5123",
        "80.0 %",
        "90.0 %",
        "1,034",
        "12.3 ms hidden + 1.20 ms exposed",
    ):
        assert expected in last
    assert "a [note] that is no markup" in shown
    assert "train loss 0.5" in shown
    assert shown.rstrip("\n").endswith("\x1b[?25h"), "the cursor is shown again"


def test_the_live_panel_lets_go_of_the_terminal_on_errors() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80)
    with (
        pytest.raises(RuntimeError, match="lost"),
        LiveDisplay(stream, Clock(), console) as display,
    ):
        display.start("digits", total_steps=3, num_epochs=1)
        raise RuntimeError("lost")
    assert stream.getvalue().rstrip("\n").endswith("\x1b[?25h")


def test_other_ranks_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    display = open_display(rank=1)
    assert isinstance(display, SilentDisplay)
    run_through(display, Clock())
    assert capfd.readouterr() == ("", "")


def test_what_is_no_terminal_gets_plain_lines_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    display = open_display(rank=0)
    assert isinstance(display, PlainDisplay)
    display.note("here")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "here\n")


@pytest.mark.parametrize(
    ("terminal", "encoding", "kind"),
    [
        ("xterm-256color", "utf-8", LiveDisplay),
        ("dumb", "utf-8", PlainDisplay),
        ("", "utf-8", PlainDisplay),
        ("xterm", "ascii", PlainDisplay),
    ],
)
def test_a_terminal_gets_the_panel_when_it_can_show_it(
    monkeypatch: pytest.MonkeyPatch, terminal: str, encoding: str, kind: type[Display]
) -> None:
    monkeypatch.setenv("TERM", terminal)
    master, slave = pty.openpty()
    try:
        with open(slave, "w", encoding=encoding) as stream:
            assert is_capable(stream) == (kind is LiveDisplay)
            assert isinstance(open_display(rank=0, stream=stream), kind)
    finally:
        os.close(master)


def test_the_time_left_comes_from_steps_after_the_first() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.start(100, first_step=40)
    assert pace.eta_seconds is None
    clock.seconds += 60
    pace.advance(41)
    assert pace.eta_seconds is None
    clock.seconds += 4
    pace.advance(43)
    assert pace.eta_seconds == 57 * 2.0
    assert pace.elapsed_seconds == 64
    pace.advance(100)
    assert pace.is_done
    assert pace.eta_seconds == 0


def test_sparklines() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0]) == "▁"
    assert sparkline([0.0, 1.0, 2.0]) == "▁▅█"
