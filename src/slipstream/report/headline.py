"""The top of a report: what was trained on what, how it ended, and the numbers that matter."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from slipstream.report.markup import Markup, el
from slipstream.report.records import Record, finite
from slipstream.report.run import Run
from slipstream.words import count, duration, percent, plain, size


def headline(run: Run) -> Markup:
    """Title, one sentence and tiles."""
    return el(
        "header",
        el(
            "p",
            _logo(),
            "Slipstream training report",
            el("span", run.name, class_="quiet"),
            class_="brand",
        ),
        el("h1", _title(run), " ", _status(run)),
        el("p", _sentence(run), class_="lead"),
        el("div", [_tile(*tile) for tile in _tiles(run)], class_="tiles"),
    )


def _title(run: Run) -> str:
    return str((run.summary or {}).get("recipe") or (run.recipe or {}).get("name") or run.name)


def _status(run: Run) -> Markup:
    if run.summary is None:
        return el("span", "not finished", class_="chip open")
    if run.summary.get("interrupted"):
        return el("span", "interrupted", class_="chip open")
    return el("span", "finished", class_="chip done")


def _sentence(run: Run) -> str:
    """What ran, in words, from what the folder says; unknown parts are left out."""
    recipe, summary = run.recipe or {}, run.summary or {}
    model = _get(recipe, "model", "name")
    data = _get(recipe, "data", "dataset")
    what = f"{model} on {data}" if model and data else run.name
    nodes, per_node = _get(recipe, "cluster", "nodes"), _get(recipe, "cluster", "ranks_per_node")
    ranks = summary.get("world_size")
    if run.plan is not None:
        nodes, per_node = run.plan.nodes, run.plan.ranks_per_node
    where = f", data-parallel over {ranks} ranks" if ranks else ", data-parallel"
    if isinstance(nodes, int) and isinstance(per_node, int):
        where += f" ({nodes} {_plural('node', nodes)} x {per_node} {_plural('rank', per_node)})"
    batch = _get(recipe, "train", "global_batch_size")
    per_step = f", {batch} images in a step" if batch else ""
    done = max((record["step"] for record in run.of("step")), default=0)
    return f"{what}{where}{per_step}; {count(finite(summary, 'steps') or done)} steps done."


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    """Label, value and explanation of each tile; from the summary, else from the records."""
    summary, steps, evaluations = run.summary or {}, run.of("step"), run.of("evaluation")
    last = evaluations[-1] if evaluations else {}
    accuracy = finite(summary, "test_accuracy")
    accuracy = finite(last, "test_accuracy") if accuracy is None else accuracy
    seconds = finite(summary, "train_seconds")
    epochs = [s for s in (finite(r, "seconds") for r in run.of("epoch")) if s is not None]
    seconds = (sum(epochs) if epochs else None) if seconds is None else seconds
    speed = finite(summary, "images_per_second")
    speed = _median(steps, "images_per_second") if speed is None else speed
    hidden = finite(summary, "hidden_communication_seconds")
    exposed = finite(summary, "exposed_communication_seconds")
    extent = "in all"
    if hidden is None or exposed is None:
        hidden = _median(steps, "communication_hidden_seconds")
        exposed = _median(steps, "communication_exposed_seconds")
        extent = "median step"
    memory = finite(summary, "peak_memory_bytes")
    return [
        ("test accuracy", percent(accuracy, 2), _best(evaluations)),
        ("training time", duration(seconds), _recorded(len(run.of("epoch")))),
        ("images/s", count(speed), "of all ranks together"),
        ("communication hidden", _share(hidden, exposed), _traffic(extent, hidden, exposed)),
        (
            "peak memory",
            size(memory),
            "of the rank that used most" if memory is not None else "not recorded",
        ),
    ]


def _recorded(num_epochs: int) -> str:
    return f"{num_epochs} {_plural('epoch', num_epochs)} recorded"


def _best(evaluations: list[Record]) -> str:
    known = [r for r in evaluations if finite(r, "test_accuracy") is not None]
    if not known:
        return "no evaluation yet"
    best = max(known, key=lambda record: float(record["test_accuracy"]))
    loss = finite(known[-1], "test_loss")
    ending = f", test loss {plain(loss)}" if loss is not None else ""
    return f"best {percent(finite(best, 'test_accuracy'), 2)}{ending}"


def _share(hidden: float | None, exposed: float | None) -> str:
    if hidden is None or exposed is None or hidden + exposed <= 0:
        return "-"
    return percent(hidden / (hidden + exposed), 0)


def _traffic(extent: str, hidden: float | None, exposed: float | None) -> str:
    if hidden is None or exposed is None:
        return "not recorded"
    return f"{extent}: {duration(hidden)} hidden, {duration(exposed)} exposed"


def _median(records: Iterable[Record], field: str) -> float | None:
    values = [value for value in (finite(r, field) for r in records) if value is not None]
    return median(values) if values else None


def _tile(label: str, value: str, explanation: str) -> Markup:
    return el(
        "div",
        el("span", label, class_="label"),
        el("strong", value),
        el("span", explanation, class_="quiet"),
        class_="tile",
    )


def _get(recipe: dict[str, object], table: str, key: str) -> object:
    inner = recipe.get(table)
    return inner.get(key) if isinstance(inner, dict) else None


def _plural(noun: str, number: int) -> str:
    return noun if number == 1 else f"{noun}s"


def _logo() -> Markup:
    """Three lines of air that close up behind a moving body."""
    curves = ("M2 6C8 6 9 10 22 10", "M2 12H22", "M2 18C8 18 9 14 22 14")
    return el("svg", [el("path", d=curve) for curve in curves], viewBox="0 0 24 24", class_="logo")
