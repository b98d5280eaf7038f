"""Put a checkpoint into a model and an optimizer: by name, all of it or nothing."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream.errors import CheckpointError
from slipstream.train.checkpoint.model_state import (
    copy_into_model,
    is_extra,
    parameters_by_name,
    state_by_name,
)
from slipstream.train.checkpoint.optimizer_state import (
    first_names,
    set_parameter_state,
    to_device,
)
from slipstream.train.checkpoint.reader import LoadedCheckpoint, SavedGroup

_SHOWN = 5
_WAY_OUT = (
    "build model and optimizer as they were saved; names that one side lacks can be let through by"
    " allow_missing and allow_unknown"
)


def apply(
    loaded: LoadedCheckpoint,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    allow_missing: Sequence[str] = (),
    allow_unknown: Sequence[str] = (),
    way_out: str = _WAY_OUT,
) -> None:
    """Restore `model`, and `optimizer` if given, in place, bit for bit.

    Everything goes by parameter name; the order of declaration does not matter. What the model
    has and the checkpoint lacks is refused unless a pattern of `allow_missing` ("head.*") matches
    its name: it then keeps its value and starts with fresh optimizer state. What the checkpoint
    has and the model lacks is refused unless `allow_unknown` matches. Another shape, dtype or
    kind of optimizer is always refused. way_out: what the reader of the error can do.

    Raises CheckpointError listing the first differences, with nothing changed.
    """
    differences = _model_differences(loaded, model, allow_missing, allow_unknown)
    if differences:
        theirs, ours = loaded.manifest.model.kind, type(model).__qualname__
        what = f"does not fit the model ({theirs} saved, {ours} here)"
        raise _refusal(loaded, what, differences, way_out)
    chosen: list[SavedGroup | None] = []
    if optimizer is not None:
        differences, chosen = _optimizer_differences(
            loaded, model, optimizer, allow_missing, allow_unknown
        )
        if differences:
            raise _refusal(loaded, "does not fit the optimizer", differences, way_out)
    copy_into_model(model, loaded.model)
    if optimizer is not None:
        _restore_optimizer(loaded, model, optimizer, chosen)


def _model_differences(
    loaded: LoadedCheckpoint,
    model: nn.Module,
    allow_missing: Sequence[str],
    allow_unknown: Sequence[str],
) -> list[str]:
    ours = state_by_name(model)
    differences = []
    for name, held in ours.items():
        saved = loaded.model.get(name)
        if is_extra(name) and name in loaded.model:
            continue  # the module itself knows what it can take
        if name not in loaded.model:
            if not _matches(name, allow_missing):
                differences.append(f"{name} is missing in the checkpoint")
        elif isinstance(held, Tensor) != isinstance(saved, Tensor):
            differences.append(f"{name} is a tensor on one side only")
        elif isinstance(held, Tensor) and isinstance(saved, Tensor):
            then, now = _kind(saved), _kind(held)
            if then != now:
                differences.append(f"{name} is {then} in the checkpoint and {now} in the model")
    for name in loaded.model:
        if name not in ours and not _matches(name, allow_unknown):
            differences.append(f"{name} is unknown to the model")
    return differences + _tie_differences(loaded, ours)


def _tie_differences(loaded: LoadedCheckpoint, ours: dict[str, object]) -> list[str]:
    """Names that are one tensor in the model and two in the checkpoint: one value would be lost."""
    first: dict[int, str] = {}
    differences = []
    for name, held in ours.items():
        if isinstance(held, Tensor) and name in loaded.model:
            other = first.setdefault(id(held), name)
            if loaded.model[other] is not loaded.model[name]:
                differences.append(f"{other} and {name} are tied in the model only")
    return differences


def _optimizer_differences(
    loaded: LoadedCheckpoint,
    model: nn.Module,
    optimizer: Optimizer,
    allow_missing: Sequence[str],
    allow_unknown: Sequence[str],
) -> tuple[list[str], list[SavedGroup | None]]:
    """What does not fit, and for each group of `optimizer` the saved one whose options it takes."""
    theirs, ours = loaded.manifest.optimizer.kind, type(optimizer).__qualname__
    if theirs != ours:
        return [f"its state is of {theirs}, the optimizer is {ours}"], []
    named = parameters_by_name(model)
    names = first_names(model)
    saved_group_of: dict[int, SavedGroup] = {}
    differences: list[str] = []
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for saved in loaded.optimizer_groups:
        for name in saved.parameters:
            parameter = named.get(name)
            if parameter is not None and id(parameter) in held:
                saved_group_of[id(parameter)] = saved
            elif not _matches(name, allow_unknown):
                differences.append(f"{name} is unknown to the optimizer")
    chosen: list[SavedGroup | None] = []
    for number, group in enumerate(optimizer.param_groups):
        sources: list[SavedGroup] = []
        for parameter in group["params"]:
            name = names.get(id(parameter), f"a parameter of group {number}")
            if id(parameter) in saved_group_of:
                sources.append(saved_group_of[id(parameter)])
            elif not _matches(name, allow_missing):
                differences.append(f"{name} has no optimizer state in the checkpoint")
        chosen.append(sources[0] if sources else None)
        differences += _option_differences(number, sources)
    return differences, chosen


def _option_differences(number: int, sources: Iterable[SavedGroup]) -> list[str]:
    unique = list({id(source): source for source in sources}.values())
    for other in unique[1:]:
        if repr(other.options) != repr(unique[0].options):
            return [
                f"group {number} joins {unique[0].parameters[0]} and {other.parameters[0]},"
                " which were saved with different options"
            ]
    return []


def _restore_optimizer(
    loaded: LoadedCheckpoint,
    model: nn.Module,
    optimizer: Optimizer,
    chosen: Sequence[SavedGroup | None],
) -> None:
    by_id = {
        id(parameter): loaded.optimizer_state[name]
        for name, parameter in parameters_by_name(model).items()
        if name in loaded.optimizer_state
    }
    for group, saved in zip(optimizer.param_groups, chosen, strict=True):
        if saved is not None:
            # A rate held as a tensor stays where the optimizer has its own, else on the CPU.
            group.update(
                {key: to_device(v, _option_device(group, key)) for key, v in saved.options.items()}
            )
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
            if id(parameter) in by_id:
                set_parameter_state(optimizer, parameter, group, by_id[id(parameter)])


def _option_device(group: Mapping[str, Any], key: str) -> torch.device:
    held = group.get(key)
    return held.device if isinstance(held, Tensor) else torch.device("cpu")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _refusal(
    loaded: LoadedCheckpoint, what: str, differences: Sequence[str], way_out: str
) -> CheckpointError:
    more = len(differences) - _SHOWN
    listed = "; ".join(differences[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
    return CheckpointError(
        f"checkpoint {loaded.path} {what}: {listed}. Nothing was changed; {way_out}."
    )
