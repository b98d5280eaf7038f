"""From what the lab measured to figures held against their goals, and to tables (no torch here)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import Figure, Ratio, at_most, paired_ratio
from lab_rows import (
    AUTO,
    DDP_CAPS_MIB,
    DDP_DEFAULT,
    DDP_OUR_SIZES,
    DDP_SCALED,
    PLANNERS,
)
from markers import markdown_table

DDP_NAMES = (
    DDP_DEFAULT,
    *(f"DDP {cap} MiB" for cap in DDP_CAPS_MIB),
    DDP_SCALED,
    DDP_OUR_SIZES,
)
ENGINE_NAMES = (*PLANNERS, AUTO)
HEADLINE_ROW = ("resnet50", "1gbit", 20)
SAME = 1.03
AUTO_LIMIT, HEADLINE_LIMIT, PIPELINED_LIMIT = 1.03, 0.75, 0.90
MEDIAN_ERROR_LIMIT, WORST_ERROR_LIMIT = 0.07, 0.15
CAUSE = (
    "DDP's default closes its first bucket at 1 MiB and keeps the rest, less than 25 MiB, for one "
    "message after the backward; the scaled cap shows what a DDP of fitting size gets"
)


@dataclass(frozen=True)
class Measured:
    """One row as it was measured."""

    key: str
    fields: Mapping[str, Any]

    @property
    def title(self) -> str:
        """The row's name in tables."""
        full = self.fields["bytes"] / 1e6
        what = "computing" if self.fields["computes"] else "sleeping"
        nodes = self.fields["nodes"]
        size = "" if nodes == 4 else f"{nodes} nodes, "
        return f"{size}{self.fields['model']} {full:.0f} MB, {self.fields['rate']}, {what}"

    @property
    def link_bound(self) -> bool:
        """Whether links and not cores decide: nothing computes, and the lab has no doubts."""
        return not (self.fields["computes"] or self.fields["lab_cpu_bound"])

    @property
    def exceeds_backward(self) -> bool:
        """Whether one message with everything takes longer than the backward."""
        return bool(self.fields["all_reduce_seconds"] > self.fields["backward_seconds"])

    def _variant(self, name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.fields["variants"][self.fields["same_as"].get(name, name)]
        return found

    def has(self, name: str) -> bool:
        """Whether the variant ran, or one with the same buckets."""
        return self.fields["same_as"].get(name, name) in self.fields["variants"]

    def seconds(self, name: str) -> float:
        """The variant's median step."""
        seconds: list[float] = self._variant(name)["seconds"]
        return statistics.median(seconds)

    def predicted(self, name: str) -> float:
        """What the earlier run's costs and trace say of it."""
        return float(self._variant(name)["predicted_seconds"])

    def busy(self, name: str) -> float:
        """The share of all processors' time that was in use in a step, 0 to 1: the median."""
        shares: list[float] = self._variant(name)["busy"]
        return statistics.median(shares)

    def lower_bound(self, name: str) -> float:
        """What no plan of this planner's kind can beat, by the same costs and trace."""
        return float(self._variant(name)["lower_bound_seconds"])

    def error(self, name: str) -> float:
        """Predicted / measured - 1."""
        return self.predicted(name) / self.seconds(name) - 1

    def num_buckets(self, name: str) -> int:
        """Buckets that are reduced."""
        return len(self._variant(name)["bucket_bytes"])

    def ratio(self, name: str, other: str) -> Ratio:
        """Of two variants' steps, turn by turn."""
        return paired_ratio(self._variant(name)["seconds"], self._variant(other)["seconds"])

    @property
    def best_ddp(self) -> str:
        """DDP at the setting that was fastest here."""
        return min((n for n in DDP_NAMES if self.has(n)), key=self.seconds)

    @property
    def regime(self) -> str:
        """What planning can gain here, from the measured extremes."""
        if not all(self.has(name) for name in ("wfbp", "single", "optimal")):
            return ""
        best = self.seconds("optimal")
        found = ["network longer than backward" if self.exceeds_backward else "backward is longer"]
        if self.seconds("wfbp") <= SAME * best:
            found.append("merging cannot help")
        if self.seconds("single") <= SAME * best:
            found.append("overlap cannot help")
        return "; ".join(found)


def measured(results: Mapping[str, Any]) -> list[Measured]:
    """The rows, in the order in which they ran."""
    return [Measured(key, fields) for key, fields in results.items()]


def evaluate(results: Mapping[str, Any]) -> tuple[list[Figure], dict[str, float]]:
    """All figures with their goals, and the ratios for the last line of output."""
    rows = measured(results)
    figures = [*_auto(rows), *_headline(rows), *_pipelined(rows), *_predictions(rows)]
    ratios = {}
    for row in rows:
        for name in (AUTO, "optimal", "pipelined"):
            if row.has(name) and row.has(DDP_DEFAULT):
                ratios[f"{row.key}: {name} / best DDP"] = row.ratio(name, row.best_ddp).median
    return figures, ratios


def _with_interval(what: str, ratio: Ratio, limit: float | None = None) -> Figure:
    value = f"{ratio.median:.3f} ({ratio.lower:.3f} to {ratio.upper:.3f})"
    if limit is None:
        return Figure(what, value)
    return Figure(what, value, f"at most {limit:g}", ratio.median <= limit)


def _auto(rows: Iterable[Measured]) -> Iterable[Figure]:
    for row in rows:
        if row.has(AUTO) and row.has(DDP_DEFAULT):
            best = row.best_ddp
            what = f"{row.title}: auto / best DDP ({best})"
            yield _with_interval(what, row.ratio(AUTO, best), AUTO_LIMIT)


def _headline(rows: Iterable[Measured]) -> Iterable[Figure]:
    for row in rows:
        here = (row.fields["model"], row.fields["rate"], round(row.fields["bytes"] / 1e6))
        if here != HEADLINE_ROW or not (row.has(AUTO) and row.has(DDP_DEFAULT)):
            continue
        default, scaled = row.ratio(AUTO, DDP_DEFAULT), row.ratio(AUTO, DDP_SCALED)
        yield _with_interval(f"{row.title}: auto / DDP default", default, HEADLINE_LIMIT)
        yield _with_interval(f"{row.title}: auto / DDP with the cap scaled. Cause: {CAUSE}", scaled)


def _pipelined(rows: Iterable[Measured]) -> Iterable[Figure]:
    for row in rows:
        if row.has("pipelined") and row.has(DDP_DEFAULT):
            best = row.best_ddp
            limit = PIPELINED_LIMIT if row.exceeds_backward else None
            bound = row.lower_bound("pipelined") / row.seconds(best)
            what = f"{row.title}: pipelined / best DDP ({best}; no such plan below {bound:.2f})"
            yield _with_interval(what, row.ratio("pipelined", best), limit)


def _predictions(rows: Sequence[Measured]) -> Iterable[Figure]:
    bound = [row for row in rows if row.link_bound]
    planners = [name for name in PLANNERS if any(row.has(name) for row in bound)]
    for name in planners:
        errors = [abs(row.error(name)) for row in bound if row.has(name)]
        value = f"{statistics.median(errors):.1%} (median), {max(errors):.1%} (worst)"
        yield Figure(f"predicted / measured step, link-bound rows, {name}: error", value)
    errors = [abs(row.error(name)) for row in bound for name in planners if row.has(name)]
    merged = [
        abs(row.error(name))
        for row in bound
        for name in planners
        if row.has(name) and row.num_buckets(name) < row.fields["tensors"]
    ]
    if merged:
        what = "predicted / measured step, link-bound rows, every planner"
        median, worst = statistics.median(errors), max(merged)
        yield at_most(f"{what}: median error", 100 * median, 100 * MEDIAN_ERROR_LIMIT, " %", 1)
        what += " but one bucket a tensor"
        yield at_most(f"{what}: worst error", 100 * worst, 100 * WORST_ERROR_LIMIT, " %", 1)


def tables(results: Mapping[str, Any]) -> list[str]:
    """Markdown: the engine's steps, DDP's, and predictions."""
    rows = measured(results)
    found = [_engine_table(rows)]
    if any(row.has(DDP_DEFAULT) for row in rows):
        found.append(_ddp_table(rows))
        found.append(_pipelined_table(rows))
    return [*found, _prediction_table(rows)]


def _table(title: str, head: list[str], lines: list[list[str]]) -> str:
    return f"{title}\n\n{markdown_table(head, lines)}"


def _milliseconds(row: Measured, name: str) -> str:
    if not row.has(name):
        return ""
    return f"{row.seconds(name) * 1e3:.0f}"


def _engine_table(rows: Iterable[Measured]) -> str:
    lines = [
        [
            row.title,
            f"{row.fields['all_reduce_seconds'] * 1e3:.0f}",
            f"{row.fields['forward_seconds'] * 1e3:.0f}",
            f"{row.fields['backward_seconds'] * 1e3:.0f}",
            *(_milliseconds(row, name) for name in ENGINE_NAMES),
            row.regime,
        ]
        for row in rows
    ]
    title = "The engine, median step in ms, beside an all-reduce of everything at once:"
    head = ["row", "all-reduce", "forward", "backward", *ENGINE_NAMES, "regime"]
    return _table(title, head, lines)


def _ddp_table(rows: Iterable[Measured]) -> str:
    lines = []
    for row in rows:
        if row.has(DDP_DEFAULT):
            best = row.best_ddp
            cells = {name: _milliseconds(row, name) for name in DDP_NAMES}
            cells[best] = f"**{cells[best]}**"
            lines.append([row.title, *cells.values()])
    head = ["row", *(name.removeprefix("DDP ") for name in DDP_NAMES)]
    return _table("torch DDP, median step in ms, by its buckets:", head, lines)


def _pipelined_table(rows: Iterable[Measured]) -> str:
    """How near `pipelined` comes to what it is planned to be, and what holds it up."""
    lines = []
    for row in rows:
        if not (row.has("pipelined") and row.has("optimal") and row.has(DDP_DEFAULT)):
            continue
        best = row.seconds(row.best_ddp)
        cells = [row.lower_bound("pipelined"), row.predicted("pipelined"), row.seconds("pipelined")]
        busy = [f"{row.busy(name):.0%}" for name in ("pipelined", "optimal", row.best_ddp)]
        lines.append([row.title, *(f"{value / best:.2f}" for value in cells), *busy])
    title = (
        "`pipelined` against the best DDP: the bound by bytes alone, the exact optimum of its kind "
        "by the earlier run's costs, and what was measured; beside it the share of all "
        "processors' time in use in a step:"
    )
    head = [
        "row",
        "bound",
        "optimum",
        "measured",
        *(f"busy, {n}" for n in ("pipelined", "optimal", "DDP")),
    ]
    return _table(title, head, lines)


def _prediction_table(rows: Iterable[Measured]) -> str:
    lines = []
    for row in rows:
        cells = [
            f"{row.predicted(name) * 1e3:.0f} ({row.error(name):+.1%})" if row.has(name) else ""
            for name in PLANNERS
        ]
        lines.append([row.title, "yes" if row.link_bound else "no", *cells])
    title = "Predicted step in ms, from the earlier run (against the measured one):"
    return _table(title, ["row", "link-bound", *PLANNERS], lines)
