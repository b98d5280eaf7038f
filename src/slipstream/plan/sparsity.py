"""Which gradients may be sent sparsely, and how many of their elements (no numpy here)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from typing import get_args

from slipstream.errors import PlanError
from slipstream.plan.model import Bucket, Plan
from slipstream.trace import Sized
from slipstream.wires import (
    SPARSE_COLLECTIVES,
    WIRE_BYTES,
    DenseWire,
    Density,
    SelectorName,
    SparseCollective,
)

SPARSE_DTYPES = ("float32", "bfloat16", "float16")
"""Gradients of which a share may be sent; sums of others would lose precision."""
SMALL_NUMEL = 2**14
"""A gradient with fewer elements is sent in full: selecting would take longer than sending."""


@dataclass(frozen=True)
class Sparsity:
    """A user's permission to send a share of some gradients' elements, and what is exempt.

    density: the share, above 0 and at most 1; values: as what the elements travel; collective: by
    which sparse collective; selector: of `slipstream.sparsify`. dense: patterns of names
    ("*.bias", "embedding.*") that are sent in full, as are gradients with fewer than `small_numel`
    elements, and those of other dtypes than SPARSE_DTYPES. Raises PlanError for what there is not.
    """

    density: float = 0.01
    values: DenseWire = "float32"
    collective: SparseCollective = "hitopk"
    selector: SelectorName = "exact"
    dense: tuple[str, ...] = ()
    small_numel: int = SMALL_NUMEL

    def __post_init__(self) -> None:
        is_number = isinstance(self.density, float | int) and not isinstance(self.density, bool)
        if not (is_number and 0 < self.density <= 1):
            raise PlanError(
                f"A density of {self.density!r} cannot be used: it is the share of elements that "
                "travel, above 0 and at most 1 (0.01 is one in a hundred)."
            )
        named: tuple[tuple[str, Collection[str], str], ...] = (
            (self.collective, SPARSE_COLLECTIVES, "sparse collective"),
            (self.values, WIRE_BYTES, "dtype of values"),
            (self.selector, get_args(SelectorName), "selector"),
        )
        for name, known, what in named:
            if name not in known:
                raise PlanError(f"{name!r} is no {what}; there are {', '.join(known)}.")

    @property
    def wire(self) -> Density:
        """What travels."""
        return Density(density=float(self.density), values=self.values, selector=self.selector)

    def allows(self, gradient: Sized) -> bool:
        """Whether a share of this gradient may be sent instead of all of it."""
        return (
            gradient.numel >= self.small_numel
            and gradient.dtype in SPARSE_DTYPES
            and not any(fnmatchcase(gradient.name, pattern) for pattern in self.dense)
        )

    def unmatched(self, names: Sequence[str]) -> list[str]:
        """The patterns of `dense` that match no parameter: mistyped, most likely."""
        return [p for p in self.dense if not any(fnmatchcase(name, p) for name in names)]


def implied(buckets: Sequence[Bucket]) -> Sparsity | None:
    """What must have been allowed for a plan with these buckets; None where all is sent in full."""
    sparse = [bucket for bucket in buckets if not isinstance(bucket.wire, str)]
    if not sparse:
        return None
    full = [name for b in buckets if isinstance(b.wire, str) for name in b.gradients]
    wire, collective = sparse[0].wire, sparse[0].collective
    assert isinstance(wire, Density)
    return Sparsity(
        density=wire.density,
        values=wire.values,
        selector=wire.selector,
        collective=collective,  # type: ignore[arg-type]
        dense=tuple(escape(name) for name in full),
        small_numel=0,
    )


def resparsified(plan: Plan, sparsity: Sparsity | None) -> Plan:
    """The plan with its sparse buckets as `sparsity` says, or sent in full by `native`."""
    way: dict[str, object] = {"collective": "native", "wire": "float32"}
    if sparsity is not None:
        way = {"collective": sparsity.collective, "wire": sparsity.wire}
    buckets = [
        bucket if isinstance(bucket.wire, str) else bucket.model_copy(update=way)
        for bucket in plan.reduce
    ]
    return plan.model_copy(update={"reduce": tuple(buckets)})
