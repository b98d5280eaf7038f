"""Ranks with unequal numbers of batches, and batches with unequal numbers of samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol, TypeVar

from slipstream.comm.peers import Peers
from slipstream.errors import SlipstreamError

Batch = TypeVar("Batch")


class Engine(Protocol):
    """What is needed of GradientSync."""

    _peers: Peers

    def wait(self) -> None:
        """Nothing is in flight afterwards."""
        ...

    def _set_enabled(self, enabled: bool) -> None:
        """Switches averaging on or off for the next backward."""
        ...

    def _take_part_without_gradient(self) -> None:
        """Averages once although this rank has no backward."""
        ...


def uneven_windows(
    batches: Iterable[Batch], mode: str, window: int, sync: Engine
) -> Iterator[tuple[Batch | None, bool]]:
    """Yields what `GradientSync.uneven` describes.

    Before each window all ranks tell each other how many batches of it they have, so that every
    rank averages exactly once a window. Raises SlipstreamError for an unknown mode or a window
    below 1.
    """
    if mode not in ("stop", "join"):
        raise SlipstreamError(f"There is no mode {mode!r} for uneven batches: 'stop' or 'join'.")
    if window < 1:
        raise SlipstreamError(f"window is {window}; a window holds at least one batch.")
    source = iter(batches)
    try:
        while True:
            held = list(islice(source, window))
            sync.wait()
            counts = sync._peers.gather(len(held), "agreeing on who has a batch left")
            if max(counts) == 0 or (mode == "stop" and min(counts) < max(counts)):
                return
            for position, batch in enumerate(held, start=1):
                sync._set_enabled(position == len(held))
                yield batch, position == len(held)
            if not held:
                sync._take_part_without_gradient()
                yield None, True
    finally:
        sync._set_enabled(True)


def scale_for_sums(num_samples: int, peers: Peers) -> float:
    """What `GradientSync.loss_scale` returns. Raises SlipstreamError when no rank has a sample."""
    total: int = sum(peers.gather(num_samples, "counting samples"))
    if total < 1:
        raise SlipstreamError("No rank has a sample, so there is no mean over samples.")
    return peers.world_size / total
