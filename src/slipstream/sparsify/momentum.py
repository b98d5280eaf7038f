"""Momentum of what is selected from: momentum correction and factor masking.

"Deep Gradient Compression", Lin et al., ICLR 2018: an element that waits in a residual for twenty
steps comes without the momentum that it would have had. So velocities, and not gradients, are added
to residuals, and an element that was sent starts again without any:

    plain       u = m u + g           v = v + u
    Nesterov    u = m (u + g)         v = v + u + g        then u = v = 0 where v was sent
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from slipstream.errors import SlipstreamError


@dataclass(frozen=True)
class Momentum:
    """factor: of the velocity that is kept from step to step, at least 0 and below 1.

    nesterov: Nesterov's form. clip_norm: the largest 2-norm that a parameter's gradient may have
    before it is added, of all ranks together: a rank's is clipped at clip_norm / sqrt(ranks), as
    the sum of independent gradients grows with the root of their number. None clips nothing.

    Raises SlipstreamError for impossible numbers.
    """

    factor: float
    nesterov: bool = False
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.factor < 1:
            raise SlipstreamError(
                f"A momentum of {self.factor!r} cannot be used; it is at least 0 and below 1."
            )
        if self.clip_norm is not None and not (
            self.clip_norm > 0 and math.isfinite(self.clip_norm)
        ):
            raise SlipstreamError(
                f"clip_norm is {self.clip_norm!r}; it is a norm above 0, or None to clip nothing."
            )


class Velocity:
    """The velocities of a flat gradient; velocity: float32 [numel], zeros at first.

    can_undo: keeps what was before the last call of `add`, in as much memory again.
    """

    def __init__(self, numel: int, momentum: Momentum, *, can_undo: bool = False) -> None:
        self.velocity = torch.zeros(numel)
        self._momentum = momentum
        self._before = torch.zeros(numel) if can_undo else None
        self._undoable = False
        self._update = torch.empty(numel if momentum.nesterov else 0)

    def add(self, gradient: torch.Tensor) -> torch.Tensor:
        """Takes a gradient (float32 [numel], left as it is) in; what to add to the residual.

        Valid until the next call.
        """
        old, factor = self.velocity, self._momentum.factor
        new = old
        if self._before is not None:
            new, self._before, self._undoable = self._before, old, True
        self.velocity = new
        if not self._momentum.nesterov:
            return torch.add(gradient, old, alpha=factor, out=new)
        torch.add(old, gradient, out=new).mul_(factor)
        return torch.add(new, gradient, out=self._update)

    def mask(self, indices: torch.Tensor) -> None:
        """Factor masking: these elements were sent, and start again from nothing."""
        self.velocity[indices] = 0.0

    def undo(self) -> None:
        """Makes velocities what they were before the last call of `add`, bit for bit."""
        if self._before is None or not self._undoable:
            raise RuntimeError("No velocity of before is kept: see can_undo, and undo only once.")
        self.velocity, self._before = self._before, self.velocity
        self._undoable = False

    def undo_elements(self, start: int, stop: int) -> None:
        """As `undo`, of these elements alone; the others can still be undone afterwards."""
        if self._before is None or not self._undoable:
            raise RuntimeError("No velocity of before is kept: see can_undo, and undo only once.")
        self.velocity[start:stop] = self._before[start:stop]
