"""``slipstream simulate``: predicted steps for many clusters and planners."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.options import (
    ClusterOption,
    CollectiveOption,
    DenseOption,
    DensityOption,
    JitterOption,
    NetworkJitterOption,
    OverwriteOption,
    SeedOption,
    SelectorOption,
    SparseOption,
    StepsOption,
    StragglersOption,
    ToleranceOption,
    TraceOption,
    ValuesOption,
    WireOption,
)
from slipstream.cli.output import print_document
from slipstream.cli.tables import table, warn

if TYPE_CHECKING:
    from slipstream.costs import Costs
    from slipstream.simulate import Allowed, ScalingRow, Scenario, Variation
    from slipstream.trace import Trace

_Planners = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[:OPTION=VALUE,...]",
        help="Repeat for several.  [default: wfbp, single, ddp, mgwfbp, optimal]",
    ),
]
_Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Plot step and efficiency: .svg or .png.")
]
_Nodes = Annotated[
    str | None,
    typer.Option(metavar="N,N,...", help="Numbers of nodes.  [default: the cluster file's]"),
]
_Plan = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Simulate this plan and no planner.")
]
_Json = Annotated[
    bool, typer.Option("--json", help="Print the rows as JSON, alone on standard output.")
]
_Timeline = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the steps on the most nodes for Perfetto."),
]


def simulate(
    trace: TraceOption,
    cluster: ClusterOption,
    nodes: _Nodes = None,
    planner: _Planners = None,
    plan: _Plan = None,
    tolerance: ToleranceOption = 0.005,
    collective: CollectiveOption = None,
    wire: WireOption = None,
    density: DensityOption = None,
    sparse: SparseOption = None,
    values: ValuesOption = None,
    selector: SelectorOption = None,
    dense: DenseOption = None,
    jitter: JitterOption = 0.0,
    stragglers: StragglersOption = "0",
    network_jitter: NetworkJitterOption = 0.0,
    steps: StepsOption = 1000,
    seed: SeedOption = 0,
    plot: _Plot = None,
    timeline: _Timeline = None,
    overwrite: OverwriteOption = False,
    as_json: _Json = False,
) -> None:
    """Predict step time, speed-up and scaling efficiency, planner by planner.

    Costs are measured ones where the cluster file has them, else by formula from its links. With
    --jitter, --stragglers or --network-jitter the steps differ, and percentiles are shown.
    """
    from slipstream.cli.predicting import (
        allowed_of,
        formula_notes,
        read_costs,
        sparsity_of,
        unused_notes,
        variation_of,
    )
    from slipstream.simulate import PlannerChoice, load_trace

    if plan is not None and planner:
        raise typer.BadParameter("--plan is simulated as it is; leave out --planner")
    outputs = _Outputs(plot, timeline, overwrite)
    outputs.check()
    variation = variation_of(jitter, stragglers, network_jitter, steps, seed)
    recorded, costs = load_trace(trace), read_costs(cluster)
    names = [PlannerChoice.parse(text).name for text in planner or ()]
    allowed = allowed_of(tolerance, wire, collective, costs, names)
    sparsity = sparsity_of(recorded, density, dense, sparse, values, selector)
    allowed = replace(allowed, sparsity=sparsity)
    found = _scenarios(recorded, costs, nodes, planner, plan, allowed)
    rows = [scenario.row(recorded, variation) for scenario in found]
    notes = [*recorded.warnings(), *unused_notes(wire, collective), *formula_notes(costs, found)]
    warn(notes)
    outputs.write(recorded, found, rows)
    if as_json:
        print_document(_document(recorded, variation, rows, notes), sys.stdout)
    else:
        _show(recorded, rows)


def _scenarios(
    trace: Trace,
    costs: Costs,
    nodes: str | None,
    planners: Sequence[str] | None,
    plan: Path | None,
    allowed: Allowed,
) -> list[Scenario]:
    from slipstream.cli.predicting import node_counts, stored_scenarios
    from slipstream.simulate import DEFAULT_PLANNERS, PlannerChoice, scenarios

    counts = node_counts(nodes) if nodes else [costs.cluster.nodes]
    if plan is not None:
        return stored_scenarios(plan, trace, costs, counts)
    choices = [PlannerChoice.parse(text) for text in planners or DEFAULT_PLANNERS]
    return list(scenarios(trace, costs, counts, choices, allowed))


def _document(
    trace: Trace, variation: Variation | None, rows: Sequence[ScalingRow], notes: Sequence[str]
) -> dict[str, Any]:
    return {
        "model": trace.model,
        "compute_seconds": trace.compute_seconds,
        "variation": asdict(variation) if variation else None,
        "rows": [asdict(row) for row in rows],
        "warnings": list(notes),
    }


@dataclass(frozen=True)
class _Outputs:
    """The files that were asked for."""

    plot: Path | None
    timeline: Path | None
    overwrite: bool

    def check(self) -> None:
        """Raises SlipstreamError, before anything is computed, where one cannot be written."""
        from slipstream.outputs import check_output, same_output
        from slipstream.simulate import plot_kind

        if self.plot is not None:
            plot_kind(self.plot)
            check_output(self.plot, "--plot", overwrite=self.overwrite)
        if self.timeline is not None:
            if self.plot is not None and same_output(self.plot, self.timeline):
                raise typer.BadParameter(f"--plot and --timeline name one file, {self.plot}")
            check_output(self.timeline, "--timeline", overwrite=self.overwrite)

    def write(self, trace: Trace, found: Sequence[Scenario], rows: Sequence[ScalingRow]) -> None:
        """Writes them and says so on standard error. Raises SlipstreamError."""
        from slipstream.outputs import write_output
        from slipstream.simulate import chrome_trace, plot_kind, plot_scaling

        if self.plot is not None:
            title = f"{trace.model}, batch of {trace.batch_size} a rank"
            drawn = plot_scaling(rows, title, plot_kind(self.plot))
            write_output(self.plot, drawn, "--plot", overwrite=self.overwrite)
            print(f"plot written to {self.plot}", file=sys.stderr)
        if self.timeline is not None:
            most = max(row.nodes for row in rows)
            steps = {
                f"{scenario.label}, {most} nodes": scenario.simulate(trace)
                for scenario in found
                if scenario.costs.cluster.nodes == most
            }
            text = json.dumps(chrome_trace(steps))
            write_output(self.timeline, text.encode(), "--timeline", overwrite=self.overwrite)
            print(
                f"timeline written to {self.timeline}; open it at ui.perfetto.dev", file=sys.stderr
            )


def _show(trace: Trace, rows: Sequence[ScalingRow]) -> None:
    from slipstream.words import duration, percent

    varies = any(row.percentiles is not None for row in rows)
    head = ["nodes", "ranks", "planner", "buckets", "step", "exposed", "speed-up", "efficiency"]
    head += ["bound"] + (["p50", "p95", "p99"] if varies else []) + ["costs"]
    lines = []
    for row in rows:
        line = [str(row.nodes), str(row.ranks), row.planner, str(row.num_buckets)]
        line += [duration(row.step_seconds), duration(row.exposed_seconds)]
        line += [f"{row.speedup:,.1f}", percent(row.efficiency), duration(row.lower_bound_seconds)]
        if row.percentiles is not None:
            shares = (row.percentiles.p50, row.percentiles.p95, row.percentiles.p99)
            line += [duration(share) for share in shares]
        lines.append([*line, row.costs])
    print(f"{trace.model}, batch of {trace.batch_size} a rank; ", end="")
    print(f"computation alone {duration(trace.compute_seconds)}")
    print(table(head, lines, left={"planner", "costs"}))
    waiting = [row for row in rows if not row.planner.startswith("pipelined")]
    least = {row.nodes: row.step_seconds for row in sorted(waiting, key=_reversed_step)}
    if any(row.planner == "optimal" and row.step_seconds > least[row.nodes] for row in rows):
        print("optimal takes the fewest buckets within --tolerance of the earliest end of")
        print("communication: with --tolerance 0 no plan that waits for its averages is faster.")


def _reversed_step(row: ScalingRow) -> float:
    return -row.step_seconds
