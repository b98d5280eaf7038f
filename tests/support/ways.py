"""All ways to sum: collectives, wires, and what they are made of."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ranks import Rank, gloo_group
from slipstream.cluster import Cluster
from slipstream.comm import Collective, Collectives
from slipstream.comm.pieces import PIECES
from slipstream.comm.subgroups import Make, Subgroups
from slipstream.comm.teams import Team
from slipstream.wires import DENSE_WIRES, DenseWire

Shape = tuple[int, ...]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Way:
    """pieces: made of the backend's own pieces, as on NCCL, and not of messages."""

    name: str
    wire: DenseWire
    pieces: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.wire}{' of pieces' if self.pieces else ''}"

    def works_on(self, shape: Shape) -> bool:
        return self.name != "torus" or len(set(shape)) == 1


MESSAGES = [Way(name, wire) for name, wires in DENSE_WIRES.items() for wire in wires]
OF_PIECES = [Way(name, wire, pieces=True) for name in PIECES for wire in DENSE_WIRES[name]]
WAYS = [*MESSAGES, *OF_PIECES]


class Ways:
    """One rank's collectives, for clusters of any shape over its group."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._subgroups = Subgroups(rank.group, CPU, _maker(rank))
        self._made: dict[tuple[Shape, Way], Collective] = {}
        self._collectives: dict[Shape, Collectives] = {}

    def get(self, way: Way, shape: Shape) -> Collective:
        """All ranks ask for the same ones in the same order."""
        if (shape, way) not in self._made:
            self._made[shape, way] = self._new(way, shape)
        return self._made[shape, way]

    def _new(self, way: Way, shape: Shape) -> Collective:
        cluster = Cluster(shape)
        if way.pieces:
            return PIECES[way.name](self._subgroups, cluster, way.wire)  # type: ignore[index]
        if shape not in self._collectives:
            self._collectives[shape] = Collectives(self._rank.group, cluster)
        return self._collectives[shape].get(way.name, way.wire)


def _maker(rank: Rank) -> Make:
    """Makes Gloo groups over some of the ranks; the same calls on all of them."""

    def make(team: Sequence[int]) -> dist.ProcessGroup | None:
        rank.made.append("team")
        if rank.rank not in team:
            return None
        store = PrefixStore(f"team {len(rank.made)}", rank.store)
        return gloo_group(store, team.index(rank.rank), len(team), rank.timeout_seconds)

    return make


def shapes_of(ranks: int) -> Iterator[Shape]:
    """Every way to spread so many ranks over nodes, in order."""
    for cuts in itertools.product((False, True), repeat=ranks - 1):
        ends = [place + 1 for place, cut in enumerate(cuts) if cut] + [ranks]
        yield tuple(end - start for start, end in zip([0, *ends[:-1]], ends, strict=True))


def summed(
    way: Way, shape: Shape, values: Callable[[int], torch.Tensor], divisor: int = 1
) -> Callable[[Rank], torch.Tensor]:
    """What a rank does to sum its values; for `run_ranks`."""

    def body(rank: Rank) -> torch.Tensor:
        flat = values(rank.rank)
        Ways(rank).get(way, shape).sum_(flat, divisor)
        return flat

    return body


def count_bytes_between_nodes(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> list[int]:
    """What each node sends to others from now on, by node; ranks are threads."""
    sent = [0] * cluster.nodes
    lock = threading.Lock()
    send = Team.send

    def counted(team: Team, tensor: torch.Tensor, member: int, tag: int) -> object:
        source, target = (cluster.node_of(team.ranks[p]) for p in (team.index, member))
        if source != target:
            with lock:
                sent[source] += tensor.nbytes
        return send(team, tensor, member, tag)

    monkeypatch.setattr(Team, "send", counted)
    return sent
