"""``slipstream plan``: which gradients should travel together, why, and how the step will go."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.options import (
    MOST_NODES,
    ClusterOption,
    CollectiveOption,
    DenseOption,
    DensityOption,
    OverwriteOption,
    SelectorOption,
    SparseOption,
    ToleranceOption,
    TraceOption,
    ValuesOption,
    WireOption,
)
from slipstream.cli.output import print_document
from slipstream.cli.tables import table, warn

if TYPE_CHECKING:
    from slipstream.costs import Costs
    from slipstream.plan import Explanation, Plan
    from slipstream.simulate import Allowed, StepSimulation
    from slipstream.trace import Trace

MOST_REASONS = 40
"""More buckets than this are explained only in part; --json has them all."""

_Nodes = Annotated[
    int | None,
    typer.Option(min=1, max=MOST_NODES, help="So many nodes instead of the cluster file's."),
]
_Planner = Annotated[
    str,
    typer.Option(
        metavar="NAME[:OPTION=VALUE,...]",
        help="optimal, pipelined, mgwfbp, four_minutes, ddp, fixed, single or wfbp.",
    ),
]
_MaxBucketBytes = Annotated[
    int | None, typer.Option(min=1, help="Limit of a bucket, for optimal and pipelined.")
]
_Json = Annotated[
    bool, typer.Option("--json", help="Print plan and reasons as JSON, alone on stdout.")
]
_Output = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the plan for training to read.")
]


def plan(
    trace: TraceOption,
    cluster: ClusterOption,
    planner: _Planner = "optimal",
    nodes: _Nodes = None,
    tolerance: ToleranceOption = 0.005,
    max_bucket_bytes: _MaxBucketBytes = None,
    collective: CollectiveOption = None,
    wire: WireOption = None,
    density: DensityOption = None,
    sparse: SparseOption = None,
    values: ValuesOption = None,
    selector: SelectorOption = None,
    dense: DenseOption = None,
    output: _Output = None,
    overwrite: OverwriteOption = False,
    as_json: _Json = False,
) -> None:
    """Plan the communication of a step, and explain the plan.

    Prints the buckets in the order in which they travel: what hides each one's journey, what one
    more merge would cost and, where there is a choice, which collective carries it and what the
    best other one would take; then the predicted step beside what no plan can beat.
    """
    from slipstream.cli import predicting
    from slipstream.outputs import check_output, write_output
    from slipstream.simulate import PlannerChoice, Scenario, cluster_of, load_trace, simulate_step

    if output is not None:
        check_output(output, "--output", overwrite=overwrite)
    recorded = load_trace(trace)
    known = predicting.read_costs(cluster)
    costs = known if nodes is None else known.at(cluster_of(known, nodes))
    choice = PlannerChoice.parse(planner)
    allowed = predicting.allowed_of(
        tolerance, wire, collective, known, [choice.name], max_bucket_bytes
    )
    allowed = replace(
        allowed,
        sparsity=predicting.sparsity_of(recorded, density, dense, sparse, values, selector),
    )
    made = allowed.plan(choice, recorded, costs)
    reasons = _explained(made, recorded, costs, allowed)
    if output is not None:
        write_output(output, made.to_json().encode(), "--output", overwrite=overwrite)
    scenario = Scenario(str(choice), costs, made)
    notes = [*recorded.warnings(), *predicting.unused_notes(wire, collective)]
    notes += predicting.formula_notes(known, [scenario])
    warn(notes)
    if as_json:
        print_document(_document(made, reasons, notes), sys.stdout)
    else:
        _show(made, reasons, simulate_step(recorded, costs, made), str(choice))
        if output is not None:
            print(f"\nplan written to {output}")


def _explained(made: Plan, trace: Trace, costs: Costs, allowed: Allowed) -> Explanation:
    from slipstream.plan import explain

    return explain(
        made,
        trace,
        costs,
        allow=allowed.wires,
        collectives=allowed.collectives,
        sparsity=allowed.sparsity,
    )


def _document(made: Plan, reasons: Explanation, warnings: Sequence[str]) -> dict[str, Any]:
    return {
        "plan": made.model_dump(mode="json"),
        "step_seconds": reasons.timing.step_seconds,
        "exposed_seconds": reasons.timing.exposed_seconds,
        "lower_bounds": [asdict(bound) for bound in reasons.bounds],
        "distance_to_lower_bound": reasons.distance,
        "unmerged_step_seconds": reasons.unmerged_step_seconds,
        "single_step_seconds": reasons.single_step_seconds,
        "best_step_seconds": reasons.best_step_seconds,
        "buckets": [
            {
                **{k: v for k, v in vars(reason).items() if k not in ("bucket", "timing", "ways")},
                **asdict(reason.timing),
                "ways": [asdict(way) for way in reason.ways],
                "text": str(reason),
            }
            for reason in reasons.buckets
        ],
        "summary": reasons.summary(),
        "warnings": list(warnings),
    }


def _show(made: Plan, reasons: Explanation, step: StepSimulation, planner: str) -> None:
    from slipstream.simulate import LEGEND, picture

    buckets = reasons.buckets
    count = "1 bucket" if len(buckets) == 1 else f"{len(buckets)} buckets"
    print(f"{made.model} on {_shape(made)}, planner {planner}: {count}\n")
    computation, channel = picture(step)
    print(f"computation  {computation}\nchannel      {channel}\n             ({LEGEND})\n")
    shown = buckets[:MOST_REASONS]
    for reason in shown:
        print(f"  {reason}")
        if by := reason.by():
            print(f"      {by}")
    if len(shown) < len(buckets):
        print(f"  ... and {len(buckets) - len(shown)} more (--json has them all)")
    print(f"\n{_bounds(reasons)}\n")
    for sentence in reasons.summary():
        print(f"  {sentence}")


def _bounds(reasons: Explanation) -> str:
    from slipstream.words import duration, percent

    step = reasons.timing.step_seconds
    rows = [("predicted step", duration(step), "", "")]
    for bound in reversed(reasons.bounds):
        above = percent(step / bound.step_seconds - 1)
        rows.append((f"bound: {bound.kind}", duration(bound.step_seconds), above, bound.reason))
    return table(("  ", "time", "step above it", "for"), rows, left=("  ", "for"))


def _shape(made: Plan) -> str:
    nodes = "1 node" if made.nodes == 1 else f"{made.nodes} nodes"
    ranks = made.ranks_per_node
    if isinstance(ranks, int):
        each = " each" if made.nodes > 1 else ""
        return f"{nodes} with {'1 rank' if ranks == 1 else f'{ranks} ranks'}{each}"
    return f"{nodes} with {', '.join(map(str, ranks))} ranks"
