"""Any torch optimizer's state by parameter name, so that declaration order does not matter.

torch's own `state_dict` numbers parameters; after a change of order the momenta of two parameters
are silently swapped. It also casts state to the parameter's dtype when it loads, which loses the
32-bit masters of 16-bit weights. Here names are the keys and dtypes stay as saved.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream.errors import CheckpointError
from slipstream.train.checkpoint.manifest import GroupRecord, OptimizerRecord
from slipstream.train.checkpoint.model_state import parameters_by_name
from slipstream.train.checkpoint.tree import encode

# Of a parameter group: which parameters it has. Everything else are options.
_MEMBERS = ("params", "param_names")


def collect_optimizer(
    model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor]
) -> OptimizerRecord:
    """Add the optimizer's tensors to `tensors` (live, not copied) and return the rest.

    Raises CheckpointError for a parameter that the model does not name and for state or options
    that are neither tensors nor JSON-able.
    """
    names = first_names(model)
    state: dict[str, dict[str, Any]] = {}
    groups: list[GroupRecord] = []
    for number, group in enumerate(optimizer.param_groups):
        members = [_name_of(parameter, names, number) for parameter in group["params"]]
        options = {
            key: encode(value, f"group:{number}/{key}", tensors)
            for key, value in group.items()
            if key not in _MEMBERS
        }
        groups.append(GroupRecord(parameters=tuple(members), options=options))
        for name, parameter in zip(members, group["params"], strict=True):
            # `in` first: reading a missing key of this defaultdict would create it.
            if parameter in optimizer.state:
                state[name] = {
                    _text_key(key, name): encode(value, f"{name}/{key}", tensors)
                    for key, value in optimizer.state[parameter].items()
                }
    dim_orders = {name: order for name, t in tensors.items() if (order := _dim_order(t))}
    return OptimizerRecord(
        kind=type(optimizer).__qualname__,
        state=state,
        groups=tuple(groups),
        dim_orders=dim_orders,
    )


def first_names(model: nn.Module) -> dict[int, str]:
    """id of a parameter -> the first of its names."""
    names: dict[int, str] = {}
    for name, parameter in parameters_by_name(model).items():
        names.setdefault(id(parameter), name)
    return names


def restore_layout(tensors: Mapping[str, Tensor], record: OptimizerRecord) -> dict[str, Tensor]:
    """`tensors` with the order of dimensions in memory that they had when they were saved.

    The values do not depend on it, but which of a kernel's loops handles an element does, and so
    the last bit of the next step may.
    """
    restored = dict(tensors)
    for name, order in record.dim_orders.items():
        tensor = restored.get(name)
        if tensor is None or sorted(order) != list(range(tensor.dim())):
            raise CheckpointError(
                f"the checkpoint's layout of {name} is damaged: use another checkpoint."
            )
        inverse = sorted(range(len(order)), key=order.__getitem__)
        restored[name] = tensor.permute(*order).contiguous().permute(*inverse)
    return restored


def set_parameter_state(
    optimizer: Optimizer, parameter: nn.Parameter, group: Mapping[str, Any], state: dict[str, Any]
) -> None:
    """Replace the state of `parameter` by copies of `state` on the right device."""
    optimizer.state[parameter] = {
        key: to_device(value, _device_for(key, value, parameter, group))
        for key, value in state.items()
    }


def to_device(value: Any, device: torch.device) -> Any:
    """A deep copy of `value` with every tensor in it on `device`, dtype and layout kept."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {key: to_device(v, device) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_device(v, device) for v in value)
    return value


def _device_for(
    key: str, value: object, parameter: nn.Parameter, group: Mapping[str, Any]
) -> torch.device:
    # torch's own rule: the step counter stays on the CPU unless the kernel reads it on the device.
    if key == "step" and isinstance(value, Tensor):
        on_device = group.get("capturable") or group.get("fused")
        return parameter.device if on_device else torch.device("cpu")
    return parameter.device


def _name_of(parameter: nn.Parameter, names: Mapping[int, str], group: int) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise CheckpointError(
            f"parameter group {group} of the optimizer holds a parameter of shape"
            f" {tuple(parameter.shape)} that the model does not name: save the module that owns it"
            " as part of the model."
        )
    return name


def _text_key(key: object, name: str) -> str:
    if not isinstance(key, str):
        raise CheckpointError(
            f"the optimizer's state of {name} has the key {key!r}: only text can be saved."
        )
    return key


def _dim_order(tensor: Tensor) -> tuple[int, ...]:
    """The order of dimensions in memory, outermost first; empty for a contiguous tensor."""
    return () if tensor.is_contiguous() else tuple(tensor.dim_order())
