"""GPU kernels, in Triton, of exact selection and of the residual; `exact_gpu` launches them.

Magnitudes are compared as integers, as on the CPU (`kernels`): the bits of |x| of a float32 are
ordered as |x| is, infinity above all numbers and NaN above infinity. All NaN count as one.

The k-th largest magnitude is found by its digits, the highest first: 11, 10 and 10 bits. Every
program counts the digits of its own stretch of the data and keeps its counts, so that later on it
knows from them where its part of the output begins; nobody counts twice, and nothing is atomic.

    count_first       reads all data, counts the first digit     add the residual in the same pass
    sum_counts, choose_digit, tally                              the digit of the k-th largest
    collect_candidates   reads all data, keeps what reaches that digit, in index order
    count_next, sum_counts, choose_digit    twice, of the candidates: the k-th largest itself
    tally, collect_selected    the k selected, of the candidates; what is sent leaves the residual
    restore           only where a sum was not finite: the old residual comes back

So all data is read twice. Where there are more candidates than `room`, as many tie in their first
eleven bits, the data itself takes the candidates' place: then it is read four times. Which of both
is decided on the GPU; the launches are the same, and the host never waits.

Radix selection is that of Alabi et al., "Fast k-selection algorithms for graphics processing
units" (2012), and AIR top-k (Zhang et al., 2023), from which the side buffer for candidates comes.
The order of the output and the counts kept by program are ours.

Shapes: data, old, new: [n]; counts: int32 [programs, bins]; totals: int32 [bins]; above, larger,
equal, odd: int32 [programs]; state: int32 [4], see the places below; candidates, places (their bits
and indices): int32 [room]; indices, values: [k]. `TILE` elements are looked at together. No kernel
looks whether they are. Sizes are constants of the compiled code where the name is in capitals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7F800001)

FIRST_SHIFT, FIRST_BINS = tl.constexpr(20), tl.constexpr(2048)
NEXT_BINS = tl.constexpr(1024)
ROUNDS = (10, 0)
"""By how much the magnitudes are shifted for the second and the third digit."""

PREFIX = tl.constexpr(0)
"""The digits found so far, as one number."""
WANTED = tl.constexpr(1)
"""How many are still to select among those that begin with the prefix."""
LENGTH = tl.constexpr(2)
"""How many elements there are to look at: n, or the number of candidates."""
FITS = tl.constexpr(3)
"""1 if those are the candidates, 0 if it is the data itself."""
NUM_STATES = 4


def kernel(function: Callable[..., Any]) -> Any:
    """Compiles a kernel when it is launched; sizes in small letters need no compiling anew."""
    return triton.jit(do_not_specialize=("n", "k", "room", "programs"))(function)


@kernel
def magnitude_of(bits: tl.tensor) -> tl.tensor:
    """The order of the elements, as an integer below 2**31."""
    return tl.minimum(bits & MAGNITUDE, NAN)


@kernel
def share_of(length: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """The first tile of this program's stretch, and how many tiles it has; 0 beyond the last."""
    tiles = (length - 1) // TILE + 1
    each = (tiles - 1) // tl.num_programs(0) + 1
    first = tl.program_id(0) * each
    return first, tl.maximum(tl.minimum(each, tiles - first), 0)


@kernel
def tile_of(source: tl.tensor, base: tl.tensor, left: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """The tile that begins at `base`; zeros from `left` on. Whole ones are read 16 bytes a time."""
    lanes = tl.arange(0, TILE)
    if left >= TILE:
        tile = tl.load(source + base + lanes)
    else:
        tile = tl.load(source + base + lanes, mask=lanes < left, other=0)
    return tile


@kernel
def sum_before(per_program: tl.tensor, PROGRAMS: tl.constexpr) -> tl.tensor:
    """The sum over the programs before this one, and that over all."""
    programs = tl.arange(0, PROGRAMS)
    counts = tl.load(per_program + programs, mask=programs < tl.num_programs(0), other=0)
    return tl.sum(tl.where(programs < tl.program_id(0), counts, 0)), tl.sum(counts)


@kernel
def count_first(
    gradient: tl.tensor,
    old: tl.tensor,
    new: tl.tensor,
    counts: tl.tensor,
    above: tl.tensor,
    odd: tl.tensor,
    state: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    ADD: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Counts the first digit of gradient, or of gradient + old which it writes to `new`.

    Sums that are not finite are written, too, until `restore`; odd: how many there are of them.
    """
    lanes = tl.arange(0, TILE)
    bins = tl.arange(0, FIRST_BINS)
    program = tl.program_id(0)
    first, num = share_of(n, TILE)
    held = tl.zeros((FIRST_BINS,), tl.int32)
    for tile in range(num):
        base = (first + tile).to(tl.int64) * TILE
        left = tl.minimum(n - base, TILE).to(tl.int32)
        total = tile_of(gradient, base, left, TILE)
        if ADD:
            total += tile_of(old, base, left, TILE)
            if left >= TILE:
                tl.store(new + base + lanes, total)
            else:
                tl.store(new + base + lanes, total, mask=lanes < left)
        digit = magnitude_of(total.to(tl.int32, bitcast=True)) >> FIRST_SHIFT
        held += tl.histogram(digit, FIRST_BINS, mask=lanes < left)
    tl.store(counts + program * FIRST_BINS + bins, held)
    tl.store(above + program, 0)
    tl.store(odd + program, tl.sum(tl.where(bins == INFINITE >> FIRST_SHIFT, held, 0)))
    if program == 0:
        tl.store(state + PREFIX, 0)
        tl.store(state + WANTED, k)
        tl.store(state + LENGTH, n)
        tl.store(state + FITS, 0)


@kernel
def count_next(
    data: tl.tensor,
    candidates: tl.tensor,
    counts: tl.tensor,
    above: tl.tensor,
    state: tl.tensor,
    SHIFT: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Counts the next digit of the elements that begin with the prefix, and those above it."""
    lanes = tl.arange(0, TILE)
    program = tl.program_id(0)
    length = tl.load(state + LENGTH)
    prefix = tl.load(state + PREFIX)
    source = data
    if tl.load(state + FITS) != 0:
        source = candidates
    first, num = share_of(length, TILE)
    held = tl.zeros((BINS,), tl.int32)
    over = tl.zeros((TILE,), tl.int32)
    for tile in range(num):
        base = (first + tile).to(tl.int64) * TILE
        left = tl.minimum(length - base, TILE).to(tl.int32)
        digits = magnitude_of(tile_of(source, base, left, TILE)) >> SHIFT
        inside = (digits // BINS == prefix) & (lanes < left)
        held += tl.histogram(digits % BINS, BINS, mask=inside)
        over += ((digits // BINS > prefix) & (lanes < left)).to(tl.int32)
    if num > 0:
        tl.store(counts + program * BINS + tl.arange(0, BINS), held)
        tl.store(above + program, tl.sum(over))


@kernel
def sum_counts(
    counts: tl.tensor,
    totals: tl.tensor,
    state: tl.tensor,
    programs: tl.tensor,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Sums the counts of all programs that had a share; one program for `COLUMNS` bins."""
    tiles = (tl.load(state + LENGTH) - 1) // TILE + 1
    each = (tiles - 1) // programs + 1
    used = (tiles - 1) // each + 1
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    for row in range(0, used, ROWS):
        rows = row + tl.arange(0, ROWS)
        at = counts + rows[:, None] * BINS + columns[None, :]
        total += tl.sum(tl.load(at, mask=rows[:, None] < used, other=0), axis=0)
    tl.store(totals + columns, total)


@kernel
def choose_digit(totals: tl.tensor, state: tl.tensor, BINS: tl.constexpr) -> None:
    """Appends to the prefix the largest digit that the wanted elements reach; one program."""
    bins = tl.arange(0, BINS)
    held = tl.load(totals + bins)
    wanted = tl.load(state + WANTED)
    prefix = tl.load(state + PREFIX)
    reached = tl.sum(held) - tl.cumsum(held, 0) + held
    digit = tl.max(tl.where(reached >= wanted, bins, 0))
    larger = tl.sum(tl.where(bins > digit, held, 0))
    tl.store(state + PREFIX, prefix * BINS + digit)
    tl.store(state + WANTED, wanted - larger)


@kernel
def tally(
    counts: tl.tensor,
    above: tl.tensor,
    larger: tl.tensor,
    equal: tl.tensor,
    state: tl.tensor,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """How many elements of each program are above the prefix, and how many begin with it."""
    bins = tl.arange(0, BINS)
    program = tl.program_id(0)
    digit = tl.load(state + PREFIX) % BINS
    _first, num = share_of(tl.load(state + LENGTH), TILE)
    held = tl.load(counts + program * BINS + bins, mask=(bins < BINS) & (num > 0), other=0)
    over = tl.load(above + program, mask=num > 0, other=0)
    tl.store(larger + program, over + tl.sum(tl.where(bins > digit, held, 0)))
    tl.store(equal + program, tl.sum(tl.where(bins == digit, held, 0)))


@kernel
def collect_candidates(
    data: tl.tensor,
    candidates: tl.tensor,
    places: tl.tensor,
    larger: tl.tensor,
    equal: tl.tensor,
    state: tl.tensor,
    n: tl.tensor,
    room: tl.tensor,
    PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Keeps what reaches the first digit, in index order; nothing if there is no room for all."""
    lanes = tl.arange(0, TILE)
    larger_before, num_larger = sum_before(larger, PROGRAMS)
    equal_before, num_equal = sum_before(equal, PROGRAMS)
    count = num_larger + num_equal
    fits = count <= room
    floor = tl.load(state + PREFIX) << FIRST_SHIFT
    first, num = share_of(n, TILE)
    written = larger_before + equal_before
    for tile in range(tl.where(fits, num, 0)):
        base = (first + tile).to(tl.int64) * TILE
        left = tl.minimum(n - base, TILE).to(tl.int32)
        bits = tile_of(data, base, left, TILE)
        chosen = (magnitude_of(bits) >= floor) & (lanes < left)
        at = written + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(candidates + at, bits, mask=chosen)
        tl.store(places + at, base.to(tl.int32) + lanes, mask=chosen)
        written += tl.sum(chosen.to(tl.int32))
    if tl.program_id(0) == 0:
        tl.store(state + LENGTH, tl.where(fits, count, n))
        tl.store(state + FITS, fits.to(tl.int32))


@kernel
def collect_selected(
    data: tl.tensor,
    candidates: tl.tensor,
    places: tl.tensor,
    larger: tl.tensor,
    equal: tl.tensor,
    state: tl.tensor,
    indices: tl.tensor,
    values: tl.tensor,
    TAKE_OUT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Writes the indices and bits of the k largest, in index order; of equal ones the first.

    TAKE_OUT: leaves zero in their place in `data` (mutated). A negative zero stays, so that what
    is sent and what stays still add up to it, and what is not finite waits for `restore`.
    """
    lanes = tl.arange(0, TILE)
    threshold = tl.load(state + PREFIX)
    ties = tl.load(state + WANTED)
    length = tl.load(state + LENGTH)
    fits = tl.load(state + FITS) != 0
    source = data
    if fits:
        source = candidates
    written, _num_larger = sum_before(larger, PROGRAMS)
    tied, _num_equal = sum_before(equal, PROGRAMS)
    written += tl.minimum(tied, ties)
    first, num = share_of(length, TILE)
    for tile in range(num):
        base = (first + tile).to(tl.int64) * TILE
        left = tl.minimum(length - base, TILE).to(tl.int32)
        bits = tile_of(source, base, left, TILE)
        size = magnitude_of(bits)
        same = ((size == threshold) & (lanes < left)).to(tl.int32)
        early = tied + tl.cumsum(same, 0) <= ties
        chosen = ((size > threshold) & (lanes < left)) | ((same != 0) & early)
        at = written + tl.cumsum(chosen.to(tl.int32), 0) - 1
        index = base.to(tl.int32) + lanes
        if fits:
            index = tl.load(places + base + lanes, mask=chosen, other=0)
        tl.store(indices + at, index, mask=chosen)
        tl.store(values + at, bits, mask=chosen)
        if TAKE_OUT:
            tl.store(data + index, 0, mask=chosen & (size > 0) & (size < INFINITE))
        tied += tl.sum(same)
        written += tl.sum(chosen.to(tl.int32))


@kernel
def restore(
    old: tl.tensor,
    new: tl.tensor,
    odd: tl.tensor,
    num_nonfinite: tl.tensor,
    n: tl.tensor,
    PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Gives the elements whose sum was not finite their old residual back, and counts them.

    old, new: the residuals' bits; new is mutated. Programs whose sums are all finite read nothing.
    """
    lanes = tl.arange(0, TILE)
    program = tl.program_id(0)
    first, num = share_of(n, TILE)
    num_odd = tl.load(odd + program)
    for tile in range(tl.where(num_odd > 0, num, 0)):
        base = (first + tile).to(tl.int64) * TILE
        left = tl.minimum(n - base, TILE).to(tl.int32)
        lost = magnitude_of(tile_of(new, base, left, TILE)) >= INFINITE
        before = tl.load(old + base + lanes, mask=lost, other=0)
        tl.store(new + base + lanes, before, mask=lost)
    if program == 0:
        _before, total = sum_before(odd, PROGRAMS)
        tl.store(num_nonfinite, total)
