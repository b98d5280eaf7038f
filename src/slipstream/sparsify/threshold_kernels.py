"""CPU kernels of the selectors that guess a threshold; compiled when this module is imported.

values, bits: [n], the same memory as float32 and int32. Thresholds are the bits of a magnitude
(see `kernels`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slipstream.sparsify.compiled import compiled
from slipstream.sparsify.kernels import BLOCK, MAGNITUDE, Floats, Ints
from slipstream.sparsify.selection import Selection

STRETCH = 2**16
"""Elements that are counted in 32 bits, which is faster than in 64."""


@compiled("Tuple((float64, int64))(float32[::1], int32[::1])", reassociate=True)
def total_and_most(values: Floats, bits: Ints) -> Any:
    """The sum of the magnitudes, formed in float64, and the bits of the largest."""
    total, most = 0.0, np.int32(0)
    for i in range(len(values)):
        total += abs(np.float64(values[i]))
        most = max(most, np.int32(bits[i] & MAGNITUDE))
    return total, most


@compiled("UniTuple(int64, 2)(int32[::1], int32)")
def num_reaching(bits: Ints, size: int) -> Any:
    """How many elements have at least this magnitude, and the largest magnitude of all."""
    n, reaching, most = len(bits), 0, np.int32(0)
    for start in range(0, n, STRETCH):
        stretch, here = bits[start : min(start + STRETCH, n)], np.int32(0)
        for i in range(len(stretch)):
            found = np.int32(stretch[i] & MAGNITUDE)
            here = np.int32(here + (found >= size))
            most = max(most, found)
        reaching += int(here)
    return reaching, most


_PICK = "int64(float32[::1], int32[::1], int32, int64, int32, int64, int32[::1], float32[::1])"


@compiled(_PICK)
def pick(
    values: Floats,
    bits: Ints,
    sure: int,
    num_sure: int,
    least: int,
    start: int,
    indices: Ints,
    picked: Floats,
) -> Any:
    """Writes len(indices) elements: all that reach `sure`, and a run of those that reach `least`.

    num_sure: how many reach `sure`; start: how many of the others are left out first. Indices
    ascend. There must be enough of them. Returns how many were written.
    """
    n, stop = len(bits), start + len(indices) - num_sure
    seen, count = 0, 0
    for begin in range(0, n, BLOCK):
        block, most = bits[begin : min(begin + BLOCK, n)], np.int32(0)
        for j in range(len(block)):
            most = max(most, np.int32(block[j] & MAGNITUDE))
        if most < least:
            continue
        for j in range(len(block)):
            size = np.int32(block[j] & MAGNITUDE)
            if size < least:
                continue
            if size < sure:
                seen += 1
                if not start < seen <= stop:
                    continue
            indices[count] = begin + j
            picked[count] = values[begin + j]
            count += 1
    return count


def selected(
    values: Floats, bits: Ints, k: int, *, sure: int, num_sure: int, least: int, start: int
) -> Selection:
    """k elements as `pick` takes them."""
    indices, picked = np.empty(k, np.int32), np.empty(k, np.float32)
    pick(values, bits, sure, num_sure, least, start, indices, picked)
    return Selection(torch.from_numpy(indices), torch.from_numpy(picked))
