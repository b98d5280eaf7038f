"""The norm of averages of which each rank holds pieces.

A rank puts the norm of its pieces into its own place of a small message that is summed over ranks,
so that all ranks form the total from the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from slipstream.comm import Collective
from slipstream.sync.channel import Channel
from slipstream.sync.tickets import Finished


class Norms:
    """The message of one plan's rounds."""

    def __init__(
        self, device: torch.device, collective: Collective, rank: int, world_size: int
    ) -> None:
        self._norms = torch.zeros(world_size, dtype=torch.float64, device=device)
        self._collective = collective
        self._rank = rank

    def send(self, channel: Channel, rows: Sequence[torch.Tensor], norm_type: float) -> Finished:
        """Submits it, behind all reduce buckets; `rows` are looked at when its turn comes."""

        def exchange() -> None:
            self._norms.zero_()
            if rows:
                self._norms[self._rank] = nn.utils.get_total_norm(rows, norm_type)
            self._collective.sum_(self._norms)

        return channel.submit(exchange)

    def total(self, norm_type: float) -> torch.Tensor:
        """The norm of all averages (0-d, float64), once the message has come back."""
        norm: torch.Tensor = torch.linalg.vector_norm(self._norms, norm_type)
        return norm
