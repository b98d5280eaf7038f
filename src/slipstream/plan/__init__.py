"""Plans: which gradients travel together, in which order, by which collective (no torch here).

Names are loaded when first used: whoever only reads plans, such as a report, loads no numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.plan.baselines import PLANNERS, plan_buckets
    from slipstream.plan.bounds import LowerBound, lower_bounds
    from slipstream.plan.explanation import BucketReason, Explanation
    from slipstream.plan.history import PlanHistory, PlannedStep
    from slipstream.plan.model import Bucket, Gradient, Plan
    from slipstream.plan.planners import PLANNER_NAMES, plan_step
    from slipstream.plan.reasons import explain
    from slipstream.plan.timing import BucketTiming, StepTiming, time_step

_HOME = {
    "PLANNERS": "baselines",
    "PLANNER_NAMES": "planners",
    "Bucket": "model",
    "BucketReason": "explanation",
    "BucketTiming": "timing",
    "Explanation": "explanation",
    "Gradient": "model",
    "LowerBound": "bounds",
    "Plan": "model",
    "PlanHistory": "history",
    "PlannedStep": "history",
    "StepTiming": "timing",
    "explain": "reasons",
    "lower_bounds": "bounds",
    "plan_buckets": "baselines",
    "plan_step": "planners",
    "time_step": "timing",
}

__all__ = [
    "PLANNERS",
    "PLANNER_NAMES",
    "Bucket",
    "BucketReason",
    "BucketTiming",
    "Explanation",
    "Gradient",
    "LowerBound",
    "Plan",
    "PlanHistory",
    "PlannedStep",
    "StepTiming",
    "explain",
    "lower_bounds",
    "plan_buckets",
    "plan_step",
    "time_step",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'slipstream.plan' has no attribute {name!r}")
    return getattr(import_module(f"slipstream.plan.{_HOME[name]}"), name)
