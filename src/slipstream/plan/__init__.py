"""Plans: which gradients travel together, in which order, by which collective (no torch here)."""

from slipstream.plan.baselines import PLANNERS, plan_buckets
from slipstream.plan.model import Bucket, Gradient, Plan

__all__ = ["PLANNERS", "Bucket", "Gradient", "Plan", "plan_buckets"]
