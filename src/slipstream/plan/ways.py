"""What the ways to average a bucket cost, each a collective with what travels (`allowed.py`).

A way can be planned with where its cost is measured, or where the cluster's links give it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.costs import Choice, Costs, Operation, Wire
from slipstream.errors import CostError
from slipstream.plan.allowed import way_name
from slipstream.plan.model import Bucket
from slipstream.wires import wires_of


@dataclass(frozen=True)
class WayTime:
    """What one way takes for one bucket, in seconds; costs: "measured" or "formula"."""

    collective: str
    wire: Wire
    seconds: float
    costs: str

    def __str__(self) -> str:
        return way_name(self.collective, self.wire)


@dataclass(frozen=True)
class Ways:
    """The ways that buckets might go, and from where their costs come ("measured", "formula")."""

    choices: tuple[Choice, ...]
    sources: tuple[str, ...]

    @classmethod
    def of(
        cls,
        buckets: Sequence[Bucket],
        costs: Costs,
        collectives: Sequence[str],
        allow: Sequence[Wire],
        operation: Operation,
    ) -> Ways:
        """All that are allowed and have costs, and those that the buckets go."""
        found = {
            (choice.collective, choice.wire): choice
            for choice in costs.choices(collectives, allow, operation)
        }
        for bucket in buckets:
            way = (bucket.collective, bucket.wire)
            if way not in found:
                found[way] = Choice(*way, costs.curve(way[0], operation, way[1]))
        measured = [(name, operation, wire) in costs.measured for name, wire in found]
        sources = tuple("measured" if known else "formula" for known in measured)
        return cls(tuple(found.values()), sources)

    def times(self, bucket: Bucket, charged: int) -> tuple[WayTime, ...]:
        """What each way takes for so many bytes: the bucket's own, then the fastest first."""
        times = [
            WayTime(choice.collective, choice.wire, choice.curve.seconds(charged), source)
            for choice, source in zip(self.choices, self.sources, strict=True)
        ]
        own = (bucket.collective, bucket.wire)
        times.sort(key=lambda time: ((time.collective, time.wire) != own, time.seconds))
        return tuple(times)


def check_allowed(costs: Costs, collectives: Sequence[str], wires: Sequence[Wire]) -> None:
    """Raises CostError for a collective or a wire of which there are no costs at all.

    What cannot go together, such as native with bfloat16, is passed over: see `allowed.unused`.
    """
    for collective in collectives:
        sent = [wire for wire in wires if wire in wires_of(collective)]
        faults = [_fault(costs, collective, wire) for wire in sent]
        for fault in faults[:1]:
            if fault is not None and all(faults):
                raise fault
    for wire in wires:
        senders = [name for name in collectives if wire in wires_of(name)]
        if senders and all(_fault(costs, name, wire) for name in senders):
            raise CostError(
                f"Nobody has measured {', '.join(senders)} with {wire} travelling, and the "
                "cluster's `links` that could tell are missing; measure it with `slipstream probe "
                f"--wire {wire}`, or do not allow {wire}."
            )


def _fault(costs: Costs, collective: str, wire: Wire) -> CostError | None:
    """Why there is no cost of it; None where there is one."""
    try:
        costs.curve(collective, "all_reduce", wire)
    except CostError as error:
        return error
    return None
