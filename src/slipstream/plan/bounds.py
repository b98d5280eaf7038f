"""What no plan can beat: lower bounds of the step, each with its reason.

They hold for every plan that keeps the order in which gradients become ready, with any cut into
buckets and any of the allowed collectives; so the distance to them says how much planning could
still gain, and which bound is the highest says what to improve: the computation, the startup and
rate of the network, or the number of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.plan.halves import Half, backward_half, forward_half
from slipstream.plan.menu import Menu
from slipstream.trace import Trace


@dataclass(frozen=True)
class LowerBound:
    """No step is shorter than this; kind: "compute", "last bucket" or "network"."""

    kind: str
    step_seconds: float
    reason: str


def lower_bounds(trace: Trace, reduce: Menu, gather: Menu | None = None) -> list[LowerBound]:
    """The bounds of a step whose update waits for the averages, or of a pipelined one.

    reduce, gather: the ways that are allowed, gather only for pipelined plans.
    Raises TraceError where a pipelined plan is asked for and the trace lacks needed_seconds.
    """
    half = backward_half(trace)
    last, network = _after_last(half, reduce), _all_bytes(half, reduce)
    if gather is None:
        forward = trace.input_seconds + trace.forward_seconds + trace.update_seconds
        last, network = last + forward, network + forward
    else:
        forward_in_reverse = forward_half(trace)
        last += _after_last(forward_in_reverse, gather)
        network += _all_bytes(forward_in_reverse, gather)
    return [
        LowerBound("compute", trace.compute_seconds, "the computation alone takes that long"),
        LowerBound(
            "last bucket", last, "the last gradient must still travel when the backward has ended"
        ),
        LowerBound(
            "network", network, "all bytes must pass the channel once the first gradient is ready"
        ),
    ]


def _after_last(half: Half, menu: Menu) -> float:
    """The last gradient becomes ready, then the cheapest bucket that can hold it travels."""
    # in a bucket of its own lane, or with everything of its dtype where all of it is sent in full
    menus = (menu, Menu(menu.dense)) if menu.sparse else (menu,)
    least = min(_cheapest_tail(half, each) for each in menus)
    return max(half.floor_seconds, half.ready_seconds[-1] + least)


def _cheapest_tail(half: Half, menu: Menu) -> float:
    """The seconds of the cheapest bucket of the last gradients of a lane."""
    key = menu.lane_of(half.gradients[-1])
    lane = [half.charged[at] for at in menu.lanes(half.gradients)[key]]
    return float(menu.curve_of(key).seconds_of(np.cumsum(lane[::-1])).min())


def _all_bytes(half: Half, menu: Menu) -> float:
    """The first gradient becomes ready, then all bytes travel at the best rate of any bucket."""
    total, least = sum(half.charged), 0.0
    for key, lane in menu.lanes(half.gradients).items() if total else ():
        rate = menu.curve_of(key).least_seconds_per_byte(total)
        least += rate * sum(half.charged[at] for at in lane)
    return max(half.floor_seconds, half.ready_seconds[0] + least)
