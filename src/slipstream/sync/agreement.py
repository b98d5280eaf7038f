"""What ranks tell each other between the two halves, in one small message.

    [ flag 0 | flag 1 | ... | norm of rank 0 | norm of rank 1 | ... ]    float64, summed over ranks

A flag is 1 where the rank contributed to the parameter's average; after the sum, 0 means that
nobody did. With `check_finite` it is NaN where the rank's gradient was not finite. A rank puts the
norm of its pieces into its own place, so that all ranks form the total norm from the same numbers
in the same order. Who asks for the norm in one round is given it in the next one's first message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from slipstream.comm import Collective
from slipstream.sync.channel import Channel, Finished
from slipstream.sync.pieces import Piece


class Agreement:
    """The message of one plan's rounds.

    slots: in the order of their flags; local_flags: this rank's, to be filled during backward;
    flags: their sums over ranks.
    """

    def __init__(
        self, slots: Sequence[Piece], collective: Collective, rank: int, world_size: int
    ) -> None:
        device = slots[0].param.device if slots else torch.device("cpu")
        self.slots = slots
        self.local_flags = torch.ones(len(slots), dtype=torch.float64, device=device)
        self._message = torch.zeros(len(slots) + world_size, dtype=torch.float64, device=device)
        self.flags = self._message[: len(slots)]
        self.ticket: Finished | None = None
        self._norms = self._message[len(slots) :]
        self._collective = collective
        self._rank = rank
        self._sent_norm: float | None = None
        self._asked_norm: float | None = None
        self._usual_norm: float | None = None

    def begin(self) -> None:
        """Starts a round: everything contributed, until somebody says otherwise."""
        self.local_flags.fill_(1.0)
        self.ticket = None
        self._usual_norm, self._asked_norm = self._asked_norm, None

    def send(
        self, channel: Channel, rows: Sequence[torch.Tensor], norm_type: float | None = None
    ) -> None:
        """Submits the message, behind all reduce buckets, unless it said as much already.

        rows: this rank's pieces, of which the norm is taken when the message's turn comes.
        """
        self._asked_norm = norm_type or self._asked_norm
        if self.ticket is not None and norm_type in (None, self._sent_norm):
            return
        norm_type = norm_type or self._usual_norm
        self._sent_norm = norm_type

        def exchange() -> None:
            self.flags.copy_(self.local_flags)
            self._norms.zero_()
            if norm_type is not None and rows:
                self._norms[self._rank] = nn.utils.get_total_norm(rows, norm_type)
            self._collective.sum_(self._message)

        self.ticket = channel.submit(exchange)

    def total_norm(self) -> torch.Tensor:
        """The norm of all averages (0-d, float64), once the message with it has come back."""
        assert self._sent_norm is not None
        norm: torch.Tensor = torch.linalg.vector_norm(self._norms, self._sent_norm)
        return norm

    def pieces_changed(self) -> None:
        """The norm that was sent is out of date."""
        self._sent_norm = self._usual_norm = None

    def used(self) -> list[bool]:
        """Which parameters some rank contributed to. On a GPU this waits where a rank did not."""
        if all(piece.contributed for piece in self.slots):
            return [True] * len(self.slots)
        return [flag != 0.0 for flag in self.flags.tolist()]
