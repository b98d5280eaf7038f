"""What a skipped step must not change beside weights: the buffers that its forward has moved."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BufferGuard:
    """Remembers a model's buffers before a forward pass and can put them back.

    Batch norm moves its running values in the forward pass, before anybody knows that the gradients
    will be NaN; a skipped step has to undo that. Works for buffers that a module replaces, too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept: dict[str, Tensor] = {}

    def remember(self) -> None:
        """Copies all buffers, over the previous copy where shapes allow it."""
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                kept = self._kept.get(name)
                if kept is None or kept.shape != buffer.shape or kept.dtype != buffer.dtype:
                    self._kept[name] = buffer.detach().clone()
                else:
                    kept.copy_(buffer)

    def restore(self) -> None:
        """Writes the remembered values into the model's buffers."""
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                if name in self._kept:
                    buffer.copy_(self._kept[name])
