"""The rule of "ImageNet in four minutes" (Jia et al. 2018): tensor fusion and a hybrid all-reduce.

Gradients that are ready go into a pool, which is sent as soon as it holds `pool_bytes`; what is
sent goes by the hierarchical all-reduce up to `switch_bytes`, whose few steps suit small tensors,
and by the ring above, which sends fewer bytes. The paper's own two numbers are not known to us:
the pool is 16 MiB unless set, and the switch is where the two cost curves cross.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.costs import Choice, Curve
from slipstream.errors import PlanError
from slipstream.plan.allowed import LARGE, SMALL
from slipstream.plan.baselines import MIB, plan_buckets
from slipstream.plan.cutting import as_buckets
from slipstream.plan.menu import Menu
from slipstream.plan.model import Bucket, Gradient
from slipstream.trace import TraceGradient

OPTIONS = ("pool_bytes", "switch_bytes")
_LARGEST_BYTES = 2**40


def four_minutes(
    gradients: Sequence[TraceGradient],
    choices: Sequence[Choice],
    *,
    pool_bytes: int = 16 * MIB,
    switch_bytes: int | None = None,
) -> tuple[Bucket, ...]:
    """The buckets in launch order.

    gradients: as they become ready; choices: ways by `hierarchical` and by `ring`. Raises PlanError
    where one of the two is missing, or a limit is below 1.
    """
    small = Menu.plain(choice for choice in choices if choice.collective == SMALL)
    large = Menu.plain(choice for choice in choices if choice.collective == LARGE)
    if not small.dense or not large.dense:
        raise PlanError(f"Planner 'four_minutes' needs the costs of both {SMALL} and {LARGE}.")
    if switch_bytes is None:
        switch_bytes = crossing_bytes(small.dense[0].curve, large.dense[0].curve)
    elif switch_bytes < 1:
        raise PlanError(f"switch_bytes is {switch_bytes}; it is 1 byte or more.")
    by_name = {gradient.name: gradient for gradient in gradients}
    pooled = plan_buckets(
        "ddp",
        [Gradient(gradient.name, gradient.numel, gradient.dtype) for gradient in gradients],
        first_bytes=pool_bytes,
        cap_bytes=pool_bytes,
    )
    found: list[Bucket] = []
    for bucket in pooled.reduce:
        members = [by_name[name] for name in bucket.gradients]
        found += as_buckets([members], small if bucket.bytes <= switch_bytes else large)
    return tuple(found)


def crossing_bytes(small: Curve, large: Curve) -> int:
    """The largest size up to which the first curve is not above the second, to a factor of two.

    0 where it is above from the start. Both are looked at from 1 KiB on, doubling.
    """
    size, found = 1024, 0
    while size <= _LARGEST_BYTES and small.seconds(size) <= large.seconds(size):
        found, size = size, 2 * size
    return found
