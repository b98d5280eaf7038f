"""`plan="auto"`: the engine measures its own steps and cluster, plans, and changes its buckets."""

from slipstream.auto.gradient_sync import GradientSync

__all__ = ["GradientSync"]
