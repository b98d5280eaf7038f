"""Plan and its parts: frozen values, and their file format `slipstream-plan/1`."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slipstream.errors import PlanError

_MAX_FILE_BYTES = 64 * 2**20
_ITEM_BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


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
        if self.dtype not in _ITEM_BYTES:
            known = ", ".join(_ITEM_BYTES)
            raise PlanError(
                f"Gradient {self.name!r} has dtype {self.dtype}; what can be averaged: {known}."
            )

    @property
    def bytes(self) -> int:
        """Its size in memory."""
        return self.numel * _ITEM_BYTES[self.dtype]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Bucket(_Frozen):
    """Gradients of one dtype that travel together.

    bytes: their size in memory; collective: how they are averaged; wire: what travels.
    """

    gradients: tuple[str, ...] = Field(min_length=1)
    bytes: int = Field(ge=0)
    collective: Literal["native"] = "native"
    wire: Literal["float32"] = "float32"


class Plan(_Frozen):
    """The order in which buckets are averaged; the engine obeys it and decides nothing.

    reduce: the buckets in launch order; every trainable parameter stands in exactly one of them.
    wait: the point up to which the step may go on without the averages, "backward" (they are there
    when backward returns) or "update" (they are there when the optimizer steps).
    predicted_step_seconds, lower_bound_seconds: where a planner knows them.
    """

    format: Literal["slipstream-plan/1"] = "slipstream-plan/1"
    planner: str
    model: str = ""
    parameters_sha256: str | None = None
    nodes: int = Field(default=1, ge=1)
    ranks_per_node: int | tuple[int, ...] = 1
    wait: Literal["backward", "update"] = "backward"
    predicted_step_seconds: float | None = None
    lower_bound_seconds: float | None = None
    reduce: tuple[Bucket, ...]
    gather: None = None

    def to_json(self) -> str:
        """The plan as the text of a plan file."""
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "the plan") -> Plan:
        """Reads the text of a plan file; `where` names it in errors.

        Raises PlanError that names the file and the first field that is wrong.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "the document"
            raise PlanError(
                f"{where} is not a plan that this version reads: {field}: {first['msg']}."
            ) from None

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Reads a plan file. Raises PlanError when it is missing, too large or damaged."""
        try:
            if path.stat().st_size > _MAX_FILE_BYTES:
                raise PlanError(f"{path} is larger than any plan ({_MAX_FILE_BYTES} bytes).")
            return cls.from_json(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"The plan file {path} cannot be read: {error}.") from error

    def fingerprint(self) -> str:
        """SHA-256 over all that decides what travels and when: equal plans, equal fingerprints."""
        text = self.model_dump_json(include={"reduce", "gather", "wait"})
        return hashlib.sha256(text.encode()).hexdigest()

    def check_covers(self, gradients: Sequence[Gradient]) -> None:
        """Raises PlanError unless every gradient stands in exactly one bucket, with its dtype."""
        planned = Counter(name for bucket in self.reduce for name in bucket.gradients)
        wanted = {gradient.name: gradient for gradient in gradients}
        for name, count in planned.items():
            if count > 1:
                raise PlanError(f"The plan holds {name!r} {count} times; once is right.")
            if name not in wanted:
                raise PlanError(
                    f"The plan holds {name!r}, which is no trainable parameter of this model; "
                    "make a plan for this model."
                )
        for name in wanted:
            if name not in planned:
                raise PlanError(
                    f"The plan lacks the trainable parameter {name!r}; make a plan for this model."
                )
        for index, bucket in enumerate(self.reduce):
            dtypes = {wanted[name].dtype for name in bucket.gradients}
            if len(dtypes) > 1:
                mixed = " and ".join(sorted(dtypes))
                raise PlanError(f"Bucket {index} mixes {mixed}; a bucket has one dtype.")


def parameters_sha256(gradients: Sequence[Gradient]) -> str:
    """A digest of names, sizes and dtypes, whatever their order: says which model a plan is for."""
    lines = sorted(f"{g.name}\t{g.numel}\t{g.dtype}" for g in gradients)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
