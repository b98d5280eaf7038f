"""Scales, smoothing and thinning: what a curve shows is what was recorded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.report.scale import fit, ticks
from slipstream.report.series import series, smooth, thin, window_of

_VALUES = st.floats(-1e300, 1e300)


@given(st.lists(_VALUES, max_size=20), st.booleans(), st.none() | st.just(0.0))
def test_every_value_has_a_place_in_order(
    values: list[float], may_be_log: bool, low: float | None
) -> None:
    scale = fit(values, 200.0, 10.0, low=low, may_be_log=may_be_log)
    assert scale.low < scale.high
    places = [scale(value) for value in sorted(values)]
    assert all(10.0 <= place <= 200.0 for place in places)
    assert places == sorted(places, reverse=True)
    assert all(scale.low <= tick <= scale.high for tick in scale.ticks()[1:-1])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (3, 17, [5, 10, 15]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_two_decades_of_loss_are_drawn_logarithmically() -> None:
    assert fit([0.01, 5.0], 0, 1, may_be_log=True).is_log
    assert not fit([0.1, 5.0], 0, 1, may_be_log=True).is_log
    assert not fit([-0.01, 5.0], 0, 1, may_be_log=True).is_log
    assert fit([0.01, 5.0], 0, 1, may_be_log=True).ticks() == pytest.approx([0.01, 0.1, 1])


def test_a_value_that_is_not_finite_splits_the_curve() -> None:
    records = [
        {"kind": "step", "step": step, "loss": loss}
        for step, loss in enumerate([1.0, 2.0, float("nan"), None, 3.0, float("inf")])
    ]
    assert series("a", "one", records, "loss").segments == (((0, 1), (1, 2)), ((4, 3),))
    assert series("a", "one", records, "absent").segments == ()


def test_smoothing_keeps_lines_straight_and_averages_the_middle() -> None:
    line = tuple((float(x), 2.0 * x) for x in range(30))
    assert smooth(line, 5) == list(line)
    assert len(smooth(line * 1000, 5)) <= 601
    spike = ((0.0, 1e250), *line)
    assert smooth(spike, 5)[5:] == list(line)[4:]
    bump = tuple((float(x), float(x == 2)) for x in range(5))
    assert [y for _, y in smooth(bump, 3)] == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 0])
    assert window_of(10) == 1
    assert window_of(700) % 2 == 1


@given(st.lists(_VALUES, min_size=1, max_size=3000))
def test_thinning_keeps_order_and_extremes(values: list[float]) -> None:
    points = [(float(x), y) for x, y in enumerate(values)]
    kept = thin(points)
    assert len(kept) <= 602
    assert kept == sorted(kept)
    assert set(kept) <= set(points)
    assert {min(y for _, y in kept), max(y for _, y in kept)} == {min(values), max(values)}
