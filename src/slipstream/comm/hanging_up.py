"""Closing connections, so that nobody waits for a rank that has given up."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist

from slipstream.comm.torch_comm import backend_of

_TAG = 2**31 - 1
"""No collective's message has it."""
_CPU = torch.device("cpu")


def hang_up(group: dist.ProcessGroup) -> None:
    """Closes this rank's connections in a group: whoever waits for it there fails now.

    Otherwise the others would find out one after the other, each when its own time is up. Nothing
    can travel in the group afterwards. Gloo has no call for it, but it closes all connections when
    a wait runs out of time: so this one waits a millisecond for what nobody sends. On groups
    without Gloo on CPUs nothing happens.
    """
    if _CPU not in group._device_types or backend_of(group, _CPU) != "gloo":
        return
    memory = torch.empty(1, dtype=torch.uint8)
    for distance in range(1, group.size()):
        # an error means that this connection is closed, not yet that the others are
        with contextlib.suppress(RuntimeError):
            other = (group.rank() + distance) % group.size()
            group.recv([memory], other, _TAG).wait(timedelta(milliseconds=1))
