"""The one line that auto logs: what changed, what was predicted, what was measured."""

from __future__ import annotations

from collections import Counter

from slipstream.auto.decision import StepTime, Verdict
from slipstream.plan import Plan
from slipstream.plan.allowed import way_name
from slipstream.words import counted, duration


def swapped(step: int, old: Plan, verdict: Verdict) -> str:
    """For the record, before anything is measured under the new plan."""
    return (
        f"auto, after step {step}: {_name(old)} -> {_new_name(verdict)}, "
        f"step predicted {duration(verdict.old_seconds)} -> {duration(verdict.new_seconds)}"
    )


def measured(
    swap: str, verdict: Verdict, before: StepTime, after: StepTime, returned_to: Plan | None
) -> str:
    """A swap and what came of it; returned_to: the old plan where the new one was slower."""
    line = f"{swap}, measured {duration(before.seconds)} -> {duration(after.seconds)}"
    if returned_to:
        line += f": slower, so back to {_name(returned_to)}"
    return line + _considered(verdict)


def kept(step: int, old: Plan, verdict: Verdict, before: StepTime) -> str:
    """Why the plan in force stays."""
    return (
        f"auto, after step {step}: {_name(old)} stays; {_new_name(verdict)} would change the "
        f"step from {duration(verdict.old_seconds)} to {duration(verdict.new_seconds)} "
        f"(measured {duration(before.seconds)}), {verdict.objection}{_considered(verdict)}"
    )


def failed(step: int, old: Plan, why: str) -> str:
    """Nothing could be measured or planned."""
    return f"auto, after step {step}: {_name(old)} stays, as nothing better can be planned: {why}"


def _considered(verdict: Verdict) -> str:
    return f" ({verdict.considered})" if verdict.considered else ""


def _name(plan: Plan) -> str:
    return f"{plan.planner} ({counted(len(plan.reduce), 'bucket')})"


def _new_name(verdict: Verdict) -> str:
    """With the ways that buckets go, where there was a choice: "optimal (3 buckets: 2 by ...)"."""
    plan = verdict.plan
    if not verdict.considered:
        return _name(plan)
    ways = Counter(way_name(bucket.collective, bucket.wire) for bucket in plan.reduce)
    if len(ways) == 1:
        return f"{_name(plan)[:-1]} by {next(iter(ways))})"
    by = ", ".join(f"{count} by {way}" for way, count in ways.most_common())
    return f"{_name(plan)[:-1]}: {by})"
