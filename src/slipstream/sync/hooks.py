"""The hooks on parameters: plain functions over a weak reference to the engine.

They hold nothing of it, so the model can be copied and pickled, and an engine that nobody holds any
more leaves a model that trains on by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from slipstream.sync.backward_watch import current_task

Hook = Callable[[torch.Tensor], None]


class Listener(Protocol):
    """What the hooks call.

    task: the graph task in which no gradient can come twice and nothing is in the way of any; its
    hooks need not call `before_accumulate`.
    """

    task: int

    def before_accumulate(self, name: str) -> None:
        """A gradient is about to be added to this parameter's."""
        ...

    def after_accumulate(self, name: str) -> None:
        """A gradient has been added to this parameter's."""
        ...


def register_hooks(params: Mapping[str, nn.Parameter], listener: Listener) -> list[Any]:
    """Hooks on every parameter that can have a gradient, frozen ones too; returns the handles."""
    reference = weakref.ref(listener)
    handles: list[Any] = []
    for name, param in params.items():
        if not (param.is_floating_point() or param.is_complex()):
            continue
        # a frozen parameter takes no hooks, but keeps those that it has
        trainable = param.requires_grad
        param.requires_grad_(True)
        handles.append(param.register_hook(_before(reference, name)))
        handles.append(param.register_post_accumulate_grad_hook(_after(reference, name)))
        param.requires_grad_(trainable)
    return handles


def _before(reference: weakref.ref[Listener], name: str) -> Hook:
    def before(_gradient: torch.Tensor) -> None:
        listener = reference()
        if listener is not None and listener.task != current_task():
            listener.before_accumulate(name)

    return before


def _after(reference: weakref.ref[Listener], name: str) -> Hook:
    def after(_param: torch.Tensor) -> None:
        listener = reference()
        if listener is not None:
            listener.after_accumulate(name)

    return after
