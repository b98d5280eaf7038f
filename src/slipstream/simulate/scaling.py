"""Many clusters, many planners: step time, speed-up and scaling efficiency.

With N ranks, each on a batch of its own, and compute the step of one rank alone:

    speedup = N compute / step        efficiency = speedup / N = compute / step
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from slipstream.cluster import Cluster
from slipstream.costs import Costs, Wire
from slipstream.errors import CostError, PlanError
from slipstream.plan import Plan, plan_step, time_step
from slipstream.plan.planners import DEFAULT_TOLERANCE
from slipstream.plan.sparsity import Sparsity
from slipstream.simulate.step import StepSimulation, simulate_step
from slipstream.simulate.variation import Percentiles, Variation, draw_steps
from slipstream.trace import Trace

_MOST_DIGITS = 18
DEFAULT_PLANNERS = ("wfbp", "single", "ddp", "mgwfbp", "optimal")
Source = Literal["measured", "formula"]


@dataclass(frozen=True)
class PlannerChoice:
    """A planner with its options, and what to call it in tables."""

    name: str
    options: Mapping[str, int | str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> PlannerChoice:
        """From "NAME" or "NAME:option=value,...", such as "fixed:cap_bytes=4194304".

        Raises PlanError where the text is not of that form; names are checked when planning.
        """
        name, _, rest = text.partition(":")
        options: dict[str, int | str] = {}
        for part in filter(None, rest.split(",")):
            option, equals, value = part.partition("=")
            if not (option and equals and value):
                raise PlanError(
                    f"{text!r} is no planner: its options are written option=value, with commas "
                    "between them, as in fixed:cap_bytes=4194304."
                )
            if value.isdecimal() and len(value) > _MOST_DIGITS:
                raise PlanError(
                    f"{option}={reprlib.repr(value)} of planner {name!r} is too large; a number has"
                    f" at most {_MOST_DIGITS} digits."
                )
            options[option] = int(value) if value.isdecimal() else value
        return cls(name, options)

    def __str__(self) -> str:
        options = ",".join(f"{option}={value}" for option, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name


@dataclass(frozen=True)
class Allowed:
    """What planners may use; see `plan_step`, which refuses limits that a planner cannot keep."""

    tolerance: float = DEFAULT_TOLERANCE
    wires: Sequence[Wire] = ("float32",)
    collectives: Sequence[str] = ("native",)
    max_bucket_bytes: int | None = None
    sparsity: Sparsity | None = None

    def plan(self, planner: PlannerChoice, trace: Trace, costs: Costs) -> Plan:
        """A plan by this planner. Raises what `plan.plan_step` raises."""
        common = ("tolerance", "max_bucket_bytes", "allow", "collectives", "sparsity")
        for name in planner.options:
            if name in common:
                raise PlanError(
                    f"{name!r} is not an option of planner {planner.name!r}, but a setting of all."
                )
        return plan_step(
            planner.name,
            trace,
            costs,
            tolerance=self.tolerance,
            max_bucket_bytes=self.max_bucket_bytes,
            allow=self.wires,
            collectives=self.collectives,
            sparsity=self.sparsity,
            **planner.options,
        )


@dataclass(frozen=True)
class ScalingRow:
    """One cluster and one planner.

    costs: "measured", or "formula" where at least one bucket's cost comes from the links.
    percentiles: of the step, where variation was asked for.
    """

    nodes: int
    ranks: int
    planner: str
    num_buckets: int
    step_seconds: float
    exposed_seconds: float
    lower_bound_seconds: float | None
    speedup: float
    efficiency: float
    costs: Source
    percentiles: Percentiles | None = None


def cluster_of(costs: Costs, nodes: int) -> Cluster:
    """A cluster of so many nodes like that of the costs.

    Raises CostError where its nodes differ, so that nobody can say what more of them would be.
    """
    shape = costs.cluster.ranks_per_node
    if nodes == len(shape):
        return costs.cluster
    if len(set(shape)) > 1:
        raise CostError(
            f"The cluster's nodes hold different numbers of ranks ({', '.join(map(str, shape))}), "
            f"so {nodes} such nodes are not defined; give a cluster file with equal nodes."
        )
    return Cluster.regular(nodes, shape[0])


@dataclass(frozen=True)
class Scenario:
    """A plan on a cluster; label: what to call it in tables."""

    label: str
    costs: Costs
    plan: Plan

    def simulate(self, trace: Trace) -> StepSimulation:
        """Its step as a timeline. Raises what `simulate_step` raises."""
        return simulate_step(trace, self.costs, self.plan)

    def row(self, trace: Trace, variation: Variation | None = None) -> ScalingRow:
        """Its row, with percentiles if the steps vary. Raises what `plan.time_step` raises."""
        timing = time_step(trace, self.costs, self.plan)
        ranks, compute = self.costs.cluster.world_size, trace.compute_seconds
        drawn = None
        if variation is not None:
            drawn = Percentiles.of(draw_steps(trace, self.plan, timing, variation, ranks))
        return ScalingRow(
            nodes=self.costs.cluster.nodes,
            ranks=ranks,
            planner=self.label,
            num_buckets=len(self.plan.reduce) + len(self.plan.gather or ()),
            step_seconds=timing.step_seconds,
            exposed_seconds=timing.exposed_seconds,
            lower_bound_seconds=self.plan.lower_bound_seconds,
            speedup=ranks * compute / timing.step_seconds,
            efficiency=compute / timing.step_seconds,
            costs=self.source,
            percentiles=drawn,
        )

    @property
    def source(self) -> Source:
        """Where the costs of its buckets come from; see `ScalingRow.costs`."""
        plan = self.plan
        operation = "all_reduce" if plan.gather is None else "reduce_scatter"
        used = chain(
            ((bucket.collective, operation, bucket.wire) for bucket in plan.reduce),
            ((bucket.collective, "all_gather", bucket.wire) for bucket in plan.gather or ()),
        )
        return "measured" if all(key in self.costs.measured for key in used) else "formula"


def scenarios(
    trace: Trace,
    costs: Costs,
    node_counts: Sequence[int],
    planners: Sequence[PlannerChoice],
    allowed: Allowed | None = None,
) -> Iterator[Scenario]:
    """Every planner on every number of nodes, in that order.

    Raises CostError where a cluster of that size has no costs, and what the planners raise.
    """
    allowed = allowed or Allowed()
    for nodes in node_counts:
        there = costs.at(cluster_of(costs, nodes))
        for planner in planners:
            yield Scenario(str(planner), there, allowed.plan(planner, trace, there))


def simulate_scaling(
    trace: Trace,
    costs: Costs,
    node_counts: Sequence[int],
    planners: Sequence[PlannerChoice],
    *,
    allowed: Allowed | None = None,
    variation: Variation | None = None,
) -> list[ScalingRow]:
    """The rows of all `scenarios`. Raises what they raise."""
    found = scenarios(trace, costs, node_counts, planners, allowed)
    return [scenario.row(trace, variation) for scenario in found]
