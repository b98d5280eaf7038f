"""The names of collectives and of what travels: files, plans and costs share them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from slipstream.documents import Frozen

DenseCollective = Literal[
    "native",
    "ring",
    "halving_doubling",
    "recursive_doubling",
    "direct",
    "hierarchical",
    "torus",
]
SparseCollective = Literal["hitopk", "naive_topk", "a2a_topk"]
CollectiveName = Literal[DenseCollective, SparseCollective]
DenseWire = Literal["float32", "bfloat16", "float16"]
SelectorName = Literal["exact", "mstopk", "sampled", "reference"]

SPARSE_COLLECTIVES: tuple[SparseCollective, ...] = ("hitopk", "naive_topk", "a2a_topk")
"""They send a share of the elements, a `Density`."""
WIRE_BYTES: Mapping[DenseWire, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
DENSE_WIRES: Mapping[CollectiveName, tuple[DenseWire, ...]] = {
    "native": ("float32",),
    "ring": ("float32", "bfloat16"),
    "halving_doubling": ("float32", "bfloat16"),
    "recursive_doubling": ("float32", "bfloat16"),
    "direct": ("float32", "bfloat16", "float16"),
    "hierarchical": ("float32", "bfloat16"),
    "torus": ("float32", "bfloat16", "float16"),
}
"""What the dense collectives can send. float16, whose range is small, only where no partial sum
travels that has not been divided: every sum is formed in 32 bits, by whom it belongs to."""


def wires_of(name: str) -> tuple[DenseWire, ...]:
    """What a collective can send in full; nothing for one that is sparse or that there is not."""
    return DENSE_WIRES.get(name, ())  # type: ignore[call-overload,no-any-return]


class Density(Frozen):
    """The wire of a sparse collective: the share of elements that travel, and their dtype.

    selector: by which of `slipstream.sparsify` they are selected.
    """

    density: float = Field(gt=0, le=1)
    values: DenseWire
    selector: SelectorName = "exact"

    def __str__(self) -> str:
        by = "" if self.selector == "exact" else f", {self.selector}"
        return f"{self.density:g} as {self.values}{by}"


Wire = DenseWire | Density
