"""Which engine belongs to which model: it lives as long as the model, until it is closed.

The hooks on parameters hold the engine weakly, so that models can be copied and pickled. Without
this book an engine that the user does not keep in a variable would be collected, and training
would go on with gradients that nobody averages.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import nn

from slipstream.errors import SlipstreamError


class Engine(Protocol):
    """What is needed of GradientSync."""

    @property
    def broken(self) -> bool:
        """Whether it can average no more."""
        ...

    def close(self) -> None:
        """Takes it off its model."""
        ...


_ENGINES: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()


def make_way(model: nn.Module) -> None:
    """Closes a broken engine of this model. Raises SlipstreamError when it has a working one."""
    engine = _ENGINES.get(model)
    if engine is None:
        return
    if not engine.broken:
        raise SlipstreamError(
            "This model has a GradientSync already; close() that one before making another."
        )
    engine.close()


def keep(model: nn.Module, engine: Engine) -> None:
    """Keeps the engine alive with the model."""
    _ENGINES[model] = engine


def drop(model: nn.Module | None) -> None:
    """Forgets the engine of this model."""
    if model is not None:
        _ENGINES.pop(model, None)
