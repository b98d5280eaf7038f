"""What ``slipstream plan`` and ``slipstream simulate`` read their arguments with."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from pathlib import Path

import typer

from slipstream.cli.options import MOST_NODES, refuse_without_density
from slipstream.costs import ClusterSpec, Costs, Operation, Wire
from slipstream.errors import PlanError
from slipstream.plan import Bucket, Plan, explain
from slipstream.plan.allowed import check_own, in_words, unused
from slipstream.plan.sparsity import Sparsity
from slipstream.plan.ways import check_allowed
from slipstream.simulate import Allowed, Scenario, Variation, cluster_of
from slipstream.trace import Trace, parameters_sha256
from slipstream.wires import DENSE_WIRES, DenseWire, wires_of
from slipstream.words import counted

_WIRES: dict[str, DenseWire] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
}


def read_costs(path: Path) -> Costs:
    """The costs of a cluster file. Raises CostError where it is damaged."""
    return Costs.of(ClusterSpec.load(path))


def formula_notes(costs: Costs, found: Sequence[Scenario]) -> list[str]:
    """What of these scenarios was not measured although the cluster file holds measurements."""
    here, by_formula = costs.cluster.nodes, [s for s in found if s.source == "formula"]
    if not costs.measured or not by_formula:
        return []
    notes = []
    if others := sorted({s.costs.cluster.nodes for s in by_formula} - {here}):
        notes.append(
            f"Costs were measured on {counted(here, 'node')}; those on {_listed(others)} are by "
            "formula from the links, not measured, and may be off."
        )
    if unmeasured := [s for s in by_formula if s.costs.cluster.nodes == here]:
        labels = dict.fromkeys(scenario.label for scenario in unmeasured)
        ways = dict.fromkeys(way for scenario in unmeasured for way in _by_formula(scenario))
        notes.append(
            f"What {', '.join(labels)} would use ({in_words(ways)}) was not measured on "
            f"{counted(here, 'node')}: those costs are by formula from the links."
        )
    return notes


def _by_formula(scenario: Scenario) -> list[tuple[str, Wire]]:
    """By which ways buckets of the plan go that were not measured."""
    plan = scenario.plan
    halves: list[tuple[Operation, Sequence[Bucket]]] = [
        ("all_reduce" if plan.gather is None else "reduce_scatter", plan.reduce),
        ("all_gather", plan.gather or ()),
    ]
    return [
        (bucket.collective, bucket.wire)
        for operation, buckets in halves
        for bucket in buckets
        if (bucket.collective, operation, bucket.wire) not in scenario.costs.measured
    ]


def _listed(nodes: Sequence[int]) -> str:
    *first, last = nodes
    return (
        f"{', '.join(map(str, first))} and {counted(last, 'node')}"
        if first
        else (counted(last, "node"))
    )


def stored_scenarios(
    path: Path, trace: Trace, costs: Costs, counts: Sequence[int]
) -> list[Scenario]:
    """A plan file on so many nodes, each of which it must have been made for.

    Raises PlanError, naming the file, where it is damaged or made for another model or cluster.
    """
    plan = Plan.load(path)
    digest = trace.parameters_sha256 or parameters_sha256(trace.gradients)
    found = []
    for nodes in counts:
        there = costs.at(cluster_of(costs, nodes))
        try:
            plan.check_made_for(trace.model, digest, there.cluster)
            plan.check_covers(trace.gradients)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error
        # The bound that stands in the file belongs to the costs of the day when it was made.
        bound = explain(plan, trace, there).bounds[-1].step_seconds
        fresh = plan.model_copy(update={"lower_bound_seconds": bound})
        found.append(Scenario(f"{path.name} ({plan.planner})", there, fresh))
    return found


def allowed_of(
    tolerance: float,
    wires: Sequence[str] | None,
    collectives: Sequence[str] | None,
    costs: Costs,
    planners: Sequence[str] = (),
    max_bucket_bytes: int | None = None,
) -> Allowed:
    """What these planners may use: what is asked for, else all that was measured, with float32.

    Raises typer's BadParameter for what there is not, CostError for what is asked for and nobody
    knows the cost of, PlanError for planners that need other collectives than those asked for.
    """
    for wire in wires or ():
        if wire not in _WIRES:
            raise typer.BadParameter(f"there is no wire {wire!r}; there are {', '.join(_WIRES)}")
    for name in collectives or ():
        if name not in DENSE_WIRES:
            known = ", ".join(DENSE_WIRES)
            raise typer.BadParameter(f"there is no collective {name!r}; there are {known}")
    chosen = [_WIRES[wire] for wire in dict.fromkeys(wires or ("float32",))]
    measured = costs.collectives
    if not any(wire in wires_of(name) for name in measured for wire in chosen):
        measured = tuple(DENSE_WIRES)  # by formula, where there are links
    asked = tuple(dict.fromkeys(collectives or ()))
    if asked or wires:
        check_allowed(costs, asked or measured, chosen)
    for planner in planners if asked else ():
        check_own(planner, asked)
    return Allowed(
        tolerance=tolerance,
        wires=chosen,
        collectives=asked or measured,
        max_bucket_bytes=max_bucket_bytes,
    )


def sparsity_of(
    trace: Trace,
    density: float | None,
    dense: Sequence[str] | None,
    sparse: str | None,
    values: str | None,
    selector: str | None,
) -> Sparsity | None:
    """What may be sent sparsely; nothing where no density is given.

    Raises typer's BadParameter for patterns that match nothing, and where anything else is said of
    what is not sent sparsely; PlanError for values that there are not.
    """
    refuse_without_density(
        density is not None, dense=dense, sparse=sparse, values=values, selector=selector
    )
    if density is None:
        return None
    found = Sparsity(
        density=density,
        values=values or "float32",  # type: ignore[arg-type]  # it checks
        collective=sparse or "hitopk",  # type: ignore[arg-type]
        selector=selector or "exact",  # type: ignore[arg-type]
        dense=tuple(dense or ()),
    )
    for pattern in found.unmatched([gradient.name for gradient in trace.gradients]):
        raise typer.BadParameter(f"--dense {pattern!r} matches no gradient of {trace.model}")
    return found


def unused_notes(wires: Sequence[str] | None, collectives: Sequence[str] | None) -> list[str]:
    """What was asked for and goes with nothing else that was."""
    if not collectives:
        return []
    asked = [_WIRES[wire] for wire in wires or ("float32",)]
    return [f"{words}." for words in unused(collectives, asked)]


def node_counts(text: str) -> list[int]:
    """From "4,16,64". Raises typer's BadParameter for anything else than numbers of 1 or more."""
    counts = []
    for part in text.split(","):
        number = part.strip()
        # Python reads no number of some thousand digits.
        if not (number.isdecimal() and len(number) <= 18 and 1 <= int(number) <= MOST_NODES):
            raise typer.BadParameter(
                f"{reprlib.repr(number)} in {reprlib.repr(text)} is no number of nodes from 1 to"
                f" {MOST_NODES:,}; write --nodes 4,16,64"
            )
        counts.append(int(number))
    return list(dict.fromkeys(counts))


def variation_of(
    jitter: float, stragglers: str, network_jitter: float, steps: int, seed: int
) -> Variation | None:
    """How steps differ, or None where they do not.

    Raises typer's BadParameter where `stragglers` is not SHARE or SHARExFACTOR, SlipstreamError
    where a number is out of range.
    """
    share, _, factor = stragglers.partition("x")
    try:
        found = Variation(
            compute_jitter=jitter,
            straggler_share=float(share),
            straggler_slowdown=float(factor or 2),
            network_jitter=network_jitter,
            num_steps=steps,
            seed=seed,
        )
    except ValueError as error:
        raise typer.BadParameter(
            f"--stragglers {stragglers!r} is no share with a factor; write 0.001x3"
        ) from error
    return found if found.varies else None
