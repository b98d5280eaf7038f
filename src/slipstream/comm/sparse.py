"""Collectives that send a few elements of a bucket and keep what was not sent for the next time.

    hitopk       rows are scattered within the node and added; every rank selects k of its row,
                 sends them to the ranks of the same place on all nodes, adds up what it got, and
                 rows are gathered within the node (HiTopKComm of "Towards Scalable Distributed
                 Training of Deep Learning on Public Cloud Clusters", Shi et al., MLSys 2021)
    naive_topk   every rank selects k of the whole bucket, and all get all of it
    a2a_topk     as hitopk, but each selection goes to the one node that owns its part of the row,
                 which adds up, selects again, and sends that to all: bytes that do not grow with
                 the number of nodes, for a second selection and what it leaves behind

Bytes that a node's card sends for a bucket of d elements, with m nodes of n ranks, s bytes a value
and k = density * d:

    hitopk      (m-1) k (s+4)
    naive_topk  (m n - 1) k (s+4), around a ring
    a2a_topk    2 (m-1)/m k (s+4)

A bucket ends with elements that must arrive as they are (the engine's flags): these are summed in
full. Within a node they are gathered, between nodes each message begins with its node's sum.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist

from slipstream.cluster import Cluster
from slipstream.comm import exchanges
from slipstream.comm.formats import Format
from slipstream.comm.messages import ALIGNED_BYTES, VALUES, add_message, message_bytes, pack
from slipstream.comm.teams import Scratch, Steps, Team, carry_out
from slipstream.comm.widening import as_wide
from slipstream.errors import PlanError
from slipstream.sparsify import ErrorFeedback, Momentum, Velocity, k_of, selector
from slipstream.wires import Density

Gather = Literal["dense", "sparse"]
Kind = Literal["residual", "second", "velocity"]
_ADDING_BYTES = 4
"""What adding one element that arrived costs, in bytes that could travel in the node meanwhile."""
_RING_FROM_BYTES = 32 * 1024
_TAG_A_STAGE = 2**20


@dataclass(frozen=True)
class Kept:
    """What a rank keeps of a bucket from call to call: float32 [n], of elements from `start` on.

    kind: a residual, which was not sent yet; a second one, left over from a second selection, among
    what other ranks had selected; or the velocity of momentum correction.
    """

    start: int
    values: torch.Tensor
    kind: Kind = "residual"


class TopK:
    """The sparse sum of one bucket. Follows `Collective`.

    name: see above. numel: elements of the bucket to select from; what `sum_` is given beyond them
    is summed in full. wire: the share of them that travels, as what, and by which selector. seed:
    of selectors that draw. gather: how rows get around inside a node, as they are or as the
    selections that they are made of; None takes what moves fewer bytes there. can_undo: see `undo`.
    momentum: of momentum correction, at the first selection; None adds gradients as they are.

    selection_seconds: what selecting took in the last call; saw_nonfinite: whether a rank selected
    something that is not finite, the same on all ranks; draw: which random numbers the next
    call uses, if any; the caller counts it. float32 and 16-bit buckets on CPUs only.
    """

    layout_invariant = False

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup,
        cluster: Cluster,
        numel: int,
        wire: Density,
        *,
        seed: int = 0,
        gather: Gather | None = None,
        can_undo: bool = False,
        momentum: Momentum | None = None,
    ) -> None:
        self.name, self.wire, self.numel = name, wire, numel
        self.selection_seconds, self.draw = 0.0, 0
        self.saw_nonfinite = False
        self._cluster = cluster
        self._lead_bytes = 0
        self._node, self._across = _teams(name, group, cluster)
        self._values = VALUES[wire.values]
        self._scratch = Scratch()
        self._local = Format("float32", self._scratch)
        cut = self._across.size if name == "a2a_topk" else 1
        self._parts = [_split(row, cut) for row in _split(range(numel), self._node.size)]
        self._ks = [[k_of(wire.density, len(part)) for part in row] for row in self._parts]
        largest = max(k for row in self._ks for k in row)
        self._slot_bytes = message_bytes(max(largest, 1), self._values)
        select = selector(wire.selector, seed)
        self._mine = [
            ErrorFeedback(len(part), select, values=self._values, can_undo=can_undo)
            for part in self._parts[self._node.index]
        ]
        self._velocities: list[Velocity] = []
        if momentum is not None:
            sizes = [len(part) for part in self._parts[self._node.index]]
            self._velocities = [Velocity(size, momentum, can_undo=can_undo) for size in sizes]
        self._owned: ErrorFeedback | None = None
        if name == "a2a_topk":
            owned = self._parts[self._node.index][self._across.index]
            self._owned = ErrorFeedback(len(owned), select, values=self._values, can_undo=can_undo)
        self._gather = gather or self._cheaper()

    @property
    def sent_bytes(self) -> int:
        """What this rank sends to ranks of other nodes in a call, without headers and the tail."""
        sizes = self._message_sizes()
        if self.name == "naive_topk":
            ranks, index = self._across.size, self._across.index
            here = self._cluster.node_of(index)
            if self._goes_along_a_ring(sizes):
                leaves = self._cluster.node_of((index + 1) % ranks) != here
                return (ranks - 1) * sizes[0] if leaves else 0
            return (ranks - len(self._cluster.ranks_of_node(here))) * sizes[0]
        index = self._across.index
        spread = (self._across.size - 1) * sizes[index]
        return spread if self._owned is None else spread + sum(sizes) - sizes[index]

    @property
    def memory_bytes(self) -> int:
        """Of what this rank selects from, as float32."""
        return 4 * sum(len(part) for part in self._parts[self._node.index])

    @property
    def selected_bytes(self) -> int:
        """Of what this rank selects from it, with indices."""
        return sum(message_bytes(k, self._values) for k in self._ks[self._node.index])

    @property
    def gather(self) -> Gather:
        """How rows get around inside a node."""
        return self._gather

    def kept(self) -> Iterator[Kept]:
        """What this rank keeps, to be read or overwritten between calls.

        The sum of residuals over all ranks is what is still missing in the averages (with `divisor`
        1: in the sums) that were given out, or with momentum correction in the updates.
        """
        parts = self._parts[self._node.index]
        for part, feedback in zip(parts, self._mine, strict=True):
            yield Kept(part.start, feedback.residual)
        if self._owned is not None:
            yield Kept(parts[self._across.index].start, self._owned.residual, "second")
        for part, velocity in zip(parts, self._velocities, strict=bool(self._velocities)):
            yield Kept(part.start, velocity.velocity, "velocity")

    def undo(self) -> None:
        """Makes what is kept what it was before the last call, bit for bit. Needs `can_undo`."""
        for keeper in self._keepers():
            keeper.undo()

    def undo_elements(self, start: int, stop: int) -> None:
        """As `undo`, of these elements of the bucket alone; may be called for several."""
        for kept, keeper in zip(self.kept(), self._keepers(), strict=True):
            low, high = max(start - kept.start, 0), min(stop - kept.start, kept.values.numel())
            if low < high:
                keeper.undo_elements(low, high)

    def take_over(self, owed: Mapping[Kind, torch.Tensor]) -> None:
        """Makes what is kept what is owed by all ranks together; communicates.

        owed: float32 [numel] of every kind, mutated: what this rank owes, from another layout or an
        earlier run. What is owed of second selections stays that where this rank has them, and is
        owed like all else where it has not. What several ranks of a node owe is added. Raises what
        the backend raises when a rank does not come.
        """
        if self._owned is None:
            owed["residual"].add_(owed["second"])
        carry_out([self._take_over(owed)])
        self._scratch.release()

    def sum_(self, flat: torch.Tensor, divisor: int = 1) -> None:
        """See `Collective.sum_`: of the first `numel` elements those that were selected.

        Division comes before selection, so that residuals have the unit of averages. Raises
        PlanError for 64-bit and complex numbers.
        """
        self.sum_beside_(flat[: self.numel], flat[self.numel :], divisor)

    def sum_beside_(self, flat: torch.Tensor, tail: torch.Tensor, divisor: int = 1) -> None:
        """As `sum_`, where what is summed in full (1-D, of the same dtype) lies elsewhere."""
        with as_wide(flat) as wide, as_wide(tail) as wide_tail:
            if wide.dtype != torch.float32:
                raise PlanError(
                    f"The collective {self.name!r} sends 32-bit and 16-bit gradients, and these "
                    f"are {flat.dtype}; plan another collective for their buckets."
                )
            carry_out([self._steps(wide, wide_tail, divisor)])
        self._scratch.release()

    def begin(self, flat: torch.Tensor, divisor: int = 1) -> None:
        """None: see `Flat.begin`."""

    def _keepers(self) -> list[ErrorFeedback | Velocity]:
        """Of what `kept` gives, in its order."""
        second = [] if self._owned is None else [self._owned]
        return [*self._mine, *second, *self._velocities]

    def _steps(self, flat: torch.Tensor, tail: torch.Tensor, divisor: int) -> Steps:
        node, self.selection_seconds = self._node, 0.0
        rows = flat.tensor_split(node.size)
        yield from exchanges.scatter_at_once(node, rows, self._local, 0, divisor)
        self._lead_bytes = -(-tail.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        results = self._slots()
        row = rows[node.index]
        yield from self._sum_in_node(tail)
        self._lead_of(results[self._across.index], tail).copy_(tail)
        if self._owned is None:
            self._select_mine(0, row, results[self._across.index])
        else:
            yield from self._exchange_parts(self._owned, row, results)
        yield from self._spread(results)
        _sum_in_order([self._lead_of(slot, tail) for slot in results], tail)
        tail.div_(divisor)
        if self._gather == "sparse":
            yield from self._gather_selections(rows, results)
            return
        status = self._scratch.take(node.size, torch.uint8)
        status[node.index] = self._add_up(results, node.index, row)
        yield from exchanges.gather_at_once(node, rows, self._local, exchanges.GATHER_TAG)
        yield from exchanges.gather_at_once(node, status.split(1), self._local, 5 * _TAG_A_STAGE)
        self.saw_nonfinite = bool(status.any())

    def _sum_in_node(self, tail: torch.Tensor) -> Steps:
        """Replaces what lies behind the gradients by its sum over the node."""
        node = self._node
        tails = self._scratch.take(node.size * tail.numel(), tail.dtype).view(node.size, -1)
        tails[node.index] = tail
        yield from exchanges.gather_at_once(node, tails.unbind(), self._local, 6 * _TAG_A_STAGE)
        _sum_in_order(tails.unbind(), tail)

    def _lead_of(self, slot: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
        """The beginning of a message, which is a sum of tails."""
        return slot[: tail.nbytes].view(tail.dtype)

    def _take_over(self, owed: Mapping[Kind, torch.Tensor]) -> Steps:
        parts = yield from self._scatter_owed(owed["residual"], 0)
        for feedback, part in zip(self._mine, parts, strict=True):
            feedback.residual.copy_(part)
        if self._velocities:
            parts = yield from self._scatter_owed(owed["velocity"], 7 * _TAG_A_STAGE)
            for velocity, part in zip(self._velocities, parts, strict=True):
                velocity.velocity.copy_(part)
        if self._owned is None:
            return
        parts = yield from self._scatter_owed(owed["second"], _TAG_A_STAGE)
        for place, (feedback, part) in enumerate(zip(self._mine, parts, strict=True)):
            if place == self._across.index:
                self._owned.residual.copy_(part)
            else:
                feedback.residual += part

    def _scatter_owed(
        self, flat: torch.Tensor, tag: int
    ) -> Generator[Any, None, tuple[torch.Tensor, ...]]:
        """The parts of this rank's row of the sum over its node (`flat` is mutated)."""
        rows = flat.tensor_split(self._node.size)
        yield from exchanges.scatter_at_once(self._node, rows, self._local, tag, 1)
        return rows[self._node.index].tensor_split(len(self._mine))

    def _exchange_parts(
        self, owned: ErrorFeedback, row: torch.Tensor, results: torch.Tensor
    ) -> Steps:
        """Every node gets all selections of its part of the row, and selects from their sum."""
        across, outgoing, arriving = self._across, self._slots(), self._slots()
        ks, index = self._ks[self._node.index], self._across.index
        parts = row.tensor_split(across.size)
        lead, tag = self._lead_bytes, 2 * _TAG_A_STAGE
        sizes = [message_bytes(k, self._values) for k in ks]
        awaited = [
            across.receive(arriving[o, lead : lead + sizes[index]], o, tag) for o in across.others()
        ]
        for place, (part, slot) in enumerate(zip(parts, outgoing, strict=True)):
            self._select_mine(place, part, slot)
        arriving[index] = outgoing[index]
        sent = [across.send(outgoing[o, lead : lead + sizes[o]], o, tag) for o in across.others()]
        yield awaited
        total = parts[index].zero_()
        for message in arriving:
            add_message(message[lead:], ks[index], self._values, total)
        self._select(owned, total, results[index])
        yield sent

    def _spread(self, results: torch.Tensor) -> Steps:
        """Everybody across gets everybody's selection, each in its slot of `results` (mutated)."""
        sizes = self._message_sizes()
        rows = [slot[: self._lead_bytes + size] for slot, size in zip(results, sizes, strict=True)]
        spread = exchanges.gather_at_once
        if self._goes_along_a_ring(sizes):
            spread = exchanges.gather_along_a_ring
        yield from spread(self._across, rows, self._local, 3 * _TAG_A_STAGE)

    def _message_sizes(self) -> list[int]:
        """Bytes of the message that each rank across spreads."""
        sizes = [message_bytes(k, self._values) for k in self._ks[self._node.index]]
        return sizes if self._owned is not None else sizes * self._across.size

    def _goes_along_a_ring(self, sizes: Sequence[int]) -> bool:
        """Where several ranks of a node would send large messages through its card side by side."""
        is_crowded = self.name == "naive_topk" and max(self._cluster.ranks_per_node) > 1
        return is_crowded and max(sizes) >= _RING_FROM_BYTES

    def _gather_selections(self, rows: Sequence[torch.Tensor], results: torch.Tensor) -> Steps:
        """Every rank of the node gets what all rows are made of, and adds it up by itself."""
        node = self._node
        slots = [results if o == node.index else self._slots() for o in range(node.size)]
        flat = [slot.view(-1) for slot in slots]
        yield from exchanges.gather_at_once(node, flat, self._local, 4 * _TAG_A_STAGE)
        found = [self._add_up(slots[member], member, row) for member, row in enumerate(rows)]
        self.saw_nonfinite = any(found)

    def _add_up(self, results: torch.Tensor, member: int, row: torch.Tensor) -> bool:
        """Makes a row the sum of its messages, in the order of the nodes, which all ranks keep.

        Returns whether some of what was sent is not finite.
        """
        row.zero_()
        parts = row.tensor_split(len(self._parts[member]))
        landings = list(zip(parts, self._ks[member], strict=True))
        if self._owned is None:
            landings *= self._across.size
        messages = results[:, self._lead_bytes :]
        pairs = zip(messages, landings, strict=True)
        return not all([add_message(m, k, self._values, target) for m, (target, k) in pairs])

    def _select_mine(self, place: int, part: torch.Tensor, slot: torch.Tensor) -> None:
        """The first selection, from one part of this rank's row."""
        if not self._velocities:
            self._select(self._mine[place], part, slot)
            return
        velocity = self._velocities[place]
        velocity.mask(self._select(self._mine[place], velocity.add(part), slot))

    def _select(
        self, feedback: ErrorFeedback, part: torch.Tensor, slot: torch.Tensor
    ) -> torch.Tensor:
        """Puts a message into the slot; returns the indices in it."""
        started = time.perf_counter()
        k = k_of(self.wire.density, part.numel())
        selection = feedback.select(part, k, self.draw)
        pack(selection, slot[self._lead_bytes :])
        self.selection_seconds += time.perf_counter() - started
        return selection.indices

    def _slots(self) -> torch.Tensor:
        """Memory for one message from every rank across."""
        size, slot_bytes = self._across.size, self._lead_bytes + self._slot_bytes
        return self._scratch.take(size * slot_bytes, torch.uint8).view(size, slot_bytes)

    def _cheaper(self) -> Gather:
        """What a rank of the node has to get from another one, in either way."""
        row = max(len(part) for row in self._parts for part in row) * len(self._parts[0])
        elements = self._across.size * max(k for row in self._ks for k in row)
        sparse = self._across.size * self._slot_bytes + elements * _ADDING_BYTES
        return "sparse" if sparse < row * 4 else "dense"


def _teams(name: str, group: dist.ProcessGroup, cluster: Cluster) -> tuple[Team, Team]:
    """Who adds before it selects, and who exchanges selections."""
    rank = group.rank()
    if name == "naive_topk":
        return Team(group, [rank]), Team(group, range(group.size()))
    place = cluster.local_rank_of(rank)
    node = Team(group, cluster.ranks_of_node(cluster.node_of(rank)))
    return node, Team(group, [cluster.ranks_of_node(n)[place] for n in range(cluster.nodes)])


def _sum_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Writes the sum of the parts, from the first to the last, into `out`."""
    first, *rest = parts
    out.copy_(first)
    for part in rest:
        out.add_(part)


def _split(elements: range, count: int) -> list[range]:
    """As torch's `tensor_split`: the first ones are longer by one where it does not come out."""
    size, longer = divmod(len(elements), count)
    ends = [number * size + min(number, longer) for number in range(count + 1)]
    return [elements[start:end] for start, end in pairwise(ends)]
