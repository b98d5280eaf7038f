"""Which bucket sizes are worth measuring for a model."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slipstream.measure.timing import FLOAT_BYTES

LEAST_BYTES = 4 * 2**10
MOST_BYTES = 256 * 2**20
_RATIO = 3.0


def sizes_to_probe(gradient_bytes: Sequence[int]) -> list[int]:
    """From the smallest bucket worth considering to all gradients in one: increasing, log-spaced.

    gradient_bytes: what each gradient is charged for. What is smaller than 4 KiB costs as much as
    4 KiB. Buckets above 256 MiB lie on the line through the last two sizes, whose memory a probe
    can do without.
    """
    whole = min(MOST_BYTES, max(sum(gradient_bytes), FLOAT_BYTES))
    least = min(whole, max(LEAST_BYTES, min(gradient_bytes, default=FLOAT_BYTES)))
    gaps = math.ceil(math.log(whole / least, _RATIO))
    ratio = (whole / least) ** (1 / gaps) if gaps else 1.0
    sizes = {least * ratio**index for index in range(gaps)} | {float(whole)}
    return sorted({max(1, round(size / FLOAT_BYTES)) * FLOAT_BYTES for size in sizes})
