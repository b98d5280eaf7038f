"""Which curves a report has."""

from __future__ import annotations

from slipstream.report.chart import Chart, Frame, draw
from slipstream.report.markup import Markup, el
from slipstream.report.records import Record, finite
from slipstream.report.run import Run
from slipstream.report.series import series
from slipstream.words import count, duration, percent, plain

_MOST_EPOCH_LINES = 40


def main_curves(run: Run) -> Markup:
    """Loss, accuracy, throughput and communication over the steps."""
    steps, evaluations = run.of("step"), run.of("evaluation")
    train_loss = series("training", "one", steps, "loss")
    test_loss = series("test", "two", evaluations, "test_loss", is_sparse=True)
    train_accuracy = series("training", "one", steps, "accuracy")
    test_accuracy = series("test", "two", evaluations, "test_accuracy", is_sparse=True)
    speed = series("images/s", "one", steps, "images_per_second")
    hidden = series("hidden", "hidden", steps, "communication_hidden_seconds")
    exposed = series("exposed", "exposed", steps, "communication_exposed_seconds")
    return _grid(
        run,
        Chart("Loss", (train_loss, test_loss), plain, may_be_log=True),
        Chart("Accuracy", (train_accuracy, test_accuracy), percent),
        Chart("Throughput", (speed,), count, low=0.0),
        Chart("Communication in a step", (hidden, exposed), duration, low=0.0),
    )


def more_curves(run: Run) -> Markup:
    """What one looks at when something is odd: rate, gradient norm, waits."""
    steps = run.of("step")
    rate = series("learning rate", "one", steps, "learning_rate")
    norm = series("norm", "one", steps, "gradient_norm")
    wait = series("wait", "one", steps, "input_wait_seconds")
    share = series("exposed", "exposed", map(_with_share, steps), "exposed_share")
    return _grid(
        run,
        Chart("Learning rate", (rate,), plain, low=0.0),
        Chart("Gradient norm", (norm,), plain, may_be_log=True),
        Chart("Waiting for input in a step", (wait,), duration, low=0.0),
        Chart("Share of communication that is exposed", (share,), percent, low=0.0),
    )


def _with_share(record: Record) -> Record:
    hidden = finite(record, "communication_hidden_seconds")
    exposed = finite(record, "communication_exposed_seconds")
    total = (hidden or 0.0) + (exposed or 0.0)
    return {**record, "exposed_share": exposed / total if exposed is not None and total else None}


def _grid(run: Run, *charts: Chart) -> Markup:
    frame = _frame(run)
    return el("div", [draw(chart, frame) for chart in charts], class_="pair")


def key(run: Run) -> Markup:
    """What the vertical lines in all curves mean."""
    frame = _frame(run)
    parts = ["Point at a curve to read its values."]
    parts += ["Dotted lines: ends of epochs."] if frame.epoch_ends else []
    parts += ["Red dashed lines: steps that were skipped."] if frame.skips else []
    return el("p", " ".join(parts), class_="quiet")


def _frame(run: Run) -> Frame:
    ends = tuple(float(record["step"]) for record in run.of("epoch"))
    return Frame(
        last_step=float(max((record["step"] for record in run.records), default=1)),
        epoch_ends=ends if len(ends) <= _MOST_EPOCH_LINES else (),
        skips=tuple(float(record["step"]) for record in run.of("skip")),
    )
