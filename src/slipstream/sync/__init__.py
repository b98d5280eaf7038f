"""The engine: gradients out of autograd, through buckets, averaged over ranks."""

from slipstream.sync.ddp_hook import DDPHookState, ddp_hook
from slipstream.sync.deferred import DeferredOptimizer
from slipstream.sync.gradient_sync import GradientSync
from slipstream.sync.report import BucketTimes, NonFinite, StepTimeline

__all__ = [
    "BucketTimes",
    "DDPHookState",
    "DeferredOptimizer",
    "GradientSync",
    "NonFinite",
    "StepTimeline",
    "ddp_hook",
]
