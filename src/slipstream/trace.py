"""Traces: when each gradient of one training step becomes ready, and how long the rest takes.

A trace is one step without communication, as a timeline:

    input | forward | backward, gradients become ready one by one | update

File format `slipstream-trace/1` (JSON). All times are seconds, at most 1e6, all counts are
elements; what is damaged, incomplete or out of order is refused with file and field named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import ClassVar, Literal, Protocol, Self

from pydantic import Field, model_validator

from slipstream.documents import Document, Frozen, Measured
from slipstream.errors import SlipstreamError, TraceError

MAX_NUMEL = 2**40
ITEM_BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element of each dtype that can be averaged."""

Seconds = float
_DType = Literal["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]


class Sized(Protocol):
    """What a model's digest is taken from: a name, a number of elements and a dtype."""

    @property
    def name(self) -> str: ...
    @property
    def numel(self) -> int: ...
    @property
    def dtype(self) -> str: ...


def parameters_sha256(gradients: Iterable[Sized]) -> str:
    """A digest of names, sizes and dtypes, whatever their order: says which model this is."""
    lines = sorted(f"{g.name}\t{g.numel}\t{g.dtype}" for g in gradients)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class TraceGradient(Frozen):
    """One parameter's gradient in a recorded step.

    ready_seconds: from the start of backward until the gradient was there (over ranks: the maximum
    of the ranks' medians; never fired: the end of backward). needed_seconds: from the start of
    forward until the parameter was first read, where that was recorded. ready_spread_seconds: the
    interquartile range of ready_seconds over the recorded steps.
    """

    name: str = Field(min_length=1)
    numel: int = Field(ge=0, le=MAX_NUMEL)
    dtype: _DType = "float32"
    ready_seconds: Measured
    needed_seconds: Measured | None = None
    ready_spread_seconds: Measured | None = None

    @property
    def bytes(self) -> int:
        """Its size in memory."""
        return self.numel * ITEM_BYTES[self.dtype]


class Trace(Document):
    """One step of one model on one machine, without communication; see the module's timeline.

    gradients: in the order in which they become ready; at least one. parameters_sha256: digest of
    the gradients (`parameters_sha256`), or None for a trace that was not taken from a model.
    batch_size: samples a rank in the step. note: how the trace was made, in words.
    *_spread_seconds: the interquartile range over the recorded steps, where it was recorded.

    Raises TraceError by `from_json` and `load`, pydantic's ValidationError when built in place.
    """

    _kind: ClassVar[str] = "trace"
    _error: ClassVar[type[SlipstreamError]] = TraceError

    format: Literal["slipstream-trace/1"] = "slipstream-trace/1"
    model: str
    parameters_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    batch_size: int = Field(ge=1, le=MAX_NUMEL)
    input_seconds: Measured
    forward_seconds: Measured
    update_seconds: Measured
    input_spread_seconds: Measured | None = None
    forward_spread_seconds: Measured | None = None
    update_spread_seconds: Measured | None = None
    note: str = ""
    gradients: tuple[TraceGradient, ...] = Field(min_length=1, max_length=1_000_000)

    @model_validator(mode="after")
    def _is_a_recorded_step(self) -> Self:
        seen: set[str] = set()
        before = self.gradients[0]
        for gradient in self.gradients:
            if gradient.name in seen:
                raise ValueError(f"the gradient {gradient.name!r} stands twice")
            seen.add(gradient.name)
            if gradient.ready_seconds < before.ready_seconds:
                raise ValueError(
                    f"{gradient.name!r} is ready at {gradient.ready_seconds:g} s, before "
                    f"{before.name!r} that precedes it ({before.ready_seconds:g} s); gradients "
                    "stand in the order in which they become ready"
                )
            before = gradient
            needed = gradient.needed_seconds
            if needed is not None and needed > self.forward_seconds:
                raise ValueError(
                    f"{gradient.name!r} is first needed at {needed:g} s, after the forward of "
                    f"{self.forward_seconds:g} s"
                )
        if self.backward_seconds == 0:
            raise ValueError("the backward takes no time at all: nothing was measured")
        if self.parameters_sha256 not in (None, parameters_sha256(self.gradients)):
            raise ValueError(
                "parameters_sha256 is not that of these gradients: they were changed since the "
                "trace was recorded (null says that they belong to no model)"
            )
        return self

    @property
    def backward_seconds(self) -> Seconds:
        """The end of backward, seconds after its start: when the last gradient is ready."""
        return self.gradients[-1].ready_seconds

    @property
    def compute_seconds(self) -> Seconds:
        """Input, forward, backward and update: the step if communication took no time."""
        return (
            self.input_seconds + self.forward_seconds + self.backward_seconds + self.update_seconds
        )

    @property
    def bytes(self) -> int:
        """The size of all gradients in memory."""
        return sum(gradient.bytes for gradient in self.gradients)

    def warnings(self) -> tuple[str, ...]:
        """What is odd about this trace and makes predictions from it doubtful, in sentences."""
        found = []
        if self.forward_seconds == 0:
            found.append("The forward takes no time at all; it was probably not recorded.")
        if len(self.gradients) > 1 and self.gradients[0].ready_seconds == self.backward_seconds:
            found.append(
                "All gradients become ready at the end of backward, as in a model that was "
                "compiled whole: no communication can be hidden behind it."
            )
        return tuple(found)
