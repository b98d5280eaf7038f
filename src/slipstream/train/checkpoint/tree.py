"""Nested Python values as JSON plus named tensors, and back, bit for bit.

JSON keeps None, bool, int, str, list, dict with string keys and every finite float (Python writes
the shortest text that reads back to the same 64 bits). What it lacks travels as an object with one
reserved key:

    {"$tensor": name}          a tensor, stored beside the JSON under that name
    {"$tuple": [...]}          a tuple (torch's `betas`)
    {"$items": [[k, v], ...]}  a dict with other keys than strings (a scheduler's milestones)
    {"$float": "nan"}          nan, inf or -inf
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor

from slipstream.errors import CheckpointError

COUNTERS = "counters/"
"""Where the names of tensors inside TrainState.counters start."""
_MARKS = ("$tensor", "$tuple", "$items", "$float")


def encode(value: object, where: str, tensors: dict[str, Tensor]) -> JsonValue:
    """The JSON of `value`; its tensors are added to `tensors`, named from `where` on.

    Tensors are not copied. Raises CheckpointError, naming the place, for anything but the kinds
    above: arbitrary objects would need pickle, which runs code of whoever wrote the file.
    """
    if value is None or isinstance(value, bool | int | str):
        # A subclass (numpy's float, an IntEnum) is stored as the plain value that it is.
        return value if type(value) in (bool, type(None)) else _plain(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, Tensor):
        return {"$tensor": add_tensor(value, where, tensors)}
    if isinstance(value, tuple):
        return {"$tuple": [encode(v, f"{where}/{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [encode(v, f"{where}/{i}", tensors) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, tensors)
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint"
        " cannot hold: keep numbers, text, lists, dicts and tensors there."
    )


def add_tensor(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    """Put `tensor` (strided, with memory) into `tensors` under `name`; returns `name`."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = "meta" if tensor.is_meta else str(tensor.layout)
        raise CheckpointError(
            f"{name} is a {kind} tensor, which a checkpoint cannot hold: only dense ones."
        )
    if name in tensors:
        raise CheckpointError(f"two values of the state have the name {name!r}: rename one.")
    tensors[name] = tensor.detach()
    return name


def decode(value: JsonValue, tensors: Mapping[str, Tensor], where: str) -> Any:
    """What `encode` was given; tensors are those of `tensors`, not copies.

    Raises CheckpointError, naming `where`, for a mark that `encode` never writes.
    """
    if isinstance(value, list):
        return [decode(v, tensors, where) for v in value]
    if not isinstance(value, dict):
        return value
    mark = next((key for key in value if key in _MARKS), None)
    if mark is None:
        return {key: decode(v, tensors, where) for key, v in value.items()}
    content = value[mark]
    if len(value) == 1:
        if mark == "$tensor" and isinstance(content, str) and content in tensors:
            return tensors[content]
        if mark == "$float" and content in ("nan", "inf", "-inf"):
            return float(content)
        if mark == "$tuple" and isinstance(content, list):
            return tuple(decode(v, tensors, where) for v in content)
        if mark == "$items" and isinstance(content, list) and all(map(_is_pair, content)):
            return _decode_items(content, tensors, where)
    raise CheckpointError(f"{where} holds a damaged value marked {mark!r}: use another checkpoint.")


def _plain(value: object) -> JsonValue:
    return int(value) if isinstance(value, int) else str(value)


def _encode_mapping(
    value: Mapping[Any, object], where: str, tensors: dict[str, Tensor]
) -> JsonValue:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {str(k): encode(v, f"{where}/{k}", tensors) for k, v in value.items()}
    return {
        "$items": [
            [encode(k, f"{where}/key", tensors), encode(v, f"{where}/{k}", tensors)]
            for k, v in value.items()
        ]
    }


def _is_pair(item: JsonValue) -> bool:
    return isinstance(item, list) and len(item) == 2


def _decode_items(
    items: list[JsonValue], tensors: Mapping[str, Tensor], where: str
) -> dict[Any, object]:
    result: dict[Any, object] = {}
    for item in items:
        assert isinstance(item, list)
        key = decode(item[0], tensors, where)
        if not isinstance(key, bool | int | float | str | tuple | None):
            raise CheckpointError(f"{where} holds a damaged key: use another checkpoint.")
        result[key] = decode(item[1], tensors, where)
    return result
