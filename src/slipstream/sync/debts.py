"""The part of `GradientSync` for what sparse buckets keep from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from slipstream.comm.peers import Peers
from slipstream.errors import RanksDiffer, SlipstreamError
from slipstream.sparsify import Momentum
from slipstream.sync.deferred import Updates
from slipstream.sync.owed_state import ResidualState, owed_of_state, state_of
from slipstream.sync.rounds import Rounds
from slipstream.sync.sparse_buckets import SparseTotals
from slipstream.sync.wrapping import Params


class Debts:
    """What ranks owe one another: the residuals of error feedback, and velocities."""

    _params: Params
    _peers: Peers
    _rounds: Rounds
    _updates: Updates | None

    def residual_state(self) -> ResidualState:
        """This rank's residuals, copied; empty where no bucket is sparse. Waits.

        Every rank has its own, and a checkpoint needs those of all ranks; with momentum correction
        velocities are among them. They are in the unit of the gradients; after `follow`, of those
        without loss scale. Keys: see `sync.owed_state`.
        """
        self._rounds.wait()
        return state_of(self._rounds.owed(), self._rounds.scale)

    def load_residual_state(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Replaces the residuals; all ranks call it alike, between two steps.

        states: what `residual_state` returned on each rank of the job that saved, in rank order.
        With as many ranks, on nodes as before and under the same plan, every residual is restored
        bit for bit; else each is still owed by someone, and sums over ranks are kept. Raises
        CheckpointError for what does not fit the model, with nothing changed.
        """
        self._rounds.wait()
        numels = {name: param.numel() for name, param in self._params.items()}
        owed = []
        for saved, state in enumerate(states):
            pieces = owed_of_state(state, numels, self._rounds.scale)
            if saved % self._peers.world_size == self._peers.rank:
                owed += pieces
        self._rounds.owe(owed)

    def follow(self, scaler: torch.amp.GradScaler) -> None:
        """Keeps residuals independent of the scaler's loss scale, which changes while training.

        Call it before the first backward. Exact, as GradScaler's factors are powers of two.
        """
        self._rounds.scale_of = scaler.get_scale

    def correct_momentum(
        self,
        optimizer: torch.optim.Optimizer,
        momentum: float = 0.9,
        *,
        nesterov: bool = False,
        clip_norm: float | None = None,
    ) -> None:
        """Gives gradients their momentum where they are selected, and not in the optimizer.

            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)     # without momentum
            sync.correct_momentum(optimizer, 0.9, nesterov=True)

        An element that waits in a residual is thus sent with the momentum that it would have had,
        and one that was sent starts anew (momentum correction and factor masking, "Deep Gradient
        Compression", Lin et al., ICLR 2018). `p.grad` then is an update with momentum, in dense
        buckets, too; clear it before every backward that averages. Weight decay stays the
        optimizer's, outside of the momentum. At a density of 1 everything is sent, and nothing
        keeps any momentum.

        clip_norm: see `Momentum`; clips a rank's gradient of each parameter before it is added. Of
        gradients with a loss scale it is that of the unscaled ones after `follow`.

        Call it right after the GradientSync was made, on every rank alike. Raises SlipstreamError
        for an optimizer with momentum of its own, for gradients of 64 bits and where it is late or
        updates are deferred, RanksDiffer where ranks say different things.
        """
        found = Momentum(momentum, nesterov, clip_norm)
        _refuse_own_momentum(optimizer)
        _refuse_wide(self._params)
        if self._updates is not None:
            raise SlipstreamError(
                "Momentum correction takes an optimizer that steps at once, and this GradientSync "
                "defers one's updates; use one of the two."
            )
        everyone = self._peers.gather(str(found), "agreeing on momentum correction")
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise RanksDiffer(
                    f"Ranks differ: momentum correction is {everyone[0]} on rank 0 and {theirs} on "
                    f"rank {rank}. Give every rank the same."
                )
        self._rounds.correct_momentum(found)

    @property
    def corrects_momentum(self) -> bool:
        """Whether `correct_momentum` was called."""
        return self._rounds.momentum is not None

    def take_sparse_totals(self) -> SparseTotals:
        """What sparse buckets took on this rank since the last call."""
        taken, self._rounds.sparse_totals = self._rounds.sparse_totals, SparseTotals()
        return taken


def _refuse_own_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Raises SlipstreamError for an optimizer that would give gradients momentum a second time."""
    for group in optimizer.param_groups:
        for name in ("momentum", "betas"):
            value = group.get(name)
            if value:
                raise SlipstreamError(
                    f"{type(optimizer).__name__} has {name}={value!r}, and with momentum "
                    "correction gradients have their momentum already; give it an optimizer "
                    "without, such as torch.optim.SGD(..., momentum=0)."
                )


def _refuse_wide(params: Params) -> None:
    """Raises SlipstreamError for parameters whose velocities would lose precision."""
    for name, param in params.items():
        if param.dtype in (torch.float64, torch.complex64, torch.complex128):
            raise SlipstreamError(
                f"Momentum correction keeps velocities of 32 bits, and parameter {name!r} is "
                f"{str(param.dtype).removeprefix('torch.')}; leave the momentum to the optimizer."
            )
