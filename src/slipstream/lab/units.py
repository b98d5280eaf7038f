"""Rates and durations as people write them: ``1gbit``, ``500ms``."""

from __future__ import annotations

import re
import reprlib

from slipstream.errors import LabError

_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
LONGEST_SECONDS = 30 * 86400.0
"""No time that the lab waits for is longer: 30 days."""

_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def parse_rate(text: str) -> float:
    """Bits a second of ``"1gbit"``, ``"2.5gbit"``, ``"100mbit"``, ``"500kbit/s"``.

    Raises LabError for anything else: bytes and bare numbers would be mistaken too easily.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(kbit|mbit|gbit)(?:/s|ps)?", text.strip().lower())
    if match is None:
        raise LabError(f"rate {text!r} cannot be read: write it as 1gbit, 2.5gbit or 100mbit")
    return float(match[1]) * _BITS[match[2]]


def parse_seconds(text: str) -> float:
    """Seconds of ``"5s"``, ``"500ms"``, ``"2min"``, ``"1h"`` or ``"5"``.

    Raises LabError for anything else, and for more than 30 days.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|min|h)?", text.strip().lower())
    if match is None:
        raise LabError(f"time {text!r} cannot be read: write it as 5s, 500ms or 2min")
    seconds = float(match[1]) * _SECONDS[match[2] or "s"]
    if seconds > LONGEST_SECONDS:
        raise LabError(f"time {reprlib.repr(text)} is too long: the lab waits 30 days at most")
    return seconds


def format_rate(bits_per_second: float) -> str:
    """``"1 Gbit/s"``, ``"95.7 Mbit/s"``: three digits."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits_per_second >= size:
            return f"{bits_per_second / size:.3g} {unit}"
    return f"{bits_per_second / 1e3:.3g} kbit/s"
