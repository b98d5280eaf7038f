"""Collectives in which all ranks of a group are alike, by messages between two of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from slipstream.comm import doublings, exchanges
from slipstream.comm.formats import Format
from slipstream.comm.teams import Scratch, Steps, Team, carry_out
from slipstream.comm.widening import as_wide
from slipstream.wires import DenseWire

AllReduce = Callable[[Team, torch.Tensor, Format, int, int], Steps]
"""Of a team's tensor, by messages with tags from a given one on, divided by a divisor."""

ALGORITHMS: dict[str, AllReduce] = {
    "ring": exchanges.ring,
    "direct": exchanges.direct,
    "halving_doubling": doublings.halving_doubling,
    "recursive_doubling": doublings.recursive_doubling,
}


class Flat:
    """One of `ALGORITHMS` over all ranks of a group of Gloo's. Follows `Collective`.

    Of these only `direct` gives an element the same bits whatever travels beside it.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, wire: DenseWire = "float32") -> None:
        self.name = name
        self.wire = wire
        self.layout_invariant = name == "direct"
        self._all_reduce = ALGORITHMS[name]
        self._team = Team(group, range(group.size()))
        self._scratch = Scratch()
        self._format = Format(wire, self._scratch)

    def sum_(self, flat: torch.Tensor, divisor: int = 1) -> None:
        """See `Collective.sum_`."""
        with as_wide(flat) as wide:
            carry_out([self._all_reduce(self._team, wide, self._format, 0, divisor)])
        self._scratch.release()

    def begin(self, flat: torch.Tensor, divisor: int = 1) -> None:
        """None: several rounds need somebody who goes on from one to the next."""
