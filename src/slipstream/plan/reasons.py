"""Works out the explanation of a plan; `explanation.py` says what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.costs import Costs, Operation, Wire
from slipstream.plan.allowed import HALF_WAY
from slipstream.plan.bounds import lower_bounds
from slipstream.plan.cutting import as_buckets
from slipstream.plan.explanation import BucketReason, Explanation
from slipstream.plan.halves import Half, backward_half, charged_bytes, forward_half
from slipstream.plan.menu import LaneKey, Menu
from slipstream.plan.model import Bucket, Plan
from slipstream.plan.planners import plan_step
from slipstream.plan.sparse_words import sparse_sentences
from slipstream.plan.sparsity import Sparsity, implied
from slipstream.plan.timing import BucketTiming, time_step
from slipstream.plan.ways import Ways
from slipstream.trace import Trace, TraceGradient


def explain(
    plan: Plan,
    trace: Trace,
    costs: Costs,
    *,
    allow: Sequence[Wire] = (),
    collectives: Sequence[str] = (),
    sparsity: Sparsity | None = None,
) -> Explanation:
    """Why the plan is as it is, on these costs.

    allow, collectives, sparsity: what the planner was allowed; if not given, what the plan uses.
    Halves of pipelined plans have one way alone.
    Raises PlanError for a plan of another model, CostError where a collective has no costs.
    """
    used = [*plan.reduce, *(plan.gather or ())]
    sparsity = sparsity or implied(plan.reduce)
    full = [bucket for bucket in used if isinstance(bucket.wire, str)]
    allow = allow or list(dict.fromkeys(bucket.wire for bucket in full)) or ("float32",)
    collectives = collectives or list(dict.fromkeys(b.collective for b in full)) or ("native",)
    if plan.gather is not None:
        collectives, allow = HALF_WAY[:1], HALF_WAY[1:]
    timing = time_step(trace, costs, plan)
    operation: Operation = "all_reduce" if plan.gather is None else "reduce_scatter"
    ways = Ways.of(plan.reduce, costs, collectives, allow, operation, sparsity)
    buckets = _reduce_reasons(plan, trace, timing.reduce, ways)
    gather_menu: Menu | None = None
    if plan.gather is not None and timing.gather is not None:
        gather_ways = Ways.of(plan.gather, costs, collectives, allow, "all_gather")
        gather_menu = gather_ways.menu
        buckets += _gather_reasons(plan.gather, trace, timing.gather, gather_ways)
    bounds = lower_bounds(trace, ways.menu, gather_menu)
    unmerged, single = (
        time_step(trace, costs, _recut(plan, trace, merged, ways.menu, gather_menu)).step_seconds
        for merged in (False, True)
    )
    exact = plan_step(
        "optimal" if plan.gather is None else "pipelined",
        trace,
        costs,
        tolerance=0.0,
        allow=allow,
        collectives=collectives,
        sparsity=sparsity,
    )
    best = time_step(trace, costs, exact.model_copy(update={"wait": plan.wait})).step_seconds
    return Explanation(
        timing=timing,
        bounds=tuple(sorted(bounds, key=lambda bound: bound.step_seconds)),
        buckets=tuple(buckets),
        unmerged_step_seconds=unmerged,
        single_step_seconds=single,
        best_step_seconds=min(best, timing.step_seconds, unmerged, single),
        sparse=sparse_sentences(sparsity, plan, trace, costs.cluster) if sparsity else (),
    )


def _reduce_reasons(
    plan: Plan, trace: Trace, timings: Sequence[BucketTiming], ways: Ways
) -> list[BucketReason]:
    half = backward_half(trace)
    hidden_until = trace.backward_seconds
    if plan.gather is None and plan.wait == "forward":
        hidden_until += trace.input_seconds
    jobs = _Jobs(half, plan.reduce, ways.menu, hidden_until)
    found, free = [], 0.0
    for index, (timing, merge) in enumerate(zip(timings, jobs.merge_costs(), strict=True)):
        first = jobs.first_ready[index]
        takes = timing.end_seconds - timing.start_seconds
        exposed = max(0.0, timing.end_seconds - max(timing.start_seconds, hidden_until))
        reason = BucketReason(
            half="reduce",
            index=index,
            bucket=plan.reduce[index],
            timing=timing,
            busy_seconds=max(0.0, min(free, timing.start_seconds) - first),
            gathering_seconds=max(0.0, timing.ready_seconds - max(free, first)),
            hidden_seconds=takes - exposed,
            exposed_seconds=exposed,
            merge_seconds=merge,
            ways=ways.times(plan.reduce[index], jobs.charged[index], jobs.lanes[index]),
        )
        found.append(reason)
        free = timing.end_seconds
    return found


def _gather_reasons(
    buckets: Sequence[Bucket],
    trace: Trace,
    timings: Sequence[BucketTiming],
    ways: Ways,
) -> list[BucketReason]:
    half = forward_half(trace)
    jobs = _Jobs(half, buckets[::-1], ways.menu, half.floor_seconds)
    merges = [*jobs.merge_costs()[-2::-1], None]
    delay, found = 0.0, []
    for index, timing in enumerate(timings):
        place = len(buckets) - 1 - index
        wanted = half.floor_seconds - jobs.ready[place]
        takes = timing.end_seconds - timing.start_seconds
        stall = max(0.0, timing.end_seconds - (wanted + delay))
        delay += stall
        reason = BucketReason(
            half="gather",
            index=index,
            bucket=buckets[index],
            timing=timing,
            busy_seconds=0.0,
            gathering_seconds=0.0,
            hidden_seconds=max(0.0, takes - stall),
            exposed_seconds=stall,
            merge_seconds=merges[index],
            ways=ways.times(buckets[index], jobs.charged[place], jobs.lanes[place]),
        )
        found.append(reason)
    return found


@dataclass(frozen=True)
class _Job:
    ready: float
    seconds: float
    charged: int
    lane: LaneKey


class _Jobs:
    """The buckets of a half in its own order of time, and what merging two of them would do."""

    def __init__(self, half: Half, buckets: Sequence[Bucket], menu: Menu, floor: float) -> None:
        ready = {
            gradient.name: seconds
            for gradient, seconds in zip(half.gradients, half.ready_seconds, strict=True)
        }
        gradients = {gradient.name: gradient for gradient in half.gradients}
        by_way = {(choice.collective, choice.wire): choice.curve for choice in menu.choices}
        self._menu = menu
        self._floor = floor
        self.first_ready = [min(ready[name] for name in bucket.gradients) for bucket in buckets]
        self.ready = [max(ready[name] for name in bucket.gradients) for bucket in buckets]
        self._jobs = []
        for bucket, at in zip(buckets, self.ready, strict=True):
            charged = sum(charged_bytes(gradients[name]) for name in bucket.gradients)
            curve = by_way[bucket.collective, bucket.wire]
            lanes = {menu.lane_of(gradients[name]) for name in bucket.gradients}
            lane = min(lanes)  # one that holds others, too, has the ways of those
            self._jobs.append(_Job(at, curve.seconds(charged), charged, lane))
        self.charged = [job.charged for job in self._jobs]
        self.lanes = [job.lane for job in self._jobs]

    def merge_costs(self) -> list[float | None]:
        """For each bucket how much longer the half takes with the next one merged into it.

        What follows on the channel turns the end e of what came before into max(e + busy, by), so
        that each merge is tried in constant time. None where the two cannot be merged.
        """
        jobs, count = self._jobs, len(self._jobs)
        busy, by = [0.0] * (count + 1), [self._floor] * (count + 1)
        for k in range(count - 1, -1, -1):
            busy[k] = busy[k + 1] + jobs[k].seconds
            by[k] = max(by[k + 1], jobs[k].ready + busy[k])
        free, found = 0.0, list[float | None]()
        for k in range(count):
            if k + 1 == count or jobs[k].lane != jobs[k + 1].lane:
                found.append(None)
            else:
                together = jobs[k].charged + jobs[k + 1].charged
                seconds = self._menu.curve_of(jobs[k].lane).seconds(together)
                end = max(free, jobs[k].ready, jobs[k + 1].ready) + seconds
                longer = max(end + busy[k + 2], by[k + 2]) - max(busy[0], by[0])
                found.append(0.0 if abs(longer) < 1e-12 * by[0] else longer)
            free = max(free, jobs[k].ready) + jobs[k].seconds
        return found


def _recut(
    plan: Plan,
    trace: Trace,
    merged: bool,
    menu: Menu,
    gather_menu: Menu | None,
) -> Plan:
    """The plan with one bucket per lane, or with one per tensor, and all else the same."""
    reduce = as_buckets(_groups(trace.gradients, merged, menu), menu)
    gather = None
    if gather_menu is not None:
        groups = _groups(forward_half(trace).gradients, merged, gather_menu)
        gather = as_buckets(groups[::-1], gather_menu)
    return plan.model_copy(update={"reduce": reduce, "gather": gather})


def _groups(
    gradients: Sequence[TraceGradient], merged: bool, menu: Menu
) -> list[list[TraceGradient]]:
    if not merged:
        return [[gradient] for gradient in gradients]
    lanes = sorted(menu.lanes(gradients).values(), key=lambda lane: lane[-1])
    return [[gradients[at] for at in lane] for lane in lanes]
