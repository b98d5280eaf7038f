"""The sparse sums of DDP's buckets, for its hook. What was kept moves along as DDP changes them.

DDP cuts its buckets anew after the first step, by the order in which gradients became ready. So
sums belong to a bucket's parameters, and not to its number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from slipstream.comm import Collectives
from slipstream.comm.sparse import TopK
from slipstream.plan import Gradient
from slipstream.plan.sparsity import SPARSE_DTYPES, Sparsity
from slipstream.sync.owed import Owed, by_parameter, laid_out, merged, taken_apart

Layout = tuple[tuple[str, int], ...]


class HookSums:
    """Averages buckets as a `Sparsity` says, over as many ranks; used by one thread.

    owed: what this rank owes from an earlier run; in_full: replaces a tensor by its mean over
    ranks. steps: how many there were, also in earlier runs; selectors that draw use it.
    """

    def __init__(
        self,
        sparsity: Sparsity,
        collectives: Collectives,
        ranks: int,
        in_full: Callable[[torch.Tensor], None],
        *,
        owed: Iterable[Owed],
        steps: int,
    ) -> None:
        self.steps = steps
        self._sparsity = sparsity
        self._collectives = collectives
        self._ranks = ranks
        self._in_full = in_full
        self._sums: dict[Layout, TopK] = {}
        self._waiting = by_parameter(owed)
        self._used: list[TopK] = []
        self._all_finite = True

    def owed(self) -> list[Owed]:
        """What this rank owes, to be read between two steps. Values are those kept, no copies."""
        found = [piece for pieces in self._waiting.values() for piece in pieces]
        for layout, collective in self._sums.items():
            found += _owed_of(layout, collective)
        return [piece for piece in found if bool(piece.values.any())]

    def average_(
        self,
        flat: torch.Tensor,
        gradients: Mapping[str, torch.Tensor],
        *,
        is_first: bool,
        is_last: bool,
    ) -> None:
        """Replaces a bucket by its mean over ranks, as far as it is sent.

        flat: 1-D; gradients: its parts, as views, by parameter. is_first, is_last: of a step.
        """
        if is_first:
            self._used, self._all_finite = [], True
        in_full = [g for name, g in gradients.items() if not self._may_be_sparse(name, g)]
        if len(in_full) == len(gradients):
            self._in_full(flat)
            self._all_finite &= bool(flat.isfinite().all())
        else:
            self._average_sparsely(flat, gradients, in_full)
        if is_last:
            self._end_step()

    def _average_sparsely(
        self,
        flat: torch.Tensor,
        gradients: Mapping[str, torch.Tensor],
        in_full: list[torch.Tensor],
    ) -> None:
        """Gradients that are sent in full travel behind the others, and leave zeros in between."""
        collective = self._sum_of(gradients)
        if collective is None:  # a single rank
            return
        tail = torch.cat([flat[:0], *(gradient.flatten() for gradient in in_full)])
        for gradient in in_full:
            gradient.zero_()
        collective.draw = self.steps
        collective.sum_beside_(flat, tail, self._ranks)
        parts = tail.split([gradient.numel() for gradient in in_full])
        for gradient, part in zip(in_full, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))
        self._used.append(collective)
        self._all_finite &= not collective.saw_nonfinite and bool(tail.isfinite().all())

    def _may_be_sparse(self, name: str, gradient: torch.Tensor) -> bool:
        dtype = str(gradient.dtype).removeprefix("torch.")
        if dtype not in SPARSE_DTYPES:
            return False
        return self._sparsity.allows(Gradient(name, gradient.numel(), dtype))

    def _sum_of(self, gradients: Mapping[str, torch.Tensor]) -> TopK | None:
        """The sum of a bucket; where DDP has cut another one, it takes over what others kept.

        All ranks come here in the same order, as DDP cuts alike on all; it communicates then.
        """
        layout = tuple((name, gradient.numel()) for name, gradient in gradients.items())
        if layout not in self._sums:
            numel = sum(count for _, count in layout)
            made = self._collectives.for_bucket(
                self._sparsity.collective, self._sparsity.wire, numel
            )
            if not isinstance(made, TopK):
                return None
            self._dissolve(set(gradients))
            made.take_over(laid_out(self._waiting, layout, numel))
            for name, _ in layout:
                self._waiting.pop(name, None)
            self._sums[layout] = made
        return self._sums[layout]

    def _dissolve(self, names: set[str]) -> None:
        """Sums that have one of these parameters are of buckets that there are no more."""
        gone = [layout for layout in self._sums if any(name in names for name, _ in layout)]
        freed = [piece for layout in gone for piece in _owed_of(layout, self._sums.pop(layout))]
        waiting = [piece for pieces in self._waiting.values() for piece in pieces]
        self._waiting = by_parameter(merged([*waiting, *freed]))

    def _end_step(self) -> None:
        """Where something is not finite the step will be left out, and nothing of it was sent."""
        if not self._all_finite:
            for collective in self._used:
                collective.undo()
        self._used = []
        self.steps += 1


def _owed_of(layout: Layout, collective: TopK) -> list[Owed]:
    return [piece for kept in collective.kept() for piece in taken_apart(kept, layout)]
