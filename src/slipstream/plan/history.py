"""The plans of a training by the steps at which they came into force: `slipstream-plans/1`.

Sums over ranks depend in their last bits on where buckets begin and end, so a training can be
repeated bit for bit only where it is on record which plan was in force at which step.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from slipstream.documents import Document, Frozen
from slipstream.errors import PlanError, SlipstreamError
from slipstream.plan.model import Plan

_Step = Annotated[int, Field(ge=0, le=2**53)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_PLAN_FORMAT = "slipstream-plan/1"


class PlannedStep(Frozen):
    """A plan and the step (counted from 0, by synchronised backwards) from which on it is in force.

    reason: what `auto` decided about it, in a sentence; empty where nothing was measured.
    measured_step_seconds: median of steps under it, where `auto` measured them.
    """

    step: _Step
    plan: Plan
    reason: str = ""
    measured_step_seconds: _Seconds | None = None


class PlanHistory(Document):
    """Plans in the order of their steps; at least one. Reads plan files, too, as plans of step 0.

    Raises PlanError by `from_json` and `load`, pydantic's ValidationError when built in place.
    """

    _kind: ClassVar[str] = "plan history"
    _error: ClassVar[type[SlipstreamError]] = PlanError

    format: Literal["slipstream-plans/1"] = "slipstream-plans/1"
    plans: tuple[PlannedStep, ...] = Field(min_length=1, max_length=100_000)

    @model_validator(mode="after")
    def _goes_forward(self) -> Self:
        for before, after in pairwise(self.plans):
            if after.step <= before.step:
                raise ValueError(
                    f"a plan of step {after.step} stands after one of step {before.step}; "
                    "steps increase"
                )
        return self

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """The history of a training that has one plan from its first step on."""
        return cls(plans=(PlannedStep(step=0, plan=plan),))

    @classmethod
    def from_json(cls, text: str, where: str = "") -> Self:
        """Reads the text of a plans file, or of a plan file. Raises PlanError; see `Document`."""
        if _format_of(text) == _PLAN_FORMAT:
            return cls.of(Plan.from_json(text, where))
        return super().from_json(text, where)

    def until(self, step: int) -> tuple[PlannedStep, ...]:
        """The plans that came into force at `step` or before; at least one, else PlanError."""
        found = tuple(entry for entry in self.plans if entry.step <= step)
        if not found:
            raise PlanError(
                f"The plans begin at step {self.plans[0].step} and training stands at step {step}; "
                "give those from its first step on."
            )
        return found

    def after(self, step: int) -> tuple[PlannedStep, ...]:
        """The plans that come into force after `step`."""
        return self.plans[len(self.until(step)) :]

    def agrees_with(self, other: PlanHistory, step: int) -> bool:
        """Whether both have the same buckets in force at the same steps, up to `step`."""
        mine, theirs = self.until(step), other.until(step)
        return [entry.step for entry in mine] == [entry.step for entry in theirs] and all(
            one.plan.travels_like(two.plan) for one, two in zip(mine, theirs, strict=True)
        )


def _format_of(text: str) -> object:
    """What a file says of itself; None where it is no JSON object."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content.get("format") if isinstance(content, dict) else None
