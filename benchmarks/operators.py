"""Selectors by size and density on one core, and how much of the largest mstopk finds.

Times: `exact`, `mstopk` (10 samplings), `sampled` and torch.topk of |x| with its values, from 2^16
to 2^27 normal float32 numbers at densities 0.001 and 0.01; all take turns, medians over the turns.
Recall: which share of the k largest of 25.6 million numbers mstopk selects with N samplings, normal
numbers and their cubes.

Renews the measured parts of docs/reproduction/public-cloud.md, except with --quick.
"""

from __future__ import annotations

import platform
import statistics
import sys
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np
import torch

from harness import Figure, finish, options
from markers import markdown_table, renewed
from selection import Work, by_topk, normal, times_of
from slipstream.sparsify import k_of, selector
from slipstream.sparsify.mstopk import MSTopK
from slipstream.words import duration

DOCUMENT = Path(__file__).parents[1] / "docs" / "reproduction" / "public-cloud.md"
DENSITIES = (0.001, 0.01)
RECALL_NUMEL = 25_600_000
SAMPLINGS = (1, 2, 3, 5, 10, 20, 30)


def times(powers: list[int], turns: int) -> tuple[str, dict[str, float]]:
    """The table of medians, and topk / exact by size and density."""
    rows, ratios = [], {}
    ours = {name: selector(name) for name in ("exact", "mstopk", "sampled")}
    for power in powers:
        values = normal(2**power)
        for density in DENSITIES:
            k = k_of(density, len(values))
            works: dict[str, Work] = {n: partial(s.select, values, k) for n, s in ours.items()}
            works["torch.topk"] = partial(by_topk, values, k)
            found = times_of(works, turns)
            medians = {name: statistics.median(seconds) for name, seconds in found.items()}
            ratios[f"2^{power} {density:g}"] = medians["torch.topk"] / medians["exact"]
            rows.append([f"2^{power}", f"{density:g}", *(duration(m) for m in medians.values())])
    return markdown_table(["elements", "density", *ours, "torch.topk"], rows), ratios


def recall(numel: int) -> str:
    """The share of the largest that mstopk finds, by samplings."""
    rows = []
    for what, values in (("normal", normal(numel)), ("cubed normal", normal(numel) ** 3)):
        for density in DENSITIES:
            k = k_of(density, numel)
            right = selector("exact").select(values, k).indices.numpy()
            cells = []
            for samplings in SAMPLINGS:
                found = MSTopK(samplings=samplings).select(values, k).indices.numpy()
                share = len(np.intersect1d(right, found, assume_unique=True)) / k
                cells.append(f"{share:.4f}")
            rows.append([what, f"{density:g}", *cells])
    return markdown_table(["numbers", "density", *(f"N = {n}" for n in SAMPLINGS)], rows)


def main() -> int:
    """Measures, and renews the page."""
    arguments = options(__doc__).parse_args()
    quick: bool = arguments.quick
    torch.set_num_threads(1)
    powers = [16, 18] if quick else [16, 18, 20, 22, 24, 25, 26, 27]
    table, ratios = times(powers, 2 if quick else 5)
    shares = recall(2**18 if quick else RECALL_NUMEL)
    print(f"{table}\n\n{shares}", flush=True)
    if not quick:
        source = (
            f"`python benchmarks/operators.py`, {date.today().isoformat()}; one core "
            f"({platform.machine()}), torch {torch.__version__.split('+')[0]}."
        )
        document = DOCUMENT.read_text(encoding="utf-8")
        document = renewed(document, "operators", f"{source}\n\n{table}")
        document = renewed(document, "recall", f"{source}\n\n{shares}")
        DOCUMENT.write_text(document, encoding="utf-8")
    figures = [Figure(f"torch.topk / exact, {name}", f"{r:.1f}x") for name, r in ratios.items()]
    finish("operators", figures, ratios, quick=quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
