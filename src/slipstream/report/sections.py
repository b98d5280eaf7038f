"""The parts of a report below its headline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from slipstream.report import gantt
from slipstream.report.markup import Child, Markup, el
from slipstream.report.records import Record, finite, number
from slipstream.report.run import Run
from slipstream.report.timeline import Span, StepTimeline, read_timeline, verdict
from slipstream.words import count, duration, percent, plain, size

_MOST_ROWS = 200
_MOST_BITS = 1024


def notices(run: Run) -> Markup | None:
    """What is missing or damaged, in sentences."""
    if not run.notices:
        return None
    return el("ul", [el("li", notice) for notice in run.notices], class_="notices")


def last_timeline(run: Run) -> StepTimeline | None:
    """The latest timeline that can be drawn."""
    drawn = (read_timeline(record) for record in reversed(run.of("timeline")))
    return next((timeline for timeline in drawn if timeline is not None), None)


def step_timeline(timeline: StepTimeline | None) -> Markup:
    """The Gantt chart with its verdict and its key."""
    if timeline is None:
        return el("p", "No step's timeline was recorded.", class_="empty card")
    names = (
        ("input", "input"),
        ("forward", "forward"),
        ("backward", "backward"),
        ("hidden", "communication, hidden"),
        ("exposed", "communication, exposed"),
        ("update", "update"),
    )
    keys = [el("span", el("i", class_=f"key {css}"), name) for css, name in names]
    return el(
        "figure",
        el("p", verdict(timeline), class_="verdict"),
        el("p", keys, class_="legend"),
        el("div", gantt.draw(timeline), class_="wide"),
        el(
            "p",
            f"Step {count(timeline.step)} on rank 0, {duration(timeline.end_seconds)} long. "
            "Numbers in the communication row are buckets, in launch order; shaded columns are "
            "the time in which the step waited for them.",
            class_="quiet",
        ),
        class_="card",
    )


def plan_table(run: Run, timeline: StepTimeline | None) -> Markup:
    """The plan's buckets; with measured times where the timeline has as many buckets."""
    plan = run.plan
    if plan is None:
        return el("p", "No plan was found.", class_="empty card")
    total = sum(bucket.bytes for bucket in plan.reduce)
    largest = max((bucket.bytes for bucket in plan.reduce), default=0) or 1
    spans = timeline.row("communication") if timeline else []
    timed = spans if len(spans) == len(plan.reduce) else []
    head = ["bucket", "gradients", "size", "", "collective", "wire"]
    head += ["took", "exposed"] if timed else []
    rows = []
    for index, bucket in enumerate(plan.reduce[:_MOST_ROWS]):
        cells: list[Child] = [
            str(index),
            _names(bucket.gradients),
            size(bucket.bytes),
            _meter(bucket.bytes / largest),
            bucket.collective,
            str(bucket.wire),
        ]
        if timed and timeline is not None:
            cells += _times(timed[index], timeline)
        rows.append(cells)
    awaited = {
        "backward": "the end of backward",
        "update": "the optimizer's update",
        "forward": "the next forward",
    }[plan.wait]
    buckets = "1 bucket" if len(plan.reduce) == 1 else f"{len(plan.reduce)} buckets"
    intro = (
        f"Planner {plan.planner}: {buckets}, {size(total)} of gradients in a "
        f"step, averaged in this order and awaited at {awaited}."
    )
    return el("div", el("p", intro), _table(head, rows), _left_out(plan.reduce), class_="card")


def plan_history(run: Run) -> Markup | None:
    """The plans by their steps, predicted beside measured; None where there was only one."""
    entries = run.plans.plans if run.plans else ()
    if len(entries) < 2 and not any(entry.reason for entry in entries):
        return None
    head = ["from step", "planner", "buckets", "step predicted", "step measured", "decision"]
    rows = [
        [
            count(entry.step),
            entry.plan.planner,
            count(len(entry.plan.reduce)),
            duration(entry.plan.predicted_step_seconds),
            duration(entry.measured_step_seconds),
            entry.reason,
        ]
        for entry in entries[-_MOST_ROWS:]
    ]
    intro = "Plans in the order in which they came into force; steps are counted from 0."
    return el("div", el("p", intro), _table(head, rows), class_="card")


def sparse_table(run: Run) -> Markup | None:
    """What sending a share of the elements took, by epochs; None where all was sent in full."""
    records = run.of("sparse")
    if not records:
        return None
    head = ["epoch", "sent between nodes", "selecting, a step", "compression", "residual norm"]
    rows = [
        [
            count(finite(record, "epoch")),
            size(finite(record, "sent_bytes")),
            duration(finite(record, "selection_seconds")),
            _plain(record, "compression"),
            _plain(record, "residual_norm"),
        ]
        for record in records[-_MOST_ROWS:]
    ]
    intro = (
        "Sparse buckets: bytes of all ranks in an epoch, without headers; compression is bytes of "
        "gradients for each byte that was selected from them; the residual is what is kept for "
        "later."
    )
    return el("div", el("p", intro), _table(head, rows), class_="card")


def events(run: Run) -> Markup:
    """Epochs with their evaluations in one table; skipped steps and resumes as sentences."""
    kinds = ("epoch", "evaluation")
    found: dict[str, dict[str, Record]] = {}
    for record in run.records:
        if record["kind"] in kinds:
            found.setdefault(str(record.get("epoch", "-")), {})[record["kind"]] = record
    rows = [
        _epoch_row(name, *(both.get(kind, {}) for kind in kinds)) for name, both in found.items()
    ]
    head = ["epoch", "step", "train loss", "train accuracy", "test loss", "test accuracy"]
    table = (
        _table([*head, "images/s", "epoch took"], rows[-_MOST_ROWS:])
        if rows
        else el("p", "No epoch was finished and evaluated yet.", class_="empty")
    )
    told = list(_incidents(run))
    items = [el("li", sentence) for sentence in told[:_MOST_ROWS]]
    return el("div", table, el("ul", items) if items else None, _left_out(told), class_="card")


def recipe(run: Run) -> Markup:
    """The resolved recipe, a card for each of its tables."""
    if run.recipe is None:
        shown = el("pre", run.recipe_text) if run.recipe_text else el("p", "No recipe was found.")
        return el("div", shown, class_="card")
    top = {key: value for key, value in run.recipe.items() if not isinstance(value, dict)}
    tables = {key: value for key, value in run.recipe.items() if isinstance(value, dict)}
    cards = [_facts("recipe", top)] if top else []
    cards += [_facts(name, table) for name, table in tables.items()]
    return el("div", cards, class_="cards")


def environment(run: Run) -> Markup:
    """Hardware, system, versions, variables."""
    if run.environment is None:
        return el("p", "The environment was not recorded.", class_="empty card")
    known = {key: _rounded(key, value) for key, value in run.environment.items()}
    packages, variables = known.pop("packages", None), known.pop("variables", None)
    cards = [_facts("machine of rank 0", known)]
    cards += [_facts("packages", packages)] if isinstance(packages, dict) else []
    cards += [_facts("variables", variables)] if isinstance(variables, dict) and variables else []
    return el("div", cards, class_="cards")


def files(run: Run) -> Markup:
    """The summary's remaining facts and the checkpoints."""
    cards = []
    if run.summary:
        rounded = {key: _rounded(key, value) for key, value in run.summary.items()}
        cards.append(_facts("summary.json", rounded))
    if run.checkpoints:
        kept = {checkpoint.name: size(checkpoint.bytes) for checkpoint in run.checkpoints}
        cards.append(_facts("checkpoints", kept))
    if not cards:
        return el("p", "There is neither a summary nor a checkpoint yet.", class_="empty card")
    return el("div", cards, class_="pair")


def _plain(record: Record, field: str) -> str:
    value = finite(record, field)
    return "-" if value is None else plain(value)


def _epoch_row(name: str, epoch: Record, evaluation: Record) -> list[str]:
    step = finite(evaluation or epoch, "step")
    return [
        name,
        count(step),
        _loss(epoch, "train_loss"),
        percent(finite(epoch, "train_accuracy")),
        _loss(evaluation, "test_loss"),
        percent(finite(evaluation, "test_accuracy"), 2),
        count(finite(epoch, "images_per_second")),
        duration(finite(epoch, "seconds")),
    ]


def _incidents(run: Run) -> Iterable[str]:
    for record in run.records:
        if record["kind"] == "skip":
            yield (
                f"Step {count(record['step'])} was skipped: gradient of "
                f"{record.get('parameter', 'an unknown parameter')} not finite on "
                f"ranks {_value(record.get('ranks', '-'))}."
            )
        elif record["kind"] == "resume":
            yield f"Resumed after step {count(record['step'])}."


def _times(span: Span, timeline: StepTimeline) -> list[Child]:
    exposed = timeline.exposed_of(span)
    shown = el("span", duration(exposed), class_="exposed-text") if exposed > 0 else "0 s"
    return [duration(span.seconds), shown]


def _names(names: tuple[str, ...]) -> Markup:
    if len(names) == 1:
        return el("code", names[0])
    ends = el("summary", f"{len(names)}: ", el("code", names[0]), " … ", el("code", names[-1]))
    return el("details", ends, el("p", [[el("code", name), " "] for name in names]))


def _meter(share: float) -> Markup:
    bar = el("rect", width=max(100 * share, 1.0), height=8, rx=3, class_="meter-bar")
    track = el("rect", width=100, height=8, rx=3, class_="track")
    return el("svg", track, bar, viewBox="0 0 100 8", class_="meter", aria_hidden="true")


def _table(head: list[str], rows: list[list[Child]] | list[list[str]]) -> Markup:
    top = el("tr", [el("th", name, scope="col") for name in head])
    body = [el("tr", [el("td", cell) for cell in row]) for row in rows]
    return el("div", el("table", el("thead", top), el("tbody", body)), class_="wide")


def _left_out(rows: Sequence[object]) -> Markup | None:
    left = len(rows) - _MOST_ROWS
    return el("p", f"{left} more are left out.", class_="quiet") if left > 0 else None


def _facts(title: str, facts: Mapping[str, object]) -> Markup:
    pairs = [[el("dt", key), el("dd", _value(value))] for key, value in facts.items()]
    return el("div", el("h3", title), el("dl", pairs), class_="card")


def _rounded(key: str, value: object) -> object:
    """`value` in words by the unit that its name ends with; other values as they are."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if key.endswith("_seconds"):
        return duration(value)
    if key.endswith("_bytes"):
        return size(value)
    return plain(value) if isinstance(value, float) else value


def _value(value: object, depth: int = 3) -> str:
    """Any JSON or TOML value in words; what is nested deeper than `depth` is left out."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple | dict) and depth == 0:
        return "…"
    if isinstance(value, list | tuple):
        return ", ".join(_value(item, depth - 1) for item in value) or "none"
    if isinstance(value, dict):
        pairs = (f"{key}: {_value(item, depth - 1)}" for key, item in value.items())
        return ", ".join(pairs) or "none"
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return "a number with too many digits"
    return "(empty)" if value == "" else str(value)


def _loss(record: Mapping[str, object], field: str) -> str:
    value = number(record, field)
    return "-" if value is None else plain(value)
