"""Numbers in words for people: counts, shares, times, sizes, rates. None becomes "-"."""

from __future__ import annotations

import math
import re


def count(value: float | None) -> str:
    """A number without a fraction, thousands separated: 1,034."""
    known = _finite(value)
    return "-" if known is None else f"{known:,.0f}"


def counted(number: int, noun: str) -> str:
    """So many of a thing: 1 epoch, 44,000 steps."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percent(fraction: float | None, digits: int = 1) -> str:
    """A fraction of 1 as percent: 92.4 %."""
    known = _finite(fraction)
    return "-" if known is None else f"{100 * known:.{digits}f} %"


def duration(seconds: float | None) -> str:
    """A time in the unit that suits it: 850 µs, 12.3 ms, 4.20 s, 3 min 5 s, 2 h 3 min 5 s."""
    seconds = _finite(seconds)
    if seconds is None:
        return "-"
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 59.95:
        return f"{_three_digits(seconds)} s"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min {rest} s"


def size(num_bytes: float | None) -> str:
    """A number of bytes in binary units: 512 B, 4.00 KiB, 25.0 MiB."""
    value = _finite(num_bytes)
    if value is None:
        return "-"
    if abs(value) < 1024:
        return f"{value:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if abs(value) < 999.5 or unit == "TiB":
            break
    return f"{_three_digits(value)} {unit}"


def plain(value: float) -> str:
    """A number with up to four significant digits and no needless zeros, for axes and readouts."""
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.3g}"
    text = f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return text


def _finite(value: float | None) -> float | None:
    """`value` as a float; None where it is none, not finite, or an integer beyond all floats."""
    try:
        known = math.nan if value is None else float(value)
    except OverflowError:
        return None
    return known if math.isfinite(known) else None


def tidy(text: str) -> str:
    """`text` without a fraction that is all zeros: "50.0 ms" becomes "50 ms"."""
    return re.sub(r"\.0+(?![0-9])", "", text)


def _three_digits(value: float) -> str:
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}"
