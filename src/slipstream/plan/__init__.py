"""Plans: which gradients travel together, in which order, by which collective (no torch here)."""

from slipstream.plan.baselines import PLANNERS, plan_buckets
from slipstream.plan.bounds import LowerBound, lower_bounds
from slipstream.plan.explain import BucketReason, Explanation
from slipstream.plan.model import Bucket, Gradient, Plan
from slipstream.plan.planners import PLANNER_NAMES, plan_step
from slipstream.plan.reasons import explain
from slipstream.plan.timing import BucketTiming, StepTiming, time_step

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
    "StepTiming",
    "explain",
    "lower_bounds",
    "plan_buckets",
    "plan_step",
    "time_step",
]
