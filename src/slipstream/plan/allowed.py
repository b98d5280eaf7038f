"""What planners may use, in words: collectives, and what travels by them (no numpy here).

A way is a collective with what travels: ("torus", "bfloat16").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from slipstream.errors import PlanError
from slipstream.wires import Wire, wires_of

HALF_WAY: tuple[str, Wire] = ("native", "float32")
"""By which the halves of a pipelined plan travel, and no other."""
SMALL, LARGE = "hierarchical", "ring"
"""By which `four_minutes` sends small buckets and large ones."""
OWN_COLLECTIVES: Mapping[str, tuple[str, ...]] = {
    "pipelined": (HALF_WAY[0],),
    "four_minutes": (SMALL, LARGE),
}
"""Planners that use these, whatever else is allowed."""


def way_name(collective: str, wire: Wire) -> str:
    """The collective alone where float32 travels: "torus", "torus bfloat16"."""
    return collective if wire == "float32" else f"{collective} {wire}"


def in_words(ways: Iterable[tuple[str, Wire]]) -> str:
    """Several ways, by what travels: "native, direct; with bfloat16 direct"."""
    by_wire: dict[str, list[str]] = {}
    for collective, wire in ways:
        by_wire.setdefault(str(wire), []).append(collective)
    return "; ".join(
        f"{'' if wire == 'float32' else f'with {wire} '}{', '.join(names)}"
        for wire, names in by_wire.items()
    )


def unused(collectives: Sequence[str], wires: Sequence[Wire]) -> list[str]:
    """What is allowed and goes with nothing else that is, in sentences without a full stop.

    Nothing where no collective sends any of the wires; that is an error of its own.
    """
    found = [
        f"{name} carries nothing: it sends {' or '.join(wires_of(name))} only"
        for name in collectives
        if not set(wires_of(name)) & set(wires)
    ]
    if len(found) == len(collectives):
        return []
    found += [
        f"{wire} is allowed and never travels: {' and '.join(collectives)} cannot send it"
        for wire in wires
        if not any(wire in wires_of(name) for name in collectives)
    ]
    return found


def check_own(planner: str, collectives: Sequence[str]) -> None:
    """Raises PlanError where a planner with collectives of its own is not allowed them."""
    own = OWN_COLLECTIVES.get(planner, ())
    if not set(own) <= set(collectives):
        raise PlanError(
            f"Planner {planner!r} goes by {' and '.join(own)} and nothing else, and only "
            f"{', '.join(collectives)} may be used; allow what it needs, or take another planner."
        )
