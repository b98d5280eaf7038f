"""What sparse buckets have not sent yet, element by element of each parameter's gradient.

A rank owes what it has kept (hitopk: of its row of a bucket, for its whole node). The sum over all
ranks is what is missing in the averages that were given out so far, so it does not matter which
rank owes an element: another plan, a checkpoint or a dense bucket may shift it about. Velocities of
momentum correction are linear, too, and move in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from slipstream.comm.sparse import Kept, Kind

Places = Sequence[tuple[str, int]]
"""Gradients that lie one after the other: names and numbers of elements."""


@dataclass(frozen=True)
class Owed:
    """What a rank owes of one parameter: of its gradient's elements from `start` on.

    Elements are counted as they lie in memory, in the layout that ranks have agreed on. values:
    float32 [n], in units of the average; with a loss scale, of the scaled one. kind: see
    `comm.sparse.Kept`.
    """

    parameter: str
    start: int
    values: torch.Tensor
    kind: Kind = "residual"


def by_parameter(owed: Iterable[Owed]) -> dict[str, list[Owed]]:
    """The same, sorted by parameter."""
    found: dict[str, list[Owed]] = {}
    for piece in owed:
        found.setdefault(piece.parameter, []).append(piece)
    return found


def merged(owed: Iterable[Owed]) -> list[Owed]:
    """The same with one residual and one velocity a parameter: those of several ranks are added.

    What is left over from second selections counts as any residual.
    """
    found: dict[tuple[str, Kind], list[Owed]] = {}
    for piece in owed:
        kind: Kind = "velocity" if piece.kind == "velocity" else "residual"
        found.setdefault((piece.parameter, kind), []).append(piece)
    return [
        _sum_of(name, kind, pieces) if len(pieces) > 1 else pieces[0]
        for (name, kind), pieces in found.items()
    ]


def laid_out(
    owed: Mapping[str, Iterable[Owed]], places: Places, numel: int
) -> dict[Kind, torch.Tensor]:
    """What is owed of a bucket's gradients: float32 [numel] of every kind."""
    flats: dict[Kind, torch.Tensor] = {kind: torch.zeros(numel) for kind in get_args(Kind)}
    for start, name, _ in _starts(places):
        for piece in owed.get(name, ()):
            first = start + piece.start
            flats[piece.kind][first : first + piece.values.numel()] += piece.values
    return flats


def taken_apart(kept: Kept, places: Places) -> Iterator[Owed]:
    """What is kept of a bucket, as what is owed of its gradients. Values are views."""
    start = kept.start
    stop = start + kept.values.numel()
    for first, name, numel in _starts(places):
        low, high = max(start, first), min(stop, first + numel)
        if low < high:
            yield Owed(name, low - first, kept.values[low - start : high - start], kept.kind)


def _starts(places: Places) -> Iterator[tuple[int, str, int]]:
    start = 0
    for name, numel in places:
        yield start, name, numel
        start += numel


def _sum_of(name: str, kind: Kind, pieces: Sequence[Owed]) -> Owed:
    first = min(piece.start for piece in pieces)
    values = torch.zeros(max(p.start + p.values.numel() for p in pieces) - first)
    for piece in pieces:
        values[piece.start - first : piece.start - first + piece.values.numel()] += piece.values
    return Owed(name, first, values, kind)
