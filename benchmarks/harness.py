"""What every benchmark shares: options, statistics, the last line of output (no torch here)."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Figure:
    """One measured figure, one row of docs/benchmarks.md.

    what: what was measured; value: the figure with its unit, as a reader should see it; goal: the
    bound it was held against, "" for none; met: whether it was met, None without a goal.
    """

    what: str
    value: str
    goal: str = ""
    met: bool | None = None


def at_most(what: str, value: float, limit: float, unit: str = "", digits: int = 3) -> Figure:
    """A figure that should not exceed its limit."""
    return Figure(
        what, f"{value:.{digits}f}{unit}", f"at most {limit:g}{unit}", bool(value <= limit)
    )


def at_least(what: str, value: float, limit: float, unit: str = "", digits: int = 3) -> Figure:
    """A figure that should reach its limit."""
    return Figure(
        what, f"{value:.{digits}f}{unit}", f"at least {limit:g}{unit}", bool(value >= limit)
    )


def options(description: str | None) -> argparse.ArgumentParser:
    """A parser that has `--quick`; the module's docstring is its help."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="ends within a minute; shows that it works, no more"
    )
    return parser


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios, with a 95 % interval from resampling the pairs."""

    median: float
    lower: float
    upper: float
    num_pairs: int


def paired_ratio(measured: Sequence[float], baseline: Sequence[float], seed: int = 0) -> Ratio:
    """measured[i] / baseline[i]: the median, and the 2.5 % and 97.5 % points of its bootstrap.

    Pairs are resampled whole (10,000 times), so that noise which hit both halves of a pair cancels.
    Raises ValueError unless both have the same number of entries, at least one.
    """
    if len(measured) != len(baseline) or not measured:
        raise ValueError(
            f"{len(measured)} measured against {len(baseline)} baseline steps: no pairs."
        )
    ratios = np.asarray(measured) / np.asarray(baseline)
    picks = np.random.default_rng(seed).integers(len(ratios), size=(10_000, len(ratios)))
    lower, upper = np.quantile(np.median(ratios[picks], axis=1), [0.025, 0.975])
    return Ratio(statistics.median(ratios.tolist()), float(lower), float(upper), len(ratios))


def finish(
    benchmark: str,
    figures: Sequence[Figure],
    ratios: dict[str, float],
    *,
    quick: bool,
    **details: Any,
) -> None:
    """Prints the figures for a reader, then the last line of output: one JSON object.

    A quick run is too short to judge by, so its figures stand without their goals.
    """
    if quick:
        figures = [Figure(figure.what, figure.value) for figure in figures]
    for figure in figures:
        goal = f"   ({figure.goal}: {'met' if figure.met else 'NOT met'})" if figure.goal else ""
        print(f"{figure.what}: {figure.value}{goal}")
    document = {
        "benchmark": benchmark,
        "quick": quick,
        "ratios": {name: round(value, 4) for name, value in ratios.items()},
        "figures": [asdict(figure) for figure in figures],
        **details,
    }
    print(json.dumps(document), flush=True)
