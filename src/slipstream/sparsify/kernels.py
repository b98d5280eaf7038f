"""CPU kernels of exact selection and of the residual; compiled when this module is imported.

Magnitudes are compared as integers: the bits of |x| of a float32 are ordered as |x| is, infinity
above all numbers and NaN above infinity, denormals like the rest. All NaN count as one magnitude.

Selection reads the data once. A sample gives a floor that a little more than k elements reach; they
are collected in index order, by blocks, most of which hold none and are left after one comparison.
The best k of the collected are then found by histograms. If the room for them fills, the best k are
kept and the floor rises above the least of these, as whoever comes later loses a tie. So there is
no data for which this goes wrong: where fewer than k reach the floor, as a sample can mislead, a
histogram of all elements gives a floor that k reach, and they are collected anew.

Shapes: bits, gradient, old, new: [n]; places (indices), sizes (magnitudes): room for what is
collected, at least `room_for(n, k)`; sample: [num_samples(n)]; sums: [CHUNK] scratch, and sum_bits
the same memory as int32. No kernel looks whether they are.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.sparsify.compiled import compiled

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITE = np.int32(0x7F800000)
NAN = np.int32(0x7F800001)
BLOCK = 64
PART = 8
"""Elements that are looked at together: in a block, and in each part of one that holds some."""
CHUNK = 2048
"""Elements that are added at a time: they stay in the processor's nearest cache."""
BINS = 2048
MOST_SAMPLES = 2**17
_LEAST_SAMPLED = 2**14


def num_samples(n: int) -> int:
    """How many elements are looked at to guess the floor; none where all may be collected."""
    return 0 if n < _LEAST_SAMPLED else min(16 * isqrt(n), MOST_SAMPLES)


def room_for(n: int, k: int) -> int:
    """How many elements may be collected before the best k are kept."""
    return min(n, 3 * k + 4096) + BLOCK


@compiled("int64(int32[::1], int64, int64)")
def kth_largest(sizes: Ints, count: int, k: int) -> Any:
    """The k-th largest of sizes[:count], by histograms of ever narrower ranges; 1 <= k <= count."""
    least, most = sizes[0], sizes[0]
    for i in range(count):
        least = min(least, sizes[i])
        most = max(most, sizes[i])
    low, high = np.int64(least), np.int64(most)
    bins = np.empty(BINS, np.int64)
    wanted = k
    while True:
        shift = 0
        while (high - low) >> shift >= BINS:
            shift += 1
        bins[:] = 0
        for i in range(count):
            if low <= sizes[i] <= high:
                bins[(sizes[i] - low) >> shift] += 1
        place = (high - low) >> shift
        while bins[place] < wanted:
            wanted -= bins[place]
            place -= 1
        low += place << shift
        if shift == 0:
            return low
        high = min(high, low + (1 << shift) - 1)


@compiled("int64(int32[::1], int32[::1], int64, int64)")
def keep_largest(places: Ints, sizes: Ints, count: int, k: int) -> Any:
    """Moves the k largest of the first `count` to the front (mutated) and returns the least size.

    They stay in order; of equal ones those that come first are kept. 1 <= k <= count.
    """
    least = kth_largest(sizes, count, k)
    ties = k
    for i in range(count):
        ties -= sizes[i] > least
    kept = 0
    for i in range(count):
        size = sizes[i]
        tied = (size == least) & (ties > 0)
        ties -= tied
        places[kept] = places[i]
        sizes[kept] = size
        kept += (size > least) | tied
    return least


_COLLECT = (
    "UniTuple(int64, 2)(int32[::1], int64, int64, int64, int64, int64, int32[::1], int32[::1])"
)


@compiled(_COLLECT)
def collect(
    bits: Ints, length: int, offset: int, floor: int, count: int, k: int, places: Ints, sizes: Ints
) -> Any:
    """Adds those of bits[:length] that reach `floor` to the `count` collected, in index order.

    offset: the index of bits[0]. Returns how many are collected now, and the floor from now on.
    """
    room = len(places) - BLOCK
    whole = length // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        most = np.int32(0)
        for j in range(BLOCK):
            most = max(most, np.int32(bits[start + j] & MAGNITUDE))
        if most >= floor:
            if count > room:
                floor = keep_largest(places, sizes, count, k) + 1
                count = k
            for part in range(start, start + BLOCK, PART):
                here = np.int32(0)
                for j in range(PART):
                    here = max(here, np.int32(bits[part + j] & MAGNITUDE))
                if here >= floor:
                    for j in range(part, part + PART):
                        size = min(np.int32(bits[j] & MAGNITUDE), NAN)
                        places[count] = offset + j
                        sizes[count] = size
                        count += int(size >= floor)
    if count > room:
        floor = keep_largest(places, sizes, count, k) + 1
        count = k
    for j in range(whole, length):
        size = min(np.int32(bits[j] & MAGNITUDE), NAN)
        places[count] = offset + j
        sizes[count] = size
        count += int(size >= floor)
    return count, floor


@compiled("int64(int64, int64, int64)")
def sampled_at(i: int, n: int, num: int) -> Any:
    """The place of sample i of `num`: one in each stretch of n / num elements, not evenly spaced.

    Even spacing would see one column of a matrix only. Multiples of the golden ratio spread best.
    """
    step = (n << 16) // num
    return (i * step >> 16) + (((i * 2654435769) & 0xFFFFFFFF) * (step >> 16) >> 32)


@compiled("int64(int32[::1], int64, int64)")
def floor_of(sample: Ints, n: int, k: int) -> Any:
    """The magnitude that a little more than k of n elements should reach, going by a sample.

    Of the k largest about k * s / n are in the sample: four standard deviations more, and a few for
    small numbers, are reckoned with. 0 where the sample is too small to tell.
    """
    num = len(sample)
    expected = num * k / n
    rank = int(expected + 4.0 * np.sqrt(expected) + 8.0)
    return kth_largest(sample, num, rank) if rank < num else 0


@compiled("int64(int32[::1], int64)")
def floor_by_histogram(bits: Ints, k: int) -> Any:
    """The largest floor on the bounds of 2048 bins that k elements reach; k <= n."""
    bins = np.zeros((4, 2048), np.int64)
    whole = len(bits) // 4 * 4
    for start in range(0, whole, 4):  # four histograms: equal neighbours do not wait for each other
        for j in range(4):
            bins[j, (bits[start + j] & MAGNITUDE) >> 20] += 1
    for i in range(whole, len(bits)):
        bins[0, (bits[i] & MAGNITUDE) >> 20] += 1
    place = 2047
    reached = bins[:, place].sum()
    while reached < k:
        place -= 1
        reached += bins[:, place].sum()
    return min(place << 20, np.int64(NAN))


_SELECT = (
    "int64(float32[::1], int32[::1], int64, int32[::1], int32[::1], int32[::1], "
    "int32[::1], float32[::1])"
)


@compiled(_SELECT)
def select_largest(
    values: Floats,
    bits: Ints,
    k: int,
    places: Ints,
    sizes: Ints,
    sample: Ints,
    indices: Ints,
    picked: Floats,
) -> Any:
    """Writes the indices and values of the k largest magnitudes, in index order; 1 <= k <= n.

    values, bits: the same memory; indices, picked: [k], mutated. Returns how often all the data was
    read: once, or three times where the sample misled.
    """
    n, num = len(bits), len(sample)
    for i in range(num):
        sample[i] = min(np.int32(bits[sampled_at(i, n, num)] & MAGNITUDE), NAN)
    floor = floor_of(sample, n, k) if num else 0
    count, floor = collect(bits, n, 0, floor, 0, k, places, sizes)
    reads = 1
    if count < k:
        count, floor = collect(bits, n, 0, floor_by_histogram(bits, k), 0, k, places, sizes)
        reads = 3
    if count > k:
        keep_largest(places, sizes, count, k)
    for i in range(k):
        indices[i] = places[i]
        picked[i] = values[places[i]]
    return reads


@compiled("int64(float32[::1], float32[::1], float32[::1], float32[::1], int32[::1])")
def add_chunk(gradient: Floats, old: Floats, new: Floats, sums: Floats, sum_bits: Ints) -> Any:
    """Adds one chunk, and writes the sums to `new` (may be `old`) if all of them are finite.

    All have one length. Returns whether they are finite; `sums` has them in any case.
    """
    most = np.int32(0)
    for j in range(len(sums)):
        sums[j] = gradient[j] + old[j]
    for j in range(len(sums)):
        most = max(most, np.int32(sum_bits[j] & MAGNITUDE))
    if most >= INFINITE:
        return 0
    for j in range(len(sums)):
        new[j] = sums[j]
    return 1


@compiled("int64(float32[::1], float32[::1], float32[::1], float32[::1], int32[::1])")
def add_residual(gradient: Floats, old: Floats, new: Floats, sums: Floats, sum_bits: Ints) -> Any:
    """Writes gradient + old to `new` (may be `old`), up to the first sum that is not finite.

    Returns how many elements were written: up to the chunk with that sum, which is left alone.
    """
    n = len(gradient)
    for start in range(0, n, CHUNK):
        stop = min(start + CHUNK, n)
        chunk = sums[: stop - start], sum_bits[: stop - start]
        if not add_chunk(gradient[start:stop], old[start:stop], new[start:stop], *chunk):
            return start
    return n


_ACCUMULATE = (
    "UniTuple(int64, 2)(float32[::1], float32[::1], float32[::1], int32[::1], int64, "
    "int32[::1], int32[::1], int32[::1], float32[::1], int32[::1])"
)


@compiled(_ACCUMULATE)
def add_and_collect(
    gradient: Floats,
    old: Floats,
    new: Floats,
    new_bits: Ints,
    k: int,
    places: Ints,
    sizes: Ints,
    sample: Ints,
    sums: Floats,
    sum_bits: Ints,
) -> Any:
    """`add_residual` that finds the k largest sums on the way: places[:k], in index order.

    new_bits: the memory of `new`. Returns how many elements were written, and how often all were
    read; if a sum was not finite nothing has been selected.
    """
    n, num = len(gradient), len(sample)
    for i in range(num):
        at = sampled_at(i, n, num)
        sums[0] = gradient[at] + old[at]
        sample[i] = min(np.int32(sum_bits[0] & MAGNITUDE), NAN)
    floor = floor_of(sample, n, k) if num else 0
    count, reads = 0, 1
    for start in range(0, n, CHUNK):
        stop = min(start + CHUNK, n)
        chunk = sums[: stop - start], sum_bits[: stop - start]
        if not add_chunk(gradient[start:stop], old[start:stop], new[start:stop], *chunk):
            return start, reads
        count, floor = collect(sum_bits, stop - start, start, floor, count, k, places, sizes)
    if count < k:
        floor = floor_by_histogram(new_bits, k)
        count, floor = collect(new_bits, n, 0, floor, 0, k, places, sizes)
        reads = 3
    if count > k:
        keep_largest(places, sizes, count, k)
    return n, reads


@compiled("void(float32[::1], int32[::1], float32[::1])")
def take_out(residual: Floats, indices: Ints, taken: Floats) -> None:
    """Writes what stands at the indices to `taken`, and leaves zero in its place (both mutated).

    A negative zero stays, so that what is sent and what stays still add up to it.
    """
    for i in range(len(indices)):
        value = residual[indices[i]]
        taken[i] = value
        if value != 0:
            residual[indices[i]] = 0
