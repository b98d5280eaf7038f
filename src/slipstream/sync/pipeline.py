"""What happens to a round between its backward and the end of the forward that ends it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from slipstream.errors import SlipstreamError
from slipstream.sync.nonfinite import Flagged
from slipstream.sync.pieces import Piece
from slipstream.sync.pipelined_reducer import PipelinedReducer
from slipstream.sync.rounds import Rounds


class Pipeline:
    """The second halves of the rounds whose plan gathers. Every wait may raise RankFailure."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    @property
    def scattered(self) -> bool:
        """Whether every rank holds its pieces of averages that nothing has been done with yet."""
        reducer = self._rounds.reducer
        pipelined = isinstance(reducer, PipelinedReducer) and not reducer.gathering
        return pipelined and self._rounds.in_flight

    @property
    def _reducer(self) -> PipelinedReducer:
        reducer = self._rounds.reducer
        assert isinstance(reducer, PipelinedReducer)
        return reducer

    def flagged(self) -> Sequence[Flagged]:
        """The flags of the last round, once they are there."""
        reducer = self._rounds.reducer
        if not isinstance(reducer, PipelinedReducer):
            self._rounds.wait()
            return reducer.buffers
        if self.scattered:
            with self._rounds.awaiting("averaging"):
                reducer.await_reduced()
        return reducer.buffers

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """As `GradientSync.clip_grad_norm_`, on the pieces. Raises SlipstreamError."""
        if not norm_type > 0:
            raise SlipstreamError(f"Averages are clipped by a norm above 0, not {norm_type:g}.")
        reducer = self._reducer
        with self._rounds.awaiting("agreeing on the norm"):
            norm = reducer.norm(norm_type)
        if max_norm < math.inf:
            # as torch.nn.utils.clip_grads_with_norm_ does it: no branch to wait for on a GPU
            reducer.scale(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        dtypes = {bucket.row.dtype for bucket in reducer.buffers}
        return norm if torch.float64 in dtypes else norm.float()

    def gather(self) -> dict[str, int]:
        """Sends the averages on their way; returns in which bucket each parameter comes."""
        reducer = self._reducer
        reducer.gather()
        return {p.name: index for index, b in enumerate(reducer.gathers) for p in b.pieces}

    def take(self, index: int) -> list[Piece]:
        """Waits for a bucket of them; see `PipelinedReducer.take`."""
        with self._rounds.awaiting(f"gathering bucket {index}"):
            return self._reducer.take(index)

    def end(self) -> None:
        """All of them are there."""
        self._reducer.end()
        self._rounds.end_round(self._reducer.waited_seconds)

    def drop(self) -> None:
        """Forgets averages that nobody has stepped with, where there are some."""
        if self.scattered:
            with self._rounds.awaiting("dropping the averages"):
                self._reducer.drop()
            self._rounds.end_round(self._reducer.waited_seconds)

    def drop_spent(self) -> None:
        """Sets every `p.grad` to None with which the optimizer has been stepped."""
        if isinstance(self._rounds.reducer, PipelinedReducer):
            for piece in self._reducer.slots.values():
                piece.drop_spent()

    def params(self) -> list[torch.nn.Parameter]:
        """The parameters that are averaged."""
        return [piece.param for piece in self._reducer.slots.values()]
