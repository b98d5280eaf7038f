"""The generated parts of docs/reproduction/mg-wfbp.md: published figures beside ours.

Each function gives the Markdown of one part, and the figures that it stands for.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import mgwfbp_published as published
from harness import Figure, at_most
from markers import markdown_table
from mgwfbp_model import (
    folded,
    is_first,
    line_through,
    module_of,
    on_curve,
    order,
    retimed,
    steps_of,
    unit_of,
)
from slipstream.cluster import Cluster
from slipstream.costs import Costs, Line, Links, ring
from slipstream.plan.fewest import fewest
from slipstream.plan.lane import Lane
from slipstream.plan.mgwfbp import mgwfbp
from slipstream.plan.optimal import optimal
from slipstream.simulate import Allowed, PlannerChoice, load_trace, simulate_scaling

SIMULATOR = Links(inter=published.SIMULATOR_LINK)
WORKERS = 16
SURVEYED_WORKERS = 32


class Section(NamedTuple):
    """One generated part."""

    text: str
    figures: list[Figure]
    ratios: Mapping[str, float] = MappingProxyType({})


def ring_constants() -> Section:
    """Startup and rate of the ring for 2 to 64 workers."""
    rows, worst = [], 0.0
    for workers, (startup, rate) in published.RING_CONSTANTS.items():
        line = ring(SIMULATOR, Cluster.regular(workers, 1), "all_reduce")
        worst = max(worst, abs(line.seconds_per_byte / rate - 1))
        rows.append(
            [
                str(workers),
                f"{startup * 1e3:.3f} ms",
                f"{line.startup_seconds * 1e3:.3f} ms",
                f"{rate * 1e9:.3f} ns",
                f"{line.seconds_per_byte * 1e9:.3f} ns",
            ]
        )
    head = ["N", "a, first release: 2 N alpha", "a, ours: 2 (N-1) alpha", "b", "b, ours"]
    figure = at_most("ring constants: largest difference of b", 100 * worst, 0.02, " %")
    return Section(markdown_table(head, rows), [figure])


def golden() -> Section:
    """The greedy rule's worst family: buckets and ends."""
    rows, worst = [], 0.0
    for case in published.GOLDEN:
        line, ready = Line(1.0, 0.1), [0.9 * (j + 1) for j in range(case.tensors)]
        lane = Lane(ready, [9] * case.tensors, line)
        greedy = mgwfbp(ready, lane.sums, line, line.startup_seconds)
        best = optimal(lane)
        exact = fewest(lane, best, best.end_seconds)
        cells = []
        for (count, end), cuts in ((case.greedy, greedy), (case.optimum, exact)):
            ours = lane.end_seconds(cuts)
            worst = max(worst, abs(ours - end))
            cells += [f"{count} / {end:.1f}", f"{len(cuts)} / {ours:.1f}"]
        ratio = lane.end_seconds(greedy) / lane.end_seconds(exact)
        rows.append([str(case.tensors), *cells, f"{ratio:.3f}"])
    head = ["tensors", "greedy", "greedy, ours", "optimum", "optimum, ours", "greedy / optimum"]
    figure = at_most("golden cases: largest difference of an end", worst, 0.05)
    ratios = {"golden_greedy_over_optimum": ratio}
    return Section(markdown_table(head, rows), [figure], ratios)


def independent() -> Section:
    """Steps of a simulation apart from this code, beside ours."""
    rows, worst = [], 0.0
    planners = [PlannerChoice(name) for name in ("wfbp", "single", "ddp", "mgwfbp", "optimal")]
    for case in published.INDEPENDENT:
        links = Links(inter=published.INDEPENDENT_LINKS[case.link])
        ours = simulate_scaling(
            retimed(load_trace(case.trace), case.backward, backward=True),
            Costs(Cluster.regular(1, 1), {}, links),
            [case.workers],
            planners,
            allowed=Allowed(tolerance=0.0),
        )
        cells = []
        counts = (None, None, None, *case.buckets)
        for theirs, row, count in zip(case.steps, ours, counts, strict=True):
            worst = max(worst, abs(row.step_seconds / theirs - 1))
            buckets = f" ({count} / {row.num_buckets})" if count else ""
            cells.append(f"{theirs:g} / {row.step_seconds:.4g}{buckets}")
        rows.append([case.trace, str(case.workers), case.link, *cells])
    head = ["trace", "N", "net", "WFBP", "single", "DDP", "MG-WFBP", "optimum"]
    figure = at_most("independent simulation: largest difference", 100 * worst, 1.0, " %", 2)
    return Section(markdown_table(head, rows), [figure])


def shipped_constants() -> Section:
    """Iterations on 16 workers by the a and b that the published code carries."""
    rows, agree, first = [], 0, [0, 0]
    for case in published.BREAKDOWNS:
        line = published.SHIPPED_LINES[case.fabric]
        line = Line(line.startup_seconds, line.seconds_per_byte * case.bits / 32)
        ours = steps_of(retimed(load_trace(case.trace), case.compute), on_curve(line, WORKERS))
        measured = (case.wfbp, case.single, case.mgwfbp)
        predicted = (ours.wfbp, ours.single, ours.mgwfbp)
        agree += (case.wfbp < case.single) == (ours.wfbp < ours.single)
        first[0] += is_first(case.mgwfbp, case.wfbp, case.single)
        first[1] += is_first(ours.mgwfbp, ours.wfbp, ours.single)
        rows.append(
            [
                _setting(case),
                f"{case.compute:.3f}",
                " / ".join(f"{seconds:.3f}" for seconds in measured),
                " / ".join(f"{seconds:.3f}" for seconds in predicted),
                f"{ours.optimal:.3f}",
                order(*measured),
                order(*predicted),
            ]
        )
    head = ["setting", "compute", "WF / SE / MG, measured", "WF / SE / MG, ours", "optimum, ours"]
    table = markdown_table([*head, "order, measured", "order, ours"], rows)
    count = len(rows)
    figures = [
        Figure(
            "16 workers: MG-WFBP as fast as both others",
            f"{first[0]} measured, {first[1]} predicted, of {count} rows",
        ),
        Figure("16 workers: the faster one of WFBP and single agrees", f"{agree} of {count} rows"),
    ]
    return Section(table, figures)


def _setting(case: published.Breakdown) -> str:
    return f"{case.trace}, {case.fabric}, fp{case.bits}"


def calibrated() -> Section:
    """MG-WFBP's iteration predicted from the two other measured ones."""
    rows, errors = [], []
    for case in published.BREAKDOWNS:
        trace = retimed(load_trace(case.trace), case.compute)
        line = line_through(trace, case.wfbp, case.single)
        ours = steps_of(trace, on_curve(line, WORKERS))
        errors.append(ours.mgwfbp / case.mgwfbp - 1)
        message = case.single - case.compute
        hidden = [(case.single - seconds) / message for seconds in (case.mgwfbp, ours.mgwfbp)]
        rows.append(
            [
                _setting(case),
                f"{line.startup_seconds * 1e3:.2f} ms",
                f"{line.seconds_per_byte * 32 / case.bits * 1e9:.2f} ns",
                f"{case.mgwfbp:.3f}",
                f"{ours.mgwfbp:.3f} ({ours.buckets[0]})",
                f"{ours.optimal:.3f} ({ours.buckets[1]})",
                f"{errors[-1]:+.0%}",
                f"{hidden[0]:.0%} / {hidden[1]:.0%}",
            ]
        )
    head = ["setting", "a", "b per byte sent", "MG, measured", "MG, ours (buckets)"]
    head += ["optimum, ours (buckets)", "ours / measured - 1", "hidden, measured / ours"]
    what = "16 workers, a and b from WF and SE"
    ratios = {"16_workers_predicted_over_measured": 1 + statistics.median(errors)}
    return Section(markdown_table(head, rows), [_errors(what, errors)], ratios)


def _errors(what: str, errors: Sequence[float]) -> Figure:
    least, most = min(errors), max(errors)
    value = f"{statistics.median(errors):+.0%} (median), {least:+.0%} to {most:+.0%}"
    return Figure(f"{what}: predicted / measured MG-WFBP step - 1", value)


def survey() -> Section:
    """Efficiency of 32 workers: MG-WFBP predicted from the two other measured ones."""
    rows, errors = [], []
    for case in published.SURVEY:
        compute = case.batch / case.alone
        trace = retimed(load_trace(case.trace), compute)
        step = {name: 100 * compute / getattr(case, name) for name in ("wfbp", "single", "mgwfbp")}
        line = line_through(trace, step["wfbp"], step["single"])
        ours = steps_of(trace, on_curve(line, SURVEYED_WORKERS))
        errors.append(ours.mgwfbp / step["mgwfbp"] - 1)
        rows.append(
            [
                f"{case.trace}, {case.fabric}",
                f"{case.wfbp:.1f} / {case.single:.1f}",
                f"{line.startup_seconds * 1e3:.2f} ms",
                f"{line.seconds_per_byte * 1e9:.2f} ns",
                f"{case.mgwfbp:.1f}",
                f"{100 * compute / ours.mgwfbp:.1f} ({ours.buckets[0]})",
                f"{100 * compute / ours.optimal:.1f} ({ours.buckets[1]})",
                order(step["wfbp"], step["single"], step["mgwfbp"]),
                order(ours.wfbp, ours.single, ours.mgwfbp),
            ]
        )
    head = ["setting", "WF / SE, measured", "a", "b", "MG, measured", "MG, ours (buckets)"]
    table = markdown_table(
        [*head, "optimum, ours (buckets)", "order, measured", "order, ours"], rows
    )
    return Section(table, [_errors("32 workers, a and b from WF and SE", errors)])


def k80_nodes() -> Section:
    """Images a second on up to 8 nodes: by the simulator's constants, and from WF and SE."""
    rows, first = [], [0, 0]
    for case in published.THROUGHPUTS:
        trace = retimed(load_trace(case.trace), case.batch / case.alone)
        for nodes, images in case.images.items():
            wfbp, single, merged = measured = [case.batch / rate for rate in images]
            ours = steps_of(trace, Costs(Cluster.regular(nodes, 1), {}, SIMULATOR))
            line = line_through(trace, wfbp, single)
            again = steps_of(trace, on_curve(line, nodes))
            first[0] += is_first(merged, wfbp, single)
            first[1] += is_first(ours.mgwfbp, ours.wfbp, ours.single)
            predicted = (ours.wfbp, ours.single, ours.mgwfbp)
            per_byte = (single - trace.compute_seconds) / trace.bytes
            rows.append(
                [
                    f"{case.trace}, {nodes} nodes",
                    " / ".join(f"{rate:.1f}" for rate in images),
                    " / ".join(f"{case.batch / seconds:.1f}" for seconds in predicted),
                    f"{case.batch / ours.optimal:.1f}",
                    order(*measured),
                    order(*predicted),
                    f"{per_byte * 1e9:.2f} ns",
                    f"{case.batch / again.mgwfbp:.1f}",
                ]
            )
    head = ["setting", "WF / SE / MG, measured", "WF / SE / MG, ours", "optimum, ours"]
    head += ["order, measured", "order, ours", "SE's time a byte", "MG from WF and SE"]
    what = "K80, 2 to 8 nodes: MG-WFBP as fast as both others"
    value = f"{first[0]} measured, {first[1]} predicted, of {len(rows)} rows"
    return Section(markdown_table(head, rows), [Figure(what, value)])


def sixty_four_nodes() -> Section:
    """Gains of MG-WFBP with nodes, by how many messages WFBP sends."""
    case = published.THROUGHPUTS[1]
    whole = retimed(load_trace(case.trace), case.batch / case.alone)
    rows, figures, gains = [], [], []
    for what, trace in (
        ("convolution with its norm", folded(whole, unit_of)),
        ("module", folded(whole, module_of)),
        ("tensor", whole),
    ):
        for nodes in (8, 16, 32, 64):
            ours = steps_of(trace, Costs(Cluster.regular(nodes, 1), {}, SIMULATOR))
            gains = [ours.wfbp / ours.mgwfbp, ours.single / ours.mgwfbp]
            efficiency = [
                f"{whole.compute_seconds / seconds:.0%}"
                for seconds in (ours.wfbp, ours.single, ours.mgwfbp, ours.optimal)
            ]
            rows.append(
                [
                    f"{len(trace.gradients)}, one a {what}",
                    str(nodes),
                    *(f"{gain:.2f}" for gain in gains),
                    " / ".join(efficiency),
                    f"{ours.mgwfbp / ours.optimal:.3f}",
                ]
            )
        value = f"{gains[0]:.2f} over WFBP, {gains[1]:.2f} over single"
        figures.append(Figure(f"64 nodes, a message a {what}: MG-WFBP's gain", value))
    head = ["WFBP's messages", "nodes", "MG over WF", "MG over SE"]
    head += ["efficiency WF / SE / MG / optimum", "MG / optimum"]
    ratios = {"64_nodes_wfbp_over_mgwfbp": gains[0], "64_nodes_single_over_mgwfbp": gains[1]}
    return Section(markdown_table(head, rows), figures, ratios)
