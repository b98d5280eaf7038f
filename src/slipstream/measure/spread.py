"""The middle of repeated measurements and how far they lie apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The median, and the interquartile range (between order statistics: linear); at least one."""
    low, middle, high = np.percentile(np.array(values, np.float64), [25, 50, 75])
    return float(middle), float(high - low)
