"""Slipstream: data-parallel PyTorch training that scales over slow networks.

Public names are loaded when first used, so that importing the package, or planning and simulating
with it, does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.auto import GradientSync
    from slipstream.cluster import Cluster
    from slipstream.errors import SlipstreamError
    from slipstream.plan import Bucket, Gradient, Plan
    from slipstream.plan.sparsity import Sparsity
    from slipstream.sync import DDPHookState, ddp_hook

__version__ = "0.1.0"

_HOME = {
    "Bucket": "slipstream.plan",
    "Cluster": "slipstream.cluster",
    "DDPHookState": "slipstream.sync",
    "Gradient": "slipstream.plan",
    "GradientSync": "slipstream.auto",
    "Plan": "slipstream.plan",
    "SlipstreamError": "slipstream.errors",
    "Sparsity": "slipstream.plan.sparsity",
    "ddp_hook": "slipstream.sync",
}

__all__ = [
    "Bucket",
    "Cluster",
    "DDPHookState",
    "Gradient",
    "GradientSync",
    "Plan",
    "SlipstreamError",
    "Sparsity",
    "ddp_hook",
]


def __getattr__(name: str) -> Any:
    if name == "measure":  # a package of its own, whose functions are called by its name
        return import_module("slipstream.measure")
    if name not in _HOME:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
