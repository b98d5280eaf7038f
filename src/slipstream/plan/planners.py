"""Planners by name: from a trace and costs to a plan with its predicted step.

wfbp, single, fixed, ddp   by sizes alone (`baselines.py`)
mgwfbp                     the paper's greedy rule (`mgwfbp.py`)
four_minutes               a pool of ready gradients, and a switch of collectives by size
optimal                    exact, then the fewest buckets within a tolerance
pipelined                  reduce-scatter in backward, all-gather in the next forward, each
                           half planned exactly
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import isfinite
from typing import Any

from slipstream.costs import Costs, Operation, Wire, line_near
from slipstream.errors import PlanError
from slipstream.plan.allowed import HALF_WAY, LARGE, OWN_COLLECTIVES, SMALL
from slipstream.plan.baselines import PLANNERS, plan_buckets
from slipstream.plan.bounds import lower_bounds
from slipstream.plan.cutting import as_buckets, cut_half
from slipstream.plan.fewest import fewest
from slipstream.plan.four_minutes import OPTIONS, four_minutes
from slipstream.plan.halves import backward_half, forward_half
from slipstream.plan.lane import Cuts, Lane
from slipstream.plan.menu import Menu
from slipstream.plan.mgwfbp import VARIANTS, mgwfbp
from slipstream.plan.model import Bucket, Gradient, Plan, parameters_sha256
from slipstream.plan.optimal import optimal
from slipstream.plan.sparsity import Sparsity
from slipstream.plan.timing import time_step
from slipstream.trace import Trace

STEP_PLANNERS = ("mgwfbp", "four_minutes", "optimal", "pipelined")
_OPTIONS = {"mgwfbp": ("variant",), "four_minutes": OPTIONS}
PLANNER_NAMES = (*PLANNERS, *STEP_PLANNERS)
DEFAULT_TOLERANCE = 0.005


def plan_step(
    planner: str,
    trace: Trace,
    costs: Costs,
    /,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    max_bucket_bytes: int | None = None,
    allow: Sequence[Wire] = ("float32",),
    collectives: Sequence[str] = ("native",),
    sparsity: Sparsity | None = None,
    **options: Any,
) -> Plan:
    """A plan for this step on these costs, with predicted_step_seconds and lower_bound_seconds.

    planner: one of PLANNER_NAMES; options: the planner's own, such as `cap_bytes` or `variant`.
    Each bucket gets the cheapest of the allowed `collectives` and wires (`allow`); wires other than
    "float32" lose precision. `four_minutes` uses its own two collectives, whatever is allowed, and
    `pipelined`, whose halves only `native` has, that one with "float32", which must be allowed.
    sparsity: gradients that it allows may be sent sparsely instead, in buckets of their own, where
    that costs less; the two planners with ways of their own leave it out.
    tolerance, max_bucket_bytes: for `optimal` and `pipelined`. Of all plans whose communication
    ends at most `tolerance` (relative) after the earliest possible end, theirs has the fewest
    buckets; no bucket exceeds max_bucket_bytes in memory, except by a single gradient.

    Raises PlanError for a planner, an option or a limit that there is not, CostError where nothing
    that is allowed has costs, TraceError where `pipelined` lacks needed_seconds.
    """
    _check(planner, tolerance, max_bucket_bytes, options)
    common: dict[str, Any] = {
        "tolerance": tolerance,
        "max_bucket_bytes": max_bucket_bytes,
        "allow": allow,
    }
    if planner in OWN_COLLECTIVES:
        return _plan(planner, trace, costs, Menu(()), **common, **options)
    dense = costs.choices(collectives, allow)
    plain = _plan(planner, trace, costs, Menu(dense), **common, **options)
    if sparsity is None:
        return plain
    # gradients that may be sparse have buckets of their own, which costs startups
    ways = costs.choices((sparsity.collective,), (sparsity.wire,))
    sparse = _plan(planner, trace, costs, Menu(dense, ways, sparsity), **common, **options)
    return _faster(plain, sparse)


def _faster(plain: Plan, sparse: Plan) -> Plan:
    """The faster one, with the bound that holds for both."""
    steps = [plan.predicted_step_seconds or 0.0 for plan in (plain, sparse)]
    bound = min(plan.lower_bound_seconds or 0.0 for plan in (plain, sparse))
    found = sparse if steps[1] < steps[0] else plain
    return found.model_copy(update={"lower_bound_seconds": bound})


def _plan(
    planner: str,
    trace: Trace,
    costs: Costs,
    menu: Menu,
    /,
    *,
    tolerance: float,
    max_bucket_bytes: int | None,
    allow: Sequence[Wire],
    **options: Any,
) -> Plan:
    half = backward_half(trace)
    exact = partial(_exact, tolerance=tolerance, floor=half.floor_seconds)
    if planner == "pipelined":
        menu, gather_menu = _half_menus(costs, allow)
        gather = _gather(trace, gather_menu, tolerance, max_bucket_bytes)
        reduce = as_buckets(cut_half(half, menu, exact, max_bucket_bytes), menu)
        return _finished(planner, trace, costs, (reduce, menu), (gather, gather_menu))
    if planner == "four_minutes":
        choices = costs.choices((SMALL, LARGE), allow)
        reduce = four_minutes(trace.gradients, choices, **options)
        return _finished(planner, trace, costs, (reduce, Menu(choices)))
    if planner in PLANNERS:
        reduce = _by_sizes(planner, trace, menu, options)
    else:
        cutter = exact if planner == "optimal" else partial(_greedy, **options)
        reduce = as_buckets(cut_half(half, menu, cutter, max_bucket_bytes), menu)
    return _finished(planner, trace, costs, (reduce, menu))


def _half_menus(costs: Costs, allow: Sequence[Wire]) -> tuple[Menu, Menu]:
    collective, wire = HALF_WAY
    if wire not in allow:
        raise PlanError(
            f"Planner 'pipelined' sends {wire}, and only {', '.join(map(str, allow))} may travel; "
            f"allow {wire}, or take another planner."
        )
    halves: tuple[Operation, ...] = ("reduce_scatter", "all_gather")
    scatter, gather = (Menu(costs.choices((collective,), (wire,), half)) for half in halves)
    return scatter, gather


def _finished(
    planner: str,
    trace: Trace,
    costs: Costs,
    reduce: tuple[tuple[Bucket, ...], Menu],
    gather: tuple[tuple[Bucket, ...], Menu] | None = None,
) -> Plan:
    """The plan of these buckets, and how its step will go; each half with what it may choose."""
    shape = costs.cluster.ranks_per_node
    plan = Plan(
        planner=planner,
        model=trace.model,
        parameters_sha256=trace.parameters_sha256 or parameters_sha256(trace.gradients),
        nodes=costs.cluster.nodes,
        ranks_per_node=shape[0] if len(set(shape)) == 1 else shape,
        wait="backward" if gather is None else "forward",
        reduce=reduce[0],
        gather=gather and gather[0],
    )
    menus = [half[1] for half in (reduce, gather) if half]
    return plan.model_copy(
        update={
            "predicted_step_seconds": time_step(trace, costs, plan).step_seconds,
            "lower_bound_seconds": max(b.step_seconds for b in lower_bounds(trace, *menus)),
        }
    )


def _check(
    planner: str, tolerance: float, max_bucket_bytes: int | None, options: dict[str, Any]
) -> None:
    if planner not in PLANNER_NAMES:
        known = ", ".join(PLANNER_NAMES)
        raise PlanError(f"There is no planner {planner!r}; there are {known}.")
    if not (isfinite(tolerance) and tolerance >= 0):
        raise PlanError(f"The tolerance is {tolerance}; it is a share of the step, 0 or more.")
    if max_bucket_bytes is not None:
        if planner not in ("optimal", "pipelined"):
            raise PlanError(f"max_bucket_bytes is not a setting of planner {planner!r}.")
        if max_bucket_bytes < 1:
            raise PlanError(f"max_bucket_bytes is {max_bucket_bytes}; it is at least 1 byte.")
    if planner in STEP_PLANNERS:
        known_options = _OPTIONS.get(planner, ())
        for option in options:
            if option not in known_options:
                takes = ", ".join(known_options) or "no options of its own"
                raise PlanError(f"Planner {planner!r} has no option {option!r}; it takes {takes}.")
        variant = options.get("variant", VARIANTS[0])
        if variant not in VARIANTS:
            raise PlanError(f"mgwfbp has no variant {variant!r}; it has {', '.join(VARIANTS)}.")


def _by_sizes(
    planner: str, trace: Trace, menu: Menu, options: dict[str, Any]
) -> tuple[Bucket, ...]:
    gradients = [Gradient(g.name, g.numel, g.dtype) for g in trace.gradients]
    by_name = {gradient.name: gradient for gradient in trace.gradients}
    sparsity = menu.sparsity if menu.sparse else None
    plan = plan_buckets(planner, gradients, sparsity=sparsity, **options)
    return as_buckets(
        [[by_name[name] for name in bucket.gradients] for bucket in plan.reduce], menu
    )


def _greedy(lane: Lane, **options: Any) -> Cuts:
    startup = line_near(lane.curve, lane.sums[-1]).startup_seconds
    return mgwfbp(lane.ready_seconds, lane.sums, lane.curve, startup, **options)


def _exact(lane: Lane, tolerance: float, floor: float) -> Cuts:
    """floor: before this nothing waits for the channel, so ending earlier is worth nothing."""
    best = optimal(lane)
    return fewest(lane, best, max(best.end_seconds, floor) * (1 + tolerance))


def _gather(
    trace: Trace, menu: Menu, tolerance: float, max_bytes: int | None
) -> tuple[Bucket, ...]:
    half = forward_half(trace)
    cutter = partial(_exact, tolerance=tolerance, floor=half.floor_seconds)
    buckets = cut_half(half, menu, cutter, max_bytes)
    return as_buckets([bucket[::-1] for bucket in reversed(buckets)], menu)
