"""The part of `GradientSync` that saves and restores what sparse buckets have not sent yet.

State is a mapping from "PARAMETER@START" to float32 [n]: what one rank owes of a parameter's
gradient from its element START on, as elements lie in memory in the layout that ranks agreed on;
"PARAMETER@START+" is left over from second selections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from slipstream.comm.peers import Peers
from slipstream.errors import CheckpointError
from slipstream.sync.owed import Owed, SparseTotals
from slipstream.sync.rounds import Rounds
from slipstream.sync.wrapping import Params

ResidualState = dict[str, torch.Tensor]


class Debts:
    """What ranks owe one another: the residuals of error feedback."""

    _params: Params
    _peers: Peers
    _rounds: Rounds

    def residual_state(self) -> ResidualState:
        """This rank's residuals, copied; empty where no bucket is sparse. Waits.

        Every rank has its own, and a checkpoint needs those of all ranks. They are in the unit of
        the gradients; after `follow`, of those without loss scale.
        """
        self._rounds.wait()
        return {
            f"{piece.parameter}@{piece.start}{'+' * piece.second}": piece.values
            / self._rounds.scale
            for piece in self._rounds.owed()
        }

    def follow(self, scaler: torch.amp.GradScaler) -> None:
        """Keeps residuals independent of the scaler's loss scale, which changes while training.

        Call it before the first backward. Exact, as GradScaler's factors are powers of two.
        """
        self._rounds.scale_of = scaler.get_scale

    def load_residual_state(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Replaces the residuals; all ranks call it alike, between two steps.

        states: what `residual_state` returned on each rank of the job that saved, in rank order.
        With as many ranks, on nodes as before and under the same plan, every residual is restored
        bit for bit; else each is still owed by someone, and sums over ranks are kept. Raises
        CheckpointError for what does not fit the model, with nothing changed.
        """
        self._rounds.wait()
        owed = []
        for saved, state in enumerate(states):
            pieces = [self._piece(name, values) for name, values in state.items()]
            if saved % self._peers.world_size == self._peers.rank:
                owed += pieces
        self._rounds.owe(owed)

    def take_sparse_totals(self) -> SparseTotals:
        """What sparse buckets took on this rank since the last call."""
        taken, self._rounds.sparse_totals = self._rounds.sparse_totals, SparseTotals()
        return taken

    def _piece(self, key: str, values: torch.Tensor) -> Owed:
        name, _, start = key.removesuffix("+").rpartition("@")
        param = self._params.get(name)
        first = int(start) if start.isascii() and start.isdigit() else -1
        if param is None or first < 0:
            raise CheckpointError(
                f"The residual {key!r} belongs to no parameter of this model; restore the one that "
                "was trained, or leave residuals out and lose what was not sent."
            )
        fits = values.dim() == 1 and first + values.numel() <= param.numel()
        if not fits or values.dtype != torch.float32 or not bool(values.isfinite().all()):
            raise CheckpointError(
                f"The residual {key!r} is {str(values.dtype).removeprefix('torch.')} "
                f"{list(values.shape)}, and what the parameter's {param.numel():,} elements have "
                "room for is finite float32; the checkpoint is damaged or of another model."
            )
        return Owed(name, first, values.detach() * self._rounds.scale, key.endswith("+"))
