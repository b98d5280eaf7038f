"""What the ways to average a bucket cost, each a collective with what travels (`allowed.py`).

A way can be planned with where its cost is measured, or where the cluster's links give it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.costs import Choice, Costs, Operation, Wire
from slipstream.errors import CostError
from slipstream.plan.allowed import way_name
from slipstream.plan.menu import LaneKey, Menu
from slipstream.plan.model import Bucket
from slipstream.plan.sparsity import Sparsity
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
    """The ways that buckets might go, and from where the costs of each of `menu.choices` come
    ("measured", "formula")."""

    menu: Menu
    sources: tuple[str, ...]

    @classmethod
    def of(
        cls,
        buckets: Sequence[Bucket],
        costs: Costs,
        collectives: Sequence[str],
        allow: Sequence[Wire],
        operation: Operation,
        sparsity: Sparsity | None = None,
    ) -> Ways:
        """All that are allowed and have costs, and those that the buckets go."""
        found = {
            (choice.collective, choice.wire): choice
            for choice in costs.choices(collectives, allow, operation)
        }
        sent = [(bucket.collective, bucket.wire) for bucket in buckets]
        if sparsity is not None:
            sent.append((sparsity.collective, sparsity.wire))
        for way in sent:
            if way not in found:
                found[way] = Choice(*way, costs.curve(way[0], operation, way[1]))
        dense = tuple(choice for choice in found.values() if isinstance(choice.wire, str))
        sparse = tuple(choice for choice in found.values() if not isinstance(choice.wire, str))
        menu = Menu(dense, sparse, sparsity)
        measured = [(c.collective, operation, c.wire) in costs.measured for c in menu.choices]
        sources = tuple("measured" if known else "formula" for known in measured)
        return cls(menu, sources)

    def times(self, bucket: Bucket, charged: int, lane: LaneKey) -> tuple[WayTime, ...]:
        """What each way takes for so many bytes: the bucket's own, then the fastest first.

        lane: of the bucket's gradients, which says whether sparse ways are open to them.
        """
        own = (bucket.collective, bucket.wire)
        times = [
            WayTime(choice.collective, choice.wire, choice.curve.seconds(charged), source)
            for choice, source in zip(self.menu.choices, self.sources, strict=True)
            if isinstance(choice.wire, str) or lane[1]
        ]
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
