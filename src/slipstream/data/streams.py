"""Random streams without state: every draw is a pure function of where it is used.

A draw is named by its coordinates (seed, purpose, epoch, sample index), so it does not depend on
the rank, the number of ranks, the thread, or how often a job was interrupted. Two draws whose
coordinates differ are unrelated; the same coordinates always give the same draw. The function is
written out here (the finaliser of SplitMix64, applied once per coordinate), so that no release of
NumPy or torch can change the order of somebody's run.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_MASK = 2**64 - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Purpose(IntEnum):
    """What a stream is for; each purpose draws from a stream of its own."""

    SHUFFLE = 1
    CROP_ROW = 2
    CROP_COLUMN = 3
    FLIP = 4
    SPLIT = 5


def random_bits(
    seed: int, purpose: Purpose, epoch: int, samples: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """64 random bits for each sample index in `samples` (int64, any shape).

    For one (seed, purpose, epoch) the map from sample index to bits is one-to-one: two samples
    never draw the same 64 bits.
    """
    # An array of one element instead of a scalar: array arithmetic wraps modulo 2^64 silently.
    # The seed is mixed before anything joins it: small seeds and purposes would cancel in an XOR.
    state = _mix(np.array([seed & _MASK], dtype=np.uint64))
    for coordinate in (int(purpose), epoch):
        state = _mix(state ^ np.uint64(coordinate & _MASK))
    return _mix(_mix(state ^ samples.astype(np.uint64)))


def random_integers(
    high: int, *, seed: int, purpose: Purpose, epoch: int, samples: NDArray[np.int64]
) -> NDArray[np.int64]:
    """One integer in [0, high) for each sample index, int64; uniform to within high / 2^32."""
    upper_half = random_bits(seed, purpose, epoch, samples) >> np.uint64(32)
    return ((upper_half * np.uint64(high)) >> np.uint64(32)).astype(np.int64)


def permutation(num_samples: int, *, seed: int, purpose: Purpose, epoch: int) -> NDArray[np.int64]:
    """A random order of range(num_samples), int64: samples sorted by their random bits."""
    bits = random_bits(seed, purpose, epoch, np.arange(num_samples, dtype=np.int64))
    # The bits are distinct, so every sorting algorithm gives this one order.
    return np.argsort(bits).astype(np.int64, copy=False)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
