"""Catches a GradScaler that reads gradients which are still in flight (with wait="update")."""

from __future__ import annotations

import sys

from torch.amp import GradScaler

from slipstream.errors import SlipstreamError

_SCALER_STEPS = (GradScaler.step.__code__, GradScaler._maybe_opt_step.__code__)


def refuse_early_unscale(in_flight: bool) -> None:
    """Raises SlipstreamError when called inside GradScaler.step while buckets are in flight.

    The scaler looks for infinities before it calls the optimizer, so it has looked at numbers that
    were not averages yet; `sync.unscale_(scaler, optimizer)` before `scaler.step` is right.
    """
    if not in_flight:
        return
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _SCALER_STEPS:
            raise SlipstreamError(
                "GradScaler looked at gradients before they were averaged; after "
                "sync.attach(optimizer) call sync.unscale_(scaler, optimizer) before "
                "scaler.step(optimizer)."
            )
        frame = frame.f_back  # type: ignore[assignment]
