"""From values to places on a drawing: scales and their round ticks."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Maps `low`..`high` (low < high; both > 0 when logarithmic) onto `begin`..`end` in pixels."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """The place of `value`, kept within the drawing."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.begin + (self.end - self.begin) * (value - low) / (high - low)

    def ticks(self, wanted: int = 5) -> list[float]:
        """Round values within the scale, about `wanted` of them."""
        return (
            _log_ticks(self.low, self.high) if self.is_log else ticks(self.low, self.high, wanted)
        )


def fit(
    values: list[float],
    begin: float,
    end: float,
    *,
    low: float | None = None,
    may_be_log: bool = False,
) -> Scale:
    """A scale that holds all `values`; `low` fixes the lower end.

    With `may_be_log`, values that are all positive and span two decades or more get a logarithmic
    one. Without values it is 0..1.
    """
    if not values:
        return Scale(0.0, 1.0, begin, end)
    least, most = min(values), max(values)
    if may_be_log and least > 0 and most / least >= 100:
        return Scale(least * 0.9, most * 1.1, begin, end, is_log=True)
    bottom = least if low is None else min(low, least)
    pad = 0.05 * (most - bottom) or abs(most) * 0.1 or 1.0
    return Scale(bottom - pad if low is None else bottom, most + pad, begin, end)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten in `low`..`high`."""
    raw = (high - low) / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, (last - first) // 5)
    powers = [10.0**exponent for exponent in range(first, last + 1, every)]
    return [value for value in powers if low <= value <= high]
