"""The one line that auto logs: what changed, what was predicted, what was measured."""

from __future__ import annotations

from slipstream.auto.decision import StepTime, Verdict
from slipstream.plan import Plan
from slipstream.words import duration


def swapped(step: int, old: Plan, verdict: Verdict) -> str:
    """For the record, before anything is measured under the new plan."""
    return (
        f"auto, after step {step}: {_name(old)} -> {_name(verdict.plan)}, "
        f"step predicted {duration(verdict.old_seconds)} -> {duration(verdict.new_seconds)}"
    )


def measured(swap: str, before: StepTime, after: StepTime, returned_to: Plan | None) -> str:
    """A swap and what came of it; returned_to: the old plan where the new one was slower."""
    line = f"{swap}, measured {duration(before.seconds)} -> {duration(after.seconds)}"
    return f"{line}: slower, so back to {_name(returned_to)}" if returned_to else line


def kept(step: int, old: Plan, verdict: Verdict, before: StepTime) -> str:
    """Why the plan in force stays."""
    return (
        f"auto, after step {step}: {_name(old)} stays; {_name(verdict.plan)} would change the "
        f"step from {duration(verdict.old_seconds)} to {duration(verdict.new_seconds)} "
        f"(measured {duration(before.seconds)}), {verdict.objection}"
    )


def failed(step: int, old: Plan, why: str) -> str:
    """Nothing could be measured or planned."""
    return f"auto, after step {step}: {_name(old)} stays, as nothing better can be planned: {why}"


def _name(plan: Plan) -> str:
    count = len(plan.reduce)
    return f"{plan.planner} ({count} bucket{'' if count == 1 else 's'})"
