"""Plan and its parts: frozen values, and their file format `slipstream-plan/1`."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from slipstream.cluster import Cluster
from slipstream.documents import Document, Frozen
from slipstream.errors import PlanError, SlipstreamError
from slipstream.trace import ITEM_BYTES, Sized, parameters_sha256
from slipstream.wires import CollectiveName, Wire

__all__ = ["Bucket", "Gradient", "Plan", "parameters_sha256"]


@dataclass(frozen=True)
class Gradient:
    """One parameter's gradient as a planner sees it.

    name: the parameter's name in the model; numel: its number of elements; dtype: torch's name for
    it without the prefix, such as "float32". Raises PlanError for a dtype that cannot be averaged.
    """

    name: str
    numel: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            known = ", ".join(ITEM_BYTES)
            raise PlanError(
                f"Gradient {self.name!r} has dtype {self.dtype}; what can be averaged: {known}."
            )

    @property
    def bytes(self) -> int:
        """Its size in memory."""
        return self.numel * ITEM_BYTES[self.dtype]


_Ranks = Annotated[int, Field(ge=1, le=2**20)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Bucket(Frozen):
    """Gradients of one dtype that travel together.

    bytes: their size in memory; collective: how they are averaged; wire: what travels.
    """

    gradients: tuple[str, ...] = Field(min_length=1)
    bytes: int = Field(ge=0, le=2**64)
    collective: CollectiveName = "native"
    wire: Wire = "float32"


class Plan(Document):
    """The order in which buckets are averaged; the engine obeys it and decides nothing.

    reduce: the buckets in launch order; every trainable parameter stands in exactly one of them.
    wait: the point up to which the step may go on without the averages: "backward" (they are there
    when backward returns), "update" (when the optimizer steps) or "forward" (when the next forward
    reads the parameters).
    gather: with `planner="pipelined"`, `reduce` only scatters the averages, and these buckets
    gather them during the next forward; else None.
    predicted_step_seconds, lower_bound_seconds: where a planner knows them.
    """

    _kind: ClassVar[str] = "plan"
    _error: ClassVar[type[SlipstreamError]] = PlanError

    format: Literal["slipstream-plan/1"] = "slipstream-plan/1"
    planner: str
    model: str = ""
    parameters_sha256: str | None = None
    nodes: int = Field(default=1, ge=1, le=2**20)
    ranks_per_node: _Ranks | tuple[_Ranks, ...] = 1
    wait: Literal["backward", "update", "forward"] = "backward"
    predicted_step_seconds: _Seconds | None = None
    lower_bound_seconds: _Seconds | None = None
    reduce: tuple[Bucket, ...]
    gather: tuple[Bucket, ...] | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if not isinstance(self.ranks_per_node, int) and len(self.ranks_per_node) != self.nodes:
            raise ValueError(
                f"ranks_per_node lists {len(self.ranks_per_node)} nodes, and nodes is {self.nodes}"
            )
        if self.gather is not None and self.wait != "forward":
            raise ValueError('gather buckets travel during the forward, so wait must be "forward"')
        return self

    def fingerprint(self) -> str:
        """SHA-256 over all that decides what travels and when: equal plans, equal fingerprints."""
        text = self.model_dump_json(include={"reduce", "gather", "wait"})
        return hashlib.sha256(text.encode()).hexdigest()

    def travels_like(self, other: Plan) -> bool:
        """Whether both plans have the same buckets in the same order, whoever made them."""
        return (self.reduce, self.gather) == (other.reduce, other.gather)

    def check_covers(self, gradients: Sequence[Sized], model: str = "") -> None:
        """Raises PlanError unless every gradient stands in exactly one bucket, with its dtype.

        In a pipelined plan that holds for the buckets that reduce and for those that gather.
        model: whose gradients they are, for the error, which names the plan's own model too.
        """
        plan = f"plan for {self.model!r}" if self.model else "plan"
        this = repr(model) if model else "this model"
        _check_covers(self.reduce, f"The {plan}", gradients, this)
        if self.gather is not None:
            _check_covers(self.gather, f"The gather of the {plan}", gradients, this)

    def check_made_for(self, model: str, digest: str, cluster: Cluster) -> None:
        """Raises PlanError unless the plan was made for this model on a cluster of this shape.

        digest: `parameters_sha256` of the model's gradients. A plan that does not say which
        parameters it is for passes as far as the model goes; see `check_covers`.
        """
        if self.parameters_sha256 not in (None, digest):
            raise PlanError(
                f"The plan was made for the model {self.model!r} and this is {model!r}: their "
                "parameters differ in name, size or dtype; make a plan with `slipstream plan`."
            )
        shape = self.ranks_per_node
        planned = Cluster((shape,) * self.nodes if isinstance(shape, int) else shape)
        if planned != cluster:
            raise PlanError(
                f"The plan was made for {planned} and this cluster has {cluster}; "
                "make a plan with `slipstream plan`."
            )


def _check_covers(
    buckets: Sequence[Bucket], what: str, gradients: Sequence[Sized], model: str
) -> None:
    planned = Counter(name for bucket in buckets for name in bucket.gradients)
    wanted = {gradient.name: gradient for gradient in gradients}
    for name, count in planned.items():
        if count > 1:
            raise PlanError(f"{what} holds {name!r} {count} times; once is right.")
        if name not in wanted:
            raise PlanError(
                f"{what} holds {name!r}, which is no trainable parameter of {model}; "
                "make a plan with `slipstream plan`."
            )
    for name in wanted:
        if name not in planned:
            raise PlanError(
                f"{what} lacks the trainable parameter {name!r} of {model}; make a plan with "
                "`slipstream plan`."
            )
    for index, bucket in enumerate(buckets):
        dtypes = {wanted[name].dtype for name in bucket.gradients}
        if len(dtypes) > 1:
            mixed = " and ".join(sorted(dtypes))
            raise PlanError(f"Bucket {index} mixes {mixed}; a bucket has one dtype.")
