"""With what a model's gradients are averaged."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.comm import Collectives, Halves
from slipstream.comm.peers import Peers
from slipstream.sync.buffers import Strides
from slipstream.sync.channel import Channel
from slipstream.sync.wrapping import Params


@dataclass(frozen=True)
class Means:
    """The same things for all rounds of a model.

    params: every parameter by name; strides: the agreed layouts; collectives: average buckets,
    halves: scatters and gathers them; timeout_seconds: limit of a wait.
    """

    params: Params
    strides: dict[str, Strides]
    collectives: Collectives
    halves: Halves
    channel: Channel
    peers: Peers
    timeout_seconds: float
    check_finite: bool
