"""Learning rates: the written formulas, their limits, and their joints."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.optim.schedules import Schedule


def test_warmup_is_linear_and_reaches_the_peak() -> None:
    schedule = Schedule(kind="cosine", peak=0.4, num_updates=100, warmup_updates=4)
    assert [schedule.rate(update) for update in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert schedule.rate(4) == 0.4


def test_cosine_is_half_way_down_in_the_middle_and_ends_at_the_final_fraction() -> None:
    schedule = Schedule(
        kind="cosine", peak=1.0, num_updates=110, warmup_updates=10, final_fraction=0.2
    )
    assert schedule.rate(60) == pytest.approx(0.6)
    assert schedule.rate(85) == pytest.approx(0.2 + 0.8 * (1 + math.cos(0.75 * math.pi)) / 2)
    assert schedule.rate(110) == pytest.approx(0.2)
    assert schedule.rate(1000) == schedule.rate(110)


def test_polynomial_follows_its_power() -> None:
    schedule = Schedule(kind="polynomial", peak=2.0, num_updates=100, power=2.0)
    assert schedule.rate(0) == 2.0
    assert schedule.rate(50) == pytest.approx(0.5)
    assert schedule.rate(100) == 0.0


def test_step_drops_by_its_factor_counted_from_the_start() -> None:
    schedule = Schedule(
        kind="step",
        peak=1.0,
        num_updates=30,
        warmup_updates=2,
        step_updates=10,
        step_factor=0.1,
    )
    rates = [schedule.rate(update) for update in (0, 1, 2, 9, 10, 19, 20, 29)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.parametrize("kind", ["cosine", "polynomial", "step"])
@given(num_updates=st.integers(1, 200), share=st.floats(0, 1), final=st.floats(0, 1))
def test_rates_rise_to_the_peak_and_never_rise_again(
    kind: str, num_updates: int, share: float, final: float
) -> None:
    warmup = int(share * num_updates)
    schedule = Schedule(
        kind=kind,  # type: ignore[arg-type]
        peak=0.3,
        num_updates=num_updates,
        warmup_updates=warmup,
        final_fraction=final,
        step_updates=max(1, num_updates),
    )
    rates = [schedule.rate(update) for update in range(num_updates + 5)]
    assert all(0 <= rate <= 0.3 * (1 + 1e-12) for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert all(after <= before for before, after in pairwise(rates[warmup:]))


@pytest.mark.parametrize("num_updates, warmup", [(0, 0), (10, 11), (10, -1)])
def test_a_warmup_that_does_not_fit_is_refused(num_updates: int, warmup: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        Schedule(kind="cosine", peak=0.1, num_updates=num_updates, warmup_updates=warmup)


def test_negative_updates_and_empty_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="counted from 0"):
        Schedule(kind="cosine", peak=0.1, num_updates=10).rate(-1)
    with pytest.raises(ValueError, match="step_updates"):
        Schedule(kind="step", peak=0.1, num_updates=10, step_updates=0)
