"""Random streams: unrelated where coordinates differ, identical where they agree (case S9)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.data.streams import Purpose, permutation, random_bits, random_integers

MASK = 2**64 - 1


def mix(value: int) -> int:
    """SplitMix64's finaliser, in unbounded integers."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


@given(
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**40),
    sample=st.integers(0, 2**62),
    purpose=st.sampled_from(Purpose),
)
@settings(deadline=None)
def test_bits_equal_the_written_out_reference(
    seed: int, epoch: int, sample: int, purpose: Purpose
) -> None:
    state = mix(mix(mix(seed & MASK) ^ purpose) ^ epoch)
    expected = mix(mix(state ^ sample))
    assert random_bits(seed, purpose, epoch, np.array([sample]))[0] == expected


def test_all_streams_differ_and_a_rerun_is_identical() -> None:
    samples = np.arange(1000)

    def draw() -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        streams = [
            random_bits(seed, purpose, epoch, samples)
            for seed in (0, 1, 2**63)
            for purpose in Purpose
            for epoch in range(4)
        ]
        return np.concatenate(streams)

    bits = draw()
    assert len(np.unique(bits)) == len(bits) == 3 * 5 * 4 * 1000
    assert np.array_equal(bits, draw())


def test_the_order_of_a_run_never_changes_between_releases() -> None:
    order = permutation(10, seed=1, purpose=Purpose.SHUFFLE, epoch=2)
    assert order.tolist() == [0, 4, 7, 2, 5, 1, 3, 8, 9, 6]


@pytest.mark.parametrize("num_samples", [1, 2, 17, 4096])
def test_a_permutation_holds_each_sample_once(num_samples: int) -> None:
    order = permutation(num_samples, seed=5, purpose=Purpose.SHUFFLE, epoch=0)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(num_samples))


def test_permutations_put_each_sample_everywhere_equally_often() -> None:
    num_epochs, num_samples = 4000, 8
    counts = np.zeros((num_samples, num_samples))
    for epoch in range(num_epochs):
        order = permutation(num_samples, seed=9, purpose=Purpose.SHUFFLE, epoch=epoch)
        counts[np.arange(num_samples), order] += 1
    expected = num_epochs / num_samples
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    # 49 degrees of freedom: 99.9 % of uniform tables stay below 85.4.
    assert chi_square < 85.4


@pytest.mark.parametrize("high", [1, 2, 5, 9])
def test_integers_are_uniform_and_in_range(high: int) -> None:
    draws = random_integers(
        high, seed=0, purpose=Purpose.CROP_ROW, epoch=1, samples=np.arange(20_000)
    )
    counts = np.bincount(draws, minlength=high)
    assert draws.dtype == np.int64 and len(counts) == high
    expected = 20_000 / high
    # 8 degrees of freedom at most: 99.9 % of uniform draws stay below 26.1.
    assert float(((counts - expected) ** 2 / expected).sum()) < 26.1


def test_purposes_and_neighbouring_epochs_are_uncorrelated() -> None:
    samples = np.arange(20_000)

    def draws(purpose: Purpose, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return random_integers(1001, seed=4, purpose=purpose, epoch=epoch, samples=samples)

    row, column = draws(Purpose.CROP_ROW, 0), draws(Purpose.CROP_COLUMN, 0)
    later = draws(Purpose.CROP_ROW, 1)
    for other in (column, later, np.roll(row, 1)):
        assert abs(np.corrcoef(row, other)[0, 1]) < 4 / np.sqrt(len(samples))
