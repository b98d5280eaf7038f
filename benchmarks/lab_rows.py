"""What is run in the lab: the rows of the table, and the files of a run (no torch here)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.costs import ClusterSpec
from slipstream.lab import parse_rate
from slipstream.trace import Trace

RATES = ("0.2gbit", "0.5gbit", "1gbit", "2gbit")
LISTS = ("resnet50", "vgg16", "bert_base")
LIST_BYTES = 20e6
MIB = 2**20
SETTLING_BITS_PER_SECOND = 1e9
FULL_SIZE_RATE = REAL_RATE = "1gbit"
AUTO = "auto"
DDP_DEFAULT = "DDP default"
DDP_SCALED = "DDP 25 MiB scaled"
DDP_OUR_SIZES = "DDP our sizes"
DDP_CAPS_MIB = (1, 2, 5, 10, 25, 100)
PLANNERS = ("wfbp", "single", "fixed", "ddp", "mgwfbp", "optimal", "pipelined")
PAPER_PLANNERS = ("wfbp", "single", "mgwfbp", "optimal")


@dataclass(frozen=True)
class Row:
    """One line of the table: a model on an emulated cluster of one rank a node.

    model: a shipped trace whose compute is slept through, or "resnet18", which really computes.
    list_bytes: what the trace's tensors are scaled to, None for their own size. planners: those
    that run in the engine. ddp_caps_mib: explicit caps of torch DDP; where there are none, neither
    DDP nor `auto` takes part.
    """

    model: str
    rate: str
    list_bytes: float | None = LIST_BYTES
    nodes: int = 4
    planners: tuple[str, ...] = PLANNERS
    ddp_caps_mib: tuple[int, ...] = DDP_CAPS_MIB

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Row:
        """The row that `dataclasses.asdict` gave, after a way through JSON."""
        tuples = {name: tuple(fields[name]) for name in ("planners", "ddp_caps_mib")}
        return cls(**{**fields, **tuples})

    @property
    def key(self) -> str:
        """Its name, also in file names."""
        return f"{self.workload}-{self.nodes}x{self.rate}"

    @property
    def workload(self) -> str:
        """What a rank trains."""
        size = f"{self.list_bytes / 1e6:g}MB" if self.list_bytes else "full"
        return f"{self.model}-{size}"

    @property
    def settles(self) -> bool:
        """Whether every variant gets a step that is not counted at the start of its turn.

        Where steps are long, what a barrier leaves behind is too little to see, and only plans
        that gather get one: their steps begin in the one before.
        """
        return self.bits_per_second >= SETTLING_BITS_PER_SECOND and self.list_bytes is not None

    @property
    def bits_per_second(self) -> float:
        """Of each node's link."""
        return parse_rate(self.rate)

    @property
    def computes(self) -> bool:
        """Whether the row computes really."""
        return self.model == "resnet18"


ROWS = (
    *(Row(model, rate) for rate in RATES for model in LISTS),
    Row("resnet50", FULL_SIZE_RATE, list_bytes=None),
    Row("resnet18", REAL_RATE, list_bytes=None),
)
QUICK_ROW = Row(
    "resnet50", "1gbit", LIST_BYTES / 4, 2, planners=("optimal", "pipelined"), ddp_caps_mib=(1,)
)
PAPER_ROWS = tuple(
    Row(model, "1gbit", nodes=8, planners=PAPER_PLANNERS, ddp_caps_mib=())
    for model in ("resnet50", "googlenet")
)


def groups(rows: Sequence[Row]) -> dict[tuple[int, str], list[Row]]:
    """Rows by cluster, nodes and rate: those of one cluster run in one lab."""
    found: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.nodes, row.rate), []).append(row)
    return found


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps what it measures, file by file, so that a run cut short can go on."""

    path: Path

    def cluster(self, nodes: int, rate: str) -> Path:
        """The costs that the earlier run found."""
        return self.path / f"cluster-{nodes}x{rate}.json"

    def trace(self, row: Row) -> Path:
        """The trace that the earlier run found."""
        return self.path / f"trace-{row.key}.json"

    def result(self, row: Row) -> Path:
        """What the measuring run found."""
        return self.path / f"row-{row.key}.json"

    def has_earlier_run(self, row: Row) -> bool:
        """Whether costs and trace of the row are there."""
        return self.cluster(row.nodes, row.rate).exists() and self.trace(row).exists()

    def load_earlier_run(self, row: Row) -> tuple[ClusterSpec, Trace]:
        """Costs and trace. Raises CostError or TraceError for damaged files."""
        return ClusterSpec.load(self.cluster(row.nodes, row.rate)), Trace.load(self.trace(row))

    def forget(self, row: Row) -> None:
        """Removes what there is of a row, so that it is measured anew."""
        for path in (self.cluster(row.nodes, row.rate), self.trace(row), self.result(row)):
            path.unlink(missing_ok=True)

    def write(self, path: Path, document: dict[str, Any]) -> None:
        """Writes a file whole or not at all."""
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(document, indent=1), encoding="utf-8")
        os.replace(draft, path)

    def results(self, rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
        """The rows that are there, by key."""
        return {
            row.key: json.loads(self.result(row).read_text(encoding="utf-8"))
            for row in rows
            if self.result(row).exists()
        }
