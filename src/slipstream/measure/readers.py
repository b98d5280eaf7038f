"""At which module's call of a forward each parameter must be there, from who reads it first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence


def first_points(
    owners: Mapping[str, int],
    calls: Sequence[tuple[int, int]],
    readers: Mapping[str, int],
) -> dict[str, int | None]:
    """For each parameter the watched module at whose call it must be there, by index.

    owners: the module that holds each parameter. calls: (autograd's number, module) of every call
    of one forward, in order. readers: of `first_readers`. None: nobody saw where it is read.
    """
    first_call: dict[int, int] = {}
    for number, module in calls:
        first_call.setdefault(module, number)
    numbers = [number for number, _ in calls]
    points: dict[str, int | None] = {}
    for name, owner in owners.items():
        reader = readers.get(name)
        called = first_call.get(owner)
        if reader is None or (called is not None and called <= reader):
            points[name] = owner if called is not None else None
            continue
        before = bisect_right(numbers, reader) - 1
        points[name] = calls[before][1] if before >= 0 else None
    return points
