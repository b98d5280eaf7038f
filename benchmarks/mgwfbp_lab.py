"""The lab's part of docs/reproduction/mg-wfbp.md: the paper's comparison on an emulated cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import Figure
from lab_evaluation import Measured, measured
from lab_rows import PAPER_PLANNERS
from markers import markdown_table
from mgwfbp_model import order
from mgwfbp_sections import Section

TITLES = {"wfbp": "WFBP", "single": "single", "mgwfbp": "MG-WFBP", "optimal": "optimum"}


def lab_run(path: Path) -> Section:
    """The section with its heading and its tables; empty where nothing was measured.

    path: the last line of `lab_plans.py --paper`. Raises ValueError where it holds something else.
    """
    if not path.exists():
        return Section("", [])
    document: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    rows = [row for row in measured(document.get("rows", {})) if _is_complete(row)]
    if not rows or document.get("quick", True):
        raise ValueError(f"{path} holds no whole run of `lab_plans.py --paper`.")
    parts = ["## Measured: the paper's comparison in the lab", _setting(rows[0])]
    figures, ratios = [], {}
    for row in rows:
        parts += [f"{row.title}, {row.fields['tensors']} tensors:", _table(row)]
        times = [row.seconds(name) for name in ("wfbp", "single", "mgwfbp")]
        figures.append(Figure(f"lab, {row.title}: order measured", order(*times)))
        for name in ("mgwfbp", "optimal"):
            ratios[f"lab_{row.fields['model']}_{name}_over_wfbp"] = row.ratio(name, "wfbp").median
    return Section("\n\n".join(parts), figures, ratios)


def _is_complete(row: Measured) -> bool:
    return all(row.has(name) for name in PAPER_PLANNERS)


def _setting(row: Measured) -> str:
    bound = " (the lab warns that processors may be the limit)"
    return (
        f"`python benchmarks/lab_plans.py --paper`: {row.fields['nodes']} emulated nodes of one "
        f"rank on links of {row.fields['rate']}{'' if row.link_bound else bound}, real collectives "
        "of Gloo, compute slept through as the trace says. All four train in turns in one run; "
        "plans and predictions come from an earlier one. Steps are medians over turns, ratios "
        "medians of pairs with their bootstrap interval."
    )


def _table(row: Measured) -> str:
    lines = []
    for name in PAPER_PLANNERS:
        ratio = row.ratio(name, "wfbp")
        lines.append(
            [
                TITLES[name],
                str(row.num_buckets(name)),
                f"{row.seconds(name) * 1e3:.0f} ms",
                f"{ratio.median:.2f} ({ratio.lower:.2f} to {ratio.upper:.2f})",
                f"{row.predicted(name) * 1e3:.0f} ms",
                f"{row.error(name):+.1%}",
                f"{row.fields['compute_seconds'] / row.seconds(name):.0%}",
            ]
        )
    head = ["plan", "buckets", "step", "step / WFBP's", "predicted", "predicted / measured - 1"]
    return markdown_table([*head, "efficiency"], lines)
