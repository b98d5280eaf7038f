"""The hooks through which a model tells a recorder what happens in its forward and backward.

They return nothing, so training goes on bit for bit as without them, and hold the recorder weakly;
the model can be copied and pickled meanwhile. Nothing is hooked inside a compiled module, where a
hook would be traced or make it compile again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from slipstream.errors import UnsupportedModel
from slipstream.measure.recorder import Recorder

Reference = weakref.ref[Recorder]


def watched_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters whose gradients are averaged: trainable, each shared one once, by name.

    Raises UnsupportedModel for sharded and lazy ones, and for a model that has none.
    """
    found = {
        name: param
        for name, param in model.named_parameters()
        if param.requires_grad and (param.is_floating_point() or param.is_complex())
    }
    for name, param in found.items():
        if isinstance(param, DTensor):
            raise UnsupportedModel(
                f"Parameter {name!r} is a DTensor (FSDP or tensor parallel); only models with "
                "replicated parameters can be profiled."
            )
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise UnsupportedModel(
                f"Parameter {name!r} of a lazy module has no shape yet; run one forward first."
            )
    if not found:
        raise UnsupportedModel("The model has no trainable parameter; there is nothing to profile.")
    return found


class Watch:
    """Hooks on one model, from construction to `remove`.

    Watched are, in order of registration, the model itself and the modules that hold parameters or
    are compiled; the latter stand for all that they contain. owners: the number of the watched
    module that each parameter belongs to. compiled_whole: whether the model itself is compiled.
    Nothing of it keeps the model alive.
    """

    def __init__(self, model: nn.Module, params: dict[str, nn.Parameter], recorder: Recorder):
        reference = weakref.ref(recorder)
        points = list(_points(model))
        self.compiled_whole = _is_compiled(model)
        self.owners = _owners(points, params)
        self._undo: list[Callable[[], None]] = []
        for index, module in enumerate(points):
            self._watch(module, index, reference)
        for name, param in params.items():
            handle = param.register_post_accumulate_grad_hook(_ready(reference, name))
            self._undo.append(handle.remove)

    def remove(self) -> None:
        """Takes every hook off again."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _watch(self, module: nn.Module, index: int, reference: Reference) -> None:
        compiled = module._compiled_call_impl
        if compiled is not None:  # hooks of a module that compiled itself are compiled with it
            module._compiled_call_impl = _around(compiled, index, reference)

            def restore() -> None:
                module._compiled_call_impl = compiled

            self._undo.append(restore)
            return
        before = module.register_forward_pre_hook(_enter(reference, index), with_kwargs=True)
        self._undo.append(before.remove)
        if index == 0:
            after = module.register_forward_hook(_leave(reference), always_call=True)
            self._undo.append(after.remove)


def _is_compiled(module: nn.Module) -> bool:
    """Whether calling the module runs compiled code: by torch.compile, or its own compile()."""
    return module._compiled_call_impl is not None or hasattr(module, "_torchdynamo_orig_callable")


def _points(model: nn.Module) -> Iterator[nn.Module]:
    yield model
    if not _is_compiled(model):
        yield from _points_inside(model)


def _points_inside(module: nn.Module) -> Iterator[nn.Module]:
    for child in dict.fromkeys(module.children()):
        compiled = _is_compiled(child)
        if compiled or next(child.parameters(recurse=False), None) is not None:
            yield child
        if not compiled:
            yield from _points_inside(child)


def _owners(points: list[nn.Module], params: dict[str, nn.Parameter]) -> dict[str, int]:
    owner_of: dict[int, int] = {}
    for index, module in enumerate(points):
        for param in module.parameters(recurse=_is_compiled(module)):
            owner_of.setdefault(id(param), index)
    return {name: owner_of[id(param)] for name, param in params.items()}


def _samples(arguments: tuple[Any, ...]) -> int:
    """The first dimension of the first tensor among a call's arguments; 0 where there is none."""
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    return 0


class _Hook:
    """Tells the recorder while there is one; in a copy or a pickle of the model it does nothing."""

    def __init__(self, reference: Reference, tell: Callable[..., None]) -> None:
        self._reference = reference
        self._tell = tell

    def __call__(self, *event: Any) -> None:
        recorder = self._reference()
        if recorder is not None:
            self._tell(recorder, *event)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _inert, ()


def _inert() -> Callable[..., None]:
    return _ignore


def _ignore(*_: object) -> None:
    """Stands where a hook was."""


def _enter(reference: Reference, point: int) -> _Hook:
    def enter(recorder: Recorder, _module: object, args: Any, kwargs: Any) -> None:
        recorder.enter(point, _samples((args, kwargs)) if point == 0 else 0)

    return _Hook(reference, enter)


def _leave(reference: Reference) -> _Hook:
    def leave(recorder: Recorder, _module: object, _args: Any, output: Any) -> None:
        recorder.leave(output)

    return _Hook(reference, leave)


def _ready(reference: Reference, name: str) -> _Hook:
    def ready(recorder: Recorder, _param: object) -> None:
        recorder.ready(name)

    return _Hook(reference, ready)


def _around(call: Callable[..., Any], point: int, reference: Reference) -> Callable[..., Any]:
    """The compiled call of a module, with the recorder told before and, of the model, after."""
    enter, leave = _enter(reference, point), _leave(reference)

    def around(*args: Any, **kwargs: Any) -> Any:
        enter(None, args, kwargs)
        output = None
        try:
            output = call(*args, **kwargs)
        finally:
            if point == 0:
                leave(None, None, output)
        return output

    return around
