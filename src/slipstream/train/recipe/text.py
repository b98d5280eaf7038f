"""Words around a recipe: nearest right names and values, sentences for errors, TOML out.

Everything here works on the declared fields of a pydantic model whose tables are models, so it
needs no list of settings of its own.
"""

from __future__ import annotations

import json
import math
import tomllib
import typing
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

Model = type[BaseModel]

_TYPE_NAMES: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def fields_of(model: Model) -> dict[str, FieldInfo]:
    """Every field of a recipe by its dotted name (``train.epochs``); tables are not fields."""
    found: dict[str, FieldInfo] = {}
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            inner = info.annotation.model_fields.items()
            found.update({f"{name}.{field}": field_info for field, field_info in inner})
        else:
            found[name] = info
    return found


def field_names(model: Model) -> tuple[str, ...]:
    """Dotted names of all fields, in the order of declaration."""
    return tuple(fields_of(model))


def default_of(model: Model, key: str) -> object:
    """The value of a field that nobody set, or None where it must be set."""
    default = fields_of(model)[key].default
    return None if default is PydanticUndefined else default


def nearest(choices: Model | Iterable[str], word: str) -> str:
    """``"; did you mean X?"`` or, when nothing is near, ``"; there are A, B and C"``, to append.

    For a model the choices are its fields, and a field's name alone finds its table.
    """
    if isinstance(choices, type):
        return _nearest_field(field_names(choices), word)
    names = list(choices)
    close = get_close_matches(word, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; there are {_listed(names)}"


def _nearest_field(keys: tuple[str, ...], word: str) -> str:
    tables = list(dict.fromkeys(key.partition(".")[0] for key in keys if "." in key))
    if word in tables:
        return f"; {word} is a table of {_listed([k for k in keys if k.startswith(f'{word}.')])}"
    close = get_close_matches(word, keys, n=1, cutoff=0.6)
    if not close:
        by_last_part = {key.rpartition(".")[2]: key for key in reversed(keys)}
        last = get_close_matches(word.rpartition(".")[2], list(by_last_part), n=1, cutoff=0.6)
        close = [by_last_part[name] for name in last]
    if close:
        return f"; did you mean {close[0]}?"
    inside = [key for key in keys if key.startswith(f"{word.partition('.')[0]}.")]
    return f"; there are {_listed(inside)}" if inside else f"; the tables are {_listed(tables)}"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + f" and {names[-1]}"


def override_value(model: Model, key: str, text: str) -> object:
    """The value in ``--set key=text``: TOML, or the text itself when it is not TOML.

    A text field takes any bare text: ``model.name=resnet18`` and ``run.folder=7`` need no quotes.
    A list takes its names with commas, too: ``sync.collectives=native,direct``.
    """
    info = fields_of(model)[key]
    value: object = text
    with suppress(tomllib.TOMLDecodeError):
        document = tomllib.loads(f"value = {text}")
        value = document["value"] if len(document) == 1 else text
    if _is_list(info):
        return value if isinstance(value, list) else [part.strip() for part in text.split(",")]
    if info.annotation is str and not isinstance(value, str):
        return text
    return value


def field_at_fault(error: ValidationError) -> str:
    """Dotted name of the field of the first problem; empty where several fields clash."""
    return _field(error.errors(include_url=False)[0]["loc"])


def _field(place: tuple[int | str, ...]) -> str:
    """The dotted name of a field, without the number of an entry of its list."""
    return ".".join(part for part in place if isinstance(part, str))


def explain(model: Model, error: ValidationError) -> str:
    """One sentence for the first problem in a document, and how many more there are."""
    problems = error.errors(include_url=False)
    more = f" ({len(problems) - 1} more to put right)" if len(problems) > 1 else ""
    return _explain_one(model, dict(problems[0])) + more


def _explain_one(model: Model, problem: dict[str, Any]) -> str:
    key = _field(problem["loc"])
    kind = problem["type"]
    if kind == "extra_forbidden":
        return f"there is no field {key}{nearest(model, key)}"
    if kind == "missing":
        return f"{key} is missing: add it"
    if kind == "value_error":
        return str(problem["ctx"]["error"])
    info = fields_of(model).get(key)
    if info is None:
        return f"{key} must be a table, not {problem['input']!r}: write [{key}] and its fields"
    suggestion = _suggest(key, info, problem)
    if isinstance(problem["loc"][-1], int):
        takes = " or ".join(_choices(info))
        return f"{key} holds {shown(problem['input'])} and takes {takes}{suggestion}"
    return f"{key}={shown(problem['input'])} must be {_wanted(info)}{suggestion}"


def shown(value: object) -> str:
    """A value in a sentence, as it would be written in a recipe."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return repr(value)


def _is_list(info: FieldInfo) -> bool:
    return typing.get_origin(info.annotation) is tuple


def _choices(info: FieldInfo) -> tuple[str, ...]:
    """The words that a field takes, or each entry of a list; nothing where it takes others."""
    kind = info.annotation
    if _is_list(info):
        kind = typing.get_args(kind)[0]
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def _limits(info: FieldInfo) -> dict[str, float]:
    """Bounds of a number under ``ge``, ``gt``, ``le``, ``lt``; absent where there is none."""
    found: dict[str, float] = {}
    for item in info.metadata:
        for name in ("ge", "gt", "le", "lt"):
            if hasattr(item, name):
                found[name] = getattr(item, name)
    return found


def _wanted(info: FieldInfo) -> str:
    choices = " or ".join(_choices(info))
    if choices:
        return f"a list of {choices}" if _is_list(info) else choices
    if info.annotation is str:
        return f"text ({info.description})"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    limits = [f"{words[name]} {bound}" for name, bound in _limits(info).items()]
    return ", ".join([_TYPE_NAMES[info.annotation], *limits])


def _suggest(key: str, info: FieldInfo, problem: dict[str, Any]) -> str:
    """``"; the nearest is ..."`` where a nearest right value exists, else the default."""
    value = problem["input"]
    choices = _choices(info)
    if choices:
        close = get_close_matches(str(value), choices, n=1, cutoff=0.5)
        if _is_list(info) and not isinstance(problem["loc"][-1], int):
            return f"; try {key}={shown(close or info.default)}"
        return f"; did you mean {close[0]}?" if close else ""
    near = _nearest_value(info, value)
    if near is None or near == "":
        return ""
    return f"; try {key}={shown(near)}"


def _nearest_value(info: FieldInfo, value: object) -> object:
    default = None if info.default is PydanticUndefined else info.default
    if info.annotation is bool:
        return _nearest_bool(value, default)
    if info.annotation not in (int, float):
        return default
    try:
        number = float(value)  # type: ignore[arg-type]  # whatever was written; the except judges
        near: float = round(number) if info.annotation is int else number
    except (TypeError, ValueError, OverflowError):
        return default
    limits = _limits(info)
    near = min(max(near, limits.get("ge", near)), limits.get("le", math.inf))
    if near <= limits.get("gt", -math.inf) or near >= limits.get("lt", math.inf):
        return default
    return near if math.isfinite(near) else default


def _nearest_bool(value: object, default: object) -> object:
    word = str(value).lower()
    if word in ("1", "yes", "on", "y", "true", "1.0"):
        return True
    if word in ("0", "no", "off", "n", "false", "0.0"):
        return False
    return default


def write_toml(recipe: BaseModel) -> str:
    """A recipe as TOML, each setting under its description as a comment."""
    top: list[str] = []
    tables: list[str] = []
    for name, info in type(recipe).model_fields.items():
        value = getattr(recipe, name)
        if isinstance(value, BaseModel):
            tables += ["", f"[{name}]"]
            for field, field_info in type(value).model_fields.items():
                tables.append(_toml_line(field, getattr(value, field), field_info))
        else:
            top.append(_toml_line(name, value, info))
    return "\n".join([*top, *tables]) + "\n"


def _toml_line(name: str, value: object, info: FieldInfo) -> str:
    line = f"{name} = {_toml_value(value)}"
    return f"{line}  # {info.description}" if info.description else line


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON and TOML agree on quoted text but for the delete character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    raise TypeError(f"a recipe has no values of type {type(value).__name__}")
