"""What the reproduction asks the library: steps by planners, and lines through measured steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.cluster import Cluster
from slipstream.costs import Costs, Curve, Line
from slipstream.plan import Gradient, plan_buckets, plan_step, time_step
from slipstream.trace import Trace, TraceGradient

TIE = 0.01
"""Steps this close to one another, relatively, count as equally fast."""


@dataclass(frozen=True)
class Steps:
    """A step by four planners, seconds; buckets: of MG-WFBP and of the optimum."""

    wfbp: float
    single: float
    mgwfbp: float
    optimal: float
    buckets: tuple[int, int]


def steps_of(trace: Trace, costs: Costs) -> Steps:
    """The steps by WFBP, single, MG-WFBP and the optimum (tolerance 0) on these costs."""
    names = ("wfbp", "single", "mgwfbp", "optimal")
    plans = {name: plan_step(name, trace, costs, tolerance=0.0) for name in names}
    times = {name: time_step(trace, costs, plan).step_seconds for name, plan in plans.items()}
    return Steps(**times, buckets=(len(plans["mgwfbp"].reduce), len(plans["optimal"].reduce)))


def on_curve(curve: Curve, workers: int) -> Costs:
    """Costs of one node a worker on which everything costs what the curve says."""
    return Costs.from_curves(Cluster.regular(workers, 1), {"native": curve})


def retimed(trace: Trace, seconds: float, *, backward: bool = False) -> Trace:
    """The trace with all times in proportion, so that it computes (or its backward takes) that."""
    factor = seconds / (trace.backward_seconds if backward else trace.compute_seconds)
    return trace.model_copy(
        update={
            "forward_seconds": trace.forward_seconds * factor,
            "gradients": tuple(
                gradient.model_copy(update={"ready_seconds": gradient.ready_seconds * factor})
                for gradient in trace.gradients
            ),
        }
    )


def folded(trace: Trace, message_of: Callable[[str], str]) -> Trace:
    """The trace with neighbours made one tensor where `message_of` their names is the same.

    A message becomes ready with the last of its tensors.
    """
    found: list[TraceGradient] = []
    for gradient in trace.gradients:
        name = message_of(gradient.name)
        numel = gradient.numel
        if found and found[-1].name == name:
            numel += found.pop().numel
        found.append(gradient.model_copy(update={"name": name, "numel": numel}))
    return trace.model_copy(update={"parameters_sha256": None, "gradients": tuple(found)})


def module_of(parameter: str) -> str:
    """The module that holds a parameter."""
    return parameter.rpartition(".")[0]


def unit_of(parameter: str) -> str:
    """A convolution of torchvision's ResNets together with the norm behind it."""
    unit = re.sub(r"\b(conv|bn)(\d)$", r"unit\2", module_of(parameter))
    return re.sub(r"downsample\.\d$", "downsample", unit)


def line_through(trace: Trace, wfbp: float, single: float) -> Line:
    """T = a + b M with which a single message and one a tensor take the steps that were measured.

    The single message fixes T of all bytes, and WFBP, which each startup makes later, fixes a.
    Raises ValueError where no a between 0 and all of T does it.
    """
    whole = single - trace.compute_seconds
    plan = plan_buckets("wfbp", [Gradient(g.name, g.numel, g.dtype) for g in trace.gradients])

    def line(startup: float) -> Line:
        return Line(startup, (whole - startup) / trace.bytes)

    def predicted(startup: float) -> float:
        return time_step(trace, on_curve(line(startup), workers=2), plan).step_seconds

    low, high = 0.0, whole
    if not predicted(low) <= wfbp <= predicted(high):
        raise ValueError(f"{trace.model}: no line gives {wfbp} s by WFBP and {single} s by one.")
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted(middle) < wfbp else (low, middle)
    return line(high)


def order(wfbp: float, single: float, mgwfbp: float) -> str:
    """The three from the fastest on, such as "MG < WF = SE"; see TIE."""
    (first, before), *rest = sorted(
        {"MG": mgwfbp, "WF": wfbp, "SE": single}.items(), key=lambda entry: entry[1]
    )
    text = first
    for name, seconds in rest:
        text += f" {'=' if seconds <= before * (1 + TIE) else '<'} {name}"
        before = seconds
    return text


def is_first(mgwfbp: float, *others: float) -> bool:
    """Whether MG-WFBP is as fast as the others, or faster."""
    return mgwfbp <= min(others) * (1 + TIE)
