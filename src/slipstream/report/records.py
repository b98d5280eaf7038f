"""Reading `metrics.jsonl`: one JSON object a line, each with a `kind` and a `step`.

A run may be killed in the middle of a line, so the last line may be torn: it is left out. Numbers
that JSON cannot hold travel as the strings "NaN", "Infinity" and "-Infinity" and come back as
floats here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from slipstream.errors import RunFolderError

Record = dict[str, Any]

KINDS: Final = ("step", "evaluation", "epoch", "skip", "resume", "timeline", "sparse")

_MAX_STEP: Final = 2**53
_NON_FINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_TEXT_FIELDS: Final = frozenset({"kind", "parameter", "name", "row"})


def read_metrics(path: Path) -> list[Record]:
    """All records of `path` in file order; a torn last line is ignored.

    Raises RunFolderError when the file cannot be read or a line before the last is damaged.
    """
    records, damaged = scan_metrics(path)
    if damaged:
        raise RunFolderError(
            f"{path}: line {damaged[0]} is not a metrics record; "
            "remove that line, or the file if the numbers are not needed."
        )
    return records


def scan_metrics(path: Path) -> tuple[list[Record], list[int]]:
    """The readable records of `path`, and the numbers (from 1) of damaged lines before the last.

    Raises RunFolderError when the file cannot be read.
    """
    records: list[Record] = []
    damaged: list[int] = []
    last = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                last = number
                record = parse_line(line)
                if record is not None:
                    records.append(record)
                elif line.strip():
                    damaged.append(number)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror or error}.") from error
    if damaged and damaged[-1] == last:
        damaged.pop()
    return records, damaged


def parse_line(line: bytes) -> Record | None:
    """The record on `line`, or None when the line is torn or no metrics record."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    if not _is_step(record.get("step")):
        return None
    return {key: _decode(key, value) for key, value in record.items()}


def format_line(record: Mapping[str, Any]) -> str:
    """`record` as one line of strict JSON, newline included.

    Raises ValueError for an unknown kind or a step that is not a natural number.
    """
    kind, step = record.get("kind"), record.get("step")
    if kind not in KINDS:
        raise ValueError(f"A metrics record has kind {kind!r}; known are {', '.join(KINDS)}.")
    if not _is_step(step):
        raise ValueError(f"A metrics record of kind {kind!r} has step {step!r}, not a number >= 0.")
    encoded = {key: _encode(value) for key, value in record.items()}
    return json.dumps(encoded, allow_nan=False, separators=(",", ":")) + "\n"


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    """The records of one kind, in order."""
    return [record for record in records if record["kind"] == kind]


def number(record: Mapping[str, Any], field: str) -> float | None:
    """`record[field]` as a float; None when it is absent or no number. May be non-finite."""
    value = record.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def finite(record: Mapping[str, Any], field: str) -> float | None:
    """`record[field]` as a finite float, else None."""
    value = number(record, field)
    return value if value is not None and math.isfinite(value) else None


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_STEP


def _encode(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _decode(key: str, value: Any) -> Any:
    if key in _TEXT_FIELDS or not isinstance(value, str):
        return value
    return _NON_FINITE.get(value, value)
