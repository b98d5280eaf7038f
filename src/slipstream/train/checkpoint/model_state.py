"""A model's parameters and persistent buffers by name, tied tensors once."""

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from slipstream.errors import CheckpointError
from slipstream.train.checkpoint.manifest import ModelRecord
from slipstream.train.checkpoint.tree import add_tensor, encode

_COMPILED = "_orig_mod"


def plain_name(name: str) -> str:
    """`name` without the level that torch.compile inserts, so that both forms share checkpoints."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def is_extra(name: str) -> bool:
    """Whether `name` is what a module's get_extra_state gave."""
    return name.rpartition(".")[2] == "_extra_state"


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every name of every parameter; a tied parameter appears under each of its names."""
    named = model.named_parameters(remove_duplicate=False)
    return {plain_name(name): parameter for name, parameter in named}


def state_by_name(model: nn.Module) -> dict[str, Any]:
    """The model's state_dict with plain names and the live tensors, not copies."""
    return {plain_name(name): value for name, value in model.state_dict(keep_vars=True).items()}


def collect_model(model: nn.Module, tensors: dict[str, Tensor]) -> ModelRecord:
    """Add the model's tensors to `tensors` (live, not copied) and return the rest.

    Raises CheckpointError for extra state that is neither a tensor nor JSON-able.
    """
    tied: dict[str, str] = {}
    extra: dict[str, JsonValue] = {}
    first_name: dict[int, str] = {}
    for name, value in state_by_name(model).items():
        if is_extra(name) or not isinstance(value, Tensor):
            extra[name] = encode(value, name, tensors)
        elif id(value) in first_name:
            tied[name] = first_name[id(value)]
        else:
            first_name[id(value)] = name
            add_tensor(value, name, tensors)
    return ModelRecord(kind=type(model).__qualname__, tied=tied, extra=extra)


def with_tied(tensors: Mapping[str, Tensor], record: ModelRecord) -> dict[str, Tensor]:
    """`tensors` under all names, tied ones included (the same tensor object)."""
    lost = sorted(name for name, kept in record.tied.items() if kept not in tensors)
    if lost:
        raise CheckpointError(
            f"the checkpoint's {lost[0]} shares the tensor of {record.tied[lost[0]]}, which is not"
            " in it: use another checkpoint."
        )
    return {**tensors, **{name: tensors[kept] for name, kept in record.tied.items()}}


def copy_into_model(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Copy `values` into the model in place; parameters, buffers and their layout stay.

    Every name must exist with the same shape and dtype: `differences` has said so before.
    """
    extras: dict[str, Any] = {}
    with torch.no_grad():
        for name, held in state_by_name(model).items():
            if name not in values:
                continue
            if is_extra(name):
                extras[name] = values[name]
            else:
                held.copy_(values[name])
    for module_name, module in model.named_modules():
        key = plain_name(f"{module_name}._extra_state".lstrip("."))
        if key in extras:
            module.set_extra_state(extras[key])
