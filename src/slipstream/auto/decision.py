"""Whether another plan pays: from a trace, costs and measured steps to a verdict.

Pure; rank 0 decides, and the others are told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.auto.settings import AutoSettings
from slipstream.costs import Costs
from slipstream.documents import Frozen
from slipstream.measure.spread import median_and_spread
from slipstream.plan import Plan, plan_step, time_step
from slipstream.plan.allowed import in_words
from slipstream.trace import Trace, parameters_sha256

LEAST_GAIN = 0.03
_LEAST_LOSS = 0.01
_SURE = 2.0


@dataclass(frozen=True)
class StepTime:
    """The median of some steps. error_seconds: how far another median may well lie from it."""

    seconds: float
    error_seconds: float

    @classmethod
    def of(cls, steps_seconds: Sequence[float]) -> StepTime:
        """From how long single steps took; at least one."""
        median, spread = median_and_spread(steps_seconds)
        return cls(median, spread / math.sqrt(len(steps_seconds)))

    def is_slower_than(self, other: StepTime) -> bool:
        """Whether these steps took longer than the others by more than noise."""
        noise = _SURE * math.hypot(self.error_seconds, other.error_seconds)
        return self.seconds - other.seconds > max(noise, _LEAST_LOSS * other.seconds)


class Verdict(Frozen):
    """A plan beside the one in force, with the steps that both are predicted to take.

    objection: why the one in force stays, as part of a sentence; empty where the new one pays.
    considered: which ways buckets might go, in words; empty where there was one.
    """

    plan: Plan
    old_seconds: float
    new_seconds: float
    objection: str = ""
    considered: str = ""


def decide(
    trace: Trace, costs: Costs, plan: Plan, measured: StepTime, settings: AutoSettings
) -> Verdict:
    """Whether the settings' planner gains on `plan`, whose steps took `measured`.

    Raises SlipstreamErrors where trace, costs and options make no plan.
    """
    new = plan_step(settings.planner, trace, costs, **settings.planner_options)
    old_seconds = time_step(trace, costs, plan).step_seconds
    new_seconds = time_step(trace, costs, new).step_seconds
    gain = old_seconds - new_seconds
    objection = ""
    if new.travels_like(plan):
        objection = "which are the same buckets"
    elif gain <= LEAST_GAIN * old_seconds:
        objection = f"a gain below {100 * LEAST_GAIN:g} %"
    elif gain <= measured.error_seconds:
        objection = "a gain below the spread of the measurements"
    return Verdict(
        plan=new,
        old_seconds=old_seconds,
        new_seconds=new_seconds,
        objection=objection,
        considered=_considered(costs, settings),
    )


def _considered(costs: Costs, settings: AutoSettings) -> str:
    """What the planner could choose among."""
    if settings.gathers:
        return ""
    found = costs.choices(settings.collectives, settings.wires)
    ways = [(choice.collective, choice.wire) for choice in found]
    if len(ways) == 1:
        return ""
    measured = [(name, wire) for name, wire in ways if (name, "all_reduce", wire) in costs.measured]
    by_formula = [way for way in ways if way not in measured]
    parts = [("given costs" if settings.costs else "probed", measured), ("by formula", by_formula)]
    return "; ".join(f"{how}: {in_words(known)}" for how, known in parts if known)


def of_these(trace: Trace, plan: Plan) -> Trace:
    """The trace without the gradients that the plan does not average."""
    planned = {name for bucket in plan.reduce for name in bucket.gradients}
    kept = tuple(gradient for gradient in trace.gradients if gradient.name in planned)
    update = {"gradients": kept, "parameters_sha256": parameters_sha256(kept)}
    return trace.model_copy(update=update)
