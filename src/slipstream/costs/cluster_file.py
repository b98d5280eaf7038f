"""The file `cluster.json`, format `slipstream-cluster/1`: what was measured, what the links are.

Times in seconds, at most 1e6; sizes in bytes of the bucket in memory; link speeds in seconds per
byte, at most 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from slipstream.cluster import Cluster
from slipstream.costs.curves import Curve, Line, Table
from slipstream.documents import MAX_SECONDS, Document, Frozen, Measured
from slipstream.errors import CostError, SlipstreamError
from slipstream.wires import SPARSE_COLLECTIVES, CollectiveName, Density, Wire

Operation = Literal["all_reduce", "reduce_scatter", "all_gather"]
_PerByte = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]
_Bytes = Annotated[int, Field(ge=1, le=2**50)]
_Ranks = Annotated[int, Field(ge=1, le=2**20)]


class Link(Frozen):
    """One kind of link: latency (alpha, seconds a message), seconds_per_byte (beta), and how long
    a rank takes to add one received byte to its own (gamma, seconds)."""

    latency_seconds: Measured
    seconds_per_byte: _PerByte
    reduce_seconds_per_byte: _PerByte = 0.0


class Links(Frozen):
    """intra: between ranks of a node. inter: one network card a node, shared by its ranks.

    select_seconds_per_byte: in which a rank selects from a byte of gradient and adds its residual,
    for sparse collectives; by default what a CPU core takes (`benchmarks/selection.py`).
    """

    intra: Link | None = None
    inter: Link | None = None
    select_seconds_per_byte: _PerByte = 5e-10


class MeasuredCost(Frozen):
    """What one collective costs: a line, or a table of points (bytes, seconds) with spreads."""

    collective: CollectiveName
    operation: Operation = "all_reduce"
    wire: Wire = "float32"
    startup_seconds: Measured | None = None
    seconds_per_byte: _PerByte | None = None
    points: tuple[tuple[_Bytes, _Positive], ...] | None = None
    spread_seconds: tuple[Measured, ...] | None = None

    @model_validator(mode="after")
    def _is_a_line_or_a_table(self) -> Self:
        line = (self.startup_seconds, self.seconds_per_byte)
        if (self.collective in SPARSE_COLLECTIVES) != isinstance(self.wire, Density):
            raise ValueError("a sparse collective has a density as its wire, and no other has")
        if self.points is None:
            if None in line or self.spread_seconds is not None:
                raise ValueError(
                    "a cost has startup_seconds and seconds_per_byte, or points (with or without "
                    "spread_seconds)"
                )
            return self
        if line != (None, None):
            raise ValueError("a cost is a line or a table of points, not both")
        if not 1 <= len(self.points) <= 10_000:
            raise ValueError(f"a table has 1 to 10000 points, not {len(self.points)}")
        for (size, _), (next_size, _) in pairwise(self.points):
            if next_size <= size:
                raise ValueError(f"points go from {size} to {next_size} bytes; sizes increase")
        if self.spread_seconds is not None and len(self.spread_seconds) != len(self.points):
            raise ValueError(
                f"{len(self.points)} points have {len(self.spread_seconds)} spread_seconds; "
                "each has one"
            )
        return self

    def curve(self) -> Curve:
        """The cost as a curve."""
        if self.points is not None:
            return Table(self.points, self.spread_seconds)
        assert self.startup_seconds is not None and self.seconds_per_byte is not None
        return Line(self.startup_seconds, self.seconds_per_byte)


class ClusterSpec(Document):
    """A cluster as `slipstream probe` records it, or as its user describes it.

    backend: torch.distributed's name of it ("gloo", "nccl"), or any word for a cluster that is
    only simulated. ranks_per_node: one number, or one a node. links and costs: either may be left
    out, not both. note: how it was made, in words.
    """

    _kind: ClassVar[str] = "cluster"
    _error: ClassVar[type[SlipstreamError]] = CostError

    format: Literal["slipstream-cluster/1"] = "slipstream-cluster/1"
    backend: str
    nodes: int = Field(ge=1, le=2**20)
    ranks_per_node: _Ranks | tuple[_Ranks, ...]
    links: Links | None = None
    costs: tuple[MeasuredCost, ...] = ()
    note: str = ""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if not isinstance(self.ranks_per_node, int) and len(self.ranks_per_node) != self.nodes:
            raise ValueError(
                f"ranks_per_node lists {len(self.ranks_per_node)} nodes, and nodes is {self.nodes}"
            )
        if self.links is None and not self.costs:
            raise ValueError("costs and links are both missing; one of them is needed")
        if twice := _first_repeated(self.costs):
            raise ValueError(f"costs hold {twice} twice")
        return self

    @property
    def cluster(self) -> Cluster:
        """Nodes and ranks."""
        if isinstance(self.ranks_per_node, int):
            return Cluster.regular(self.nodes, self.ranks_per_node)
        return Cluster(self.ranks_per_node)


def _first_repeated(costs: Iterable[MeasuredCost]) -> str | None:
    seen = set()
    for cost in costs:
        key = (cost.collective, cost.operation, cost.wire)
        if key in seen:
            return f"{cost.operation} by {cost.collective} with wire {cost.wire}"
        seen.add(key)
    return None
