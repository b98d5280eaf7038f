"""The names of collectives and of what travels: files, plans and costs share them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slipstream.documents import Frozen

CollectiveName = Literal[
    "native",
    "ring",
    "halving_doubling",
    "recursive_doubling",
    "direct",
    "hierarchical",
    "torus",
    "hitopk",
    "naive_topk",
    "a2a_topk",
]
DenseWire = Literal["float32", "bfloat16", "float16"]


class Density(Frozen):
    """The wire of a sparse collective: the share of elements that travel, and their dtype."""

    density: float = Field(gt=0, le=1)
    values: DenseWire


Wire = DenseWire | Density
