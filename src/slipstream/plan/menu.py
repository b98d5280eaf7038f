"""The ways that each gradient may go: all of them the dense ones, some also sparsely."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from slipstream.costs import Choice, Curve, least_of
from slipstream.plan.sparsity import Sparsity
from slipstream.trace import Sized

LaneKey = tuple[str, bool]
"""What the gradients of a bucket have in common: a dtype, and whether they may be sent sparsely."""


@dataclass(frozen=True)
class Menu:
    """Ways with their costs. dense: for every gradient; sparse: for those that `sparsity` allows,
    beside the dense ones."""

    dense: tuple[Choice, ...]
    sparse: tuple[Choice, ...] = ()
    sparsity: Sparsity | None = None

    @classmethod
    def plain(cls, choices: Iterable[Choice]) -> Menu:
        """The same choices for all gradients."""
        return cls(tuple(choices))

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All there are, for whichever gradients."""
        return (*self.dense, *self.sparse)

    def lane_of(self, gradient: Sized) -> LaneKey:
        """Gradients of one lane may share a bucket."""
        allowed = bool(self.sparse) and self.sparsity is not None and self.sparsity.allows(gradient)
        return gradient.dtype, allowed

    def of_lane(self, lane: LaneKey) -> tuple[Choice, ...]:
        """The choices for buckets of a lane."""
        return self.choices if lane[1] else self.dense

    def curve_of(self, lane: LaneKey) -> Curve:
        """What the cheapest choice for a bucket of a lane takes."""
        return self._least_of_all if lane[1] else self._least_of_dense

    def lanes(self, gradients: Sequence[Sized]) -> dict[LaneKey, list[int]]:
        """The positions of each lane's gradients."""
        found: dict[LaneKey, list[int]] = {}
        if not self.sparse:  # the common case, for which simulations ask very often
            for position, gradient in enumerate(gradients):
                found.setdefault((gradient.dtype, False), []).append(position)
            return found
        for position, gradient in enumerate(gradients):
            found.setdefault(self.lane_of(gradient), []).append(position)
        return found

    @cached_property
    def _least_of_dense(self) -> Curve:
        return least_of([choice.curve for choice in self.dense])

    @cached_property
    def _least_of_all(self) -> Curve:
        return least_of([choice.curve for choice in self.choices])
