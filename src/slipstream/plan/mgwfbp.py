"""MG-WFBP's merging rule, as published: greedy, tensor by tensor.

"MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms" (Shi, Chu, Li;
INFOCOM'19, TPDS'21). A tensor joins the next one if the wait for that one is shorter than the
startup that merging saves:

    ready(next) - start(open bucket) < a

`caffe` (the authors' B-Caffe) asks nothing else; `pytorch` (their PyTorch code) merges only where
the open bucket would still be on its way when the next tensor is ready. Under T = a + b M no bucket
takes less than a, so the two agree; with measured costs, where a comes from a fit, they need not.

The published code recomputes every start after every merge, O(n^2). That is not needed: a merge
changes nothing of what was sent before, and the open bucket's start is max(end of what was sent,
ready time of its last tensor), so one pass with two numbers gives the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from slipstream.costs import Curve
from slipstream.plan.lane import Cuts

Variant = Literal["pytorch", "caffe"]
VARIANTS: tuple[str, ...] = get_args(Variant)


def mgwfbp(
    ready_seconds: Sequence[float],
    sums: Sequence[int],
    curve: Curve,
    startup_seconds: float,
    variant: Variant = "pytorch",
) -> Cuts:
    """The cuts by the published rule.

    ready_seconds: of n tensors, not decreasing; sums: n+1 running sums of their bytes; curve: what
    buckets take; startup_seconds: the rule's a.
    """
    cuts: Cuts = []
    free, first = 0.0, 0
    for index in range(len(ready_seconds) - 1):
        start = max(free, ready_seconds[index])
        end = start + curve.seconds(sums[index + 1] - sums[first])
        next_ready = ready_seconds[index + 1]
        merge = next_ready - start < startup_seconds
        if variant == "pytorch":
            merge = merge and next_ready < end
        if not merge:
            cuts.append(index + 1)
            free, first = end, index + 1
    return [*cuts, len(ready_seconds)] if ready_seconds else []
