"""The two halves of a step in which buckets travel, as planners see them.

Backward: gradients become ready one by one, buckets follow (all-reduce, or reduce-scatter).

Forward, for plans that gather during the next one:

    gather bucket 1, 2, ... one after the other, from the barrier on
    input | update 1, forward of its layers | update 2, forward ... |

A pipelined step updates each parameter just before its first use, so the update's time is spread
over the forward, by bytes. A bucket that comes late holds up the forward from its first reader on.
Read backwards in time this is the same problem as the backward's: the forward's end is the start,
gathers run back from it, and a parameter that is first used x seconds before the end of an
undelayed forward is "ready" at x. (Enumeration over small instances agrees; see the tests.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from slipstream.errors import TraceError
from slipstream.trace import Sized, Trace, TraceGradient

_BYTES_CHARGED = {"float16": 4, "bfloat16": 4, "float32": 4}
_BYTES_CHARGED |= {"float64": 8, "complex64": 8, "complex128": 16}


def charged_bytes(gradient: Sized) -> int:
    """The bytes that a gradient is charged for: its own, or 4 an element where it has 16 bits.

    Cost curves are measured on float32 buckets, and sums are formed in 32 bits: 16-bit gradients
    are widened before they travel.
    """
    return gradient.numel * _BYTES_CHARGED[gradient.dtype]


@dataclass(frozen=True)
class Half:
    """Gradients, and when each may travel at the earliest (seconds in the half's own time).

    gradients: in the order of ready_seconds, which do not decrease. floor_seconds: a half takes no
    less however early its buckets are done.
    """

    gradients: Sequence[TraceGradient]
    ready_seconds: Sequence[float]
    floor_seconds: float

    @cached_property
    def charged(self) -> list[int]:
        """The bytes that each gradient is charged for."""
        return [charged_bytes(gradient) for gradient in self.gradients]


def backward_half(trace: Trace) -> Half:
    """From the start of backward until everything is reduced."""
    ready = [gradient.ready_seconds for gradient in trace.gradients]
    return Half(trace.gradients, ready, trace.backward_seconds)


def forward_half(trace: Trace) -> Half:
    """Input, update and forward, read backwards from the end of forward.

    Parameters that are needed at the same time stand in the order of readiness. Raises TraceError
    when the trace does not say when the forward needs a parameter.
    """
    known = []
    for index, gradient in enumerate(trace.gradients):
        if gradient.needed_seconds is None:
            raise TraceError(
                f"The trace of {trace.model!r} does not say when the forward first needs "
                f"{gradient.name!r} (needed_seconds); record it again with `slipstream profile`."
            )
        known.append((trace.forward_seconds - gradient.needed_seconds, index, gradient))
    known.sort(key=lambda entry: entry[:2])
    total, later = trace.bytes, 0
    ready: list[float] = []
    for before_end, _, gradient in known:
        later += gradient.bytes
        # Parameters without elements: any share is right as long as the update is counted.
        share = later / total if total else (len(ready) + 1) / len(known)
        ready.append(before_end + trace.update_seconds * share)
    undelayed = trace.input_seconds + trace.forward_seconds + trace.update_seconds
    return Half([gradient for _, _, gradient in known], ready, undelayed)
