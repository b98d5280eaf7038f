"""A plot of step time and scaling efficiency over the number of nodes, one line a planner."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from slipstream.errors import SlipstreamError
from slipstream.simulate.scaling import ScalingRow
from slipstream.words import duration, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Kind = Literal["svg", "png"]
_MARKERS = "os^vDPX*"


def plot_kind(path: Path) -> Kind:
    """What the file's suffix says, PNG or SVG, else raises SlipstreamError; needs no matplotlib."""
    match path.suffix.lower():
        case ".svg":
            return "svg"
        case ".png":
            return "png"
        case _:
            raise SlipstreamError(
                f"A plot is a PNG or an SVG: {path} ends in neither .png nor .svg."
            )


def plot_scaling(rows: Sequence[ScalingRow], title: str, kind: Kind) -> bytes:
    """Draws the rows (at least one); the bytes of an SVG or PNG file.

    With percentiles, whiskers go from the median to the 95th. The same rows give the same bytes.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    with matplotlib.rc_context({"svg.hashsalt": "slipstream", "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        figure.suptitle(title)
        times, shares = figure.subplots(1, 2)
        for index, planner in enumerate(dict.fromkeys(row.planner for row in rows)):
            mine = [row for row in rows if row.planner == planner]
            _draw(times, shares, mine, planner, _MARKERS[index % len(_MARKERS)])
        times.set_ylabel("step")
        times.set_yscale("log")
        times.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        times.yaxis.set_major_formatter(lambda seconds, _: tidy(duration(seconds)))
        times.yaxis.set_minor_formatter(lambda seconds, _: "")
        shares.set_ylabel("scaling efficiency")
        shares.set_ylim(0, 1.05)
        shares.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        for axes in (times, shares):
            _number_of_nodes(axes, sorted({row.nodes for row in rows}))
        times.legend(frameon=False)
        buffer = BytesIO()
        about = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(buffer, format=kind, dpi=150, metadata=about)
    return buffer.getvalue()


def _draw(times: Axes, shares: Axes, rows: Sequence[ScalingRow], planner: str, marker: str) -> None:
    nodes = [row.nodes for row in rows]
    drawn = [row.percentiles for row in rows]
    middles = [row.step_seconds if p is None else p.p50 for row, p in zip(rows, drawn, strict=True)]
    compute = [row.efficiency * row.step_seconds for row in rows]
    line = times.plot(nodes, middles, marker=marker, markersize=5, label=planner)[0]
    if all(p is not None for p in drawn):
        above = [p.p95 - p.p50 for p in drawn if p is not None]
        below = [0.0] * len(above)
        color = line.get_color()
        times.errorbar(nodes, middles, [below, above], fmt="none", ecolor=color, capsize=2)
    efficiency = [seconds / step for seconds, step in zip(compute, middles, strict=True)]
    shares.plot(nodes, efficiency, marker=marker, markersize=5, color=line.get_color())


def _number_of_nodes(axes: Axes, counts: Sequence[int]) -> None:
    axes.set_xlabel("nodes")
    axes.set_xscale("log", base=2)
    size = "medium" if len(counts) <= 10 else "x-small"
    axes.set_xticks(counts, [str(count) for count in counts], fontsize=size)
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3)
