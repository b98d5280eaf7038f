"""Which curve a collective gets: measured over formula, formulas for shapes nobody measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.cluster import Cluster
from slipstream.costs import Costs, Line, Link, Links, Operation, ring
from slipstream.errors import CostError

ALPHA, GAMMA = 45.25e-6, 2.5e-9
BETA = 1.2 / (9.0 * 2**30 / 8)
PUBLISHED = Links(
    inter=Link(latency_seconds=ALPHA, seconds_per_byte=BETA, reduce_seconds_per_byte=GAMMA)
)
FAST = Link(latency_seconds=5e-6, seconds_per_byte=1e-11)
SLOW = Link(latency_seconds=3e-5, seconds_per_byte=8e-10)
BOTH = Links(intra=FAST, inter=SLOW)


@pytest.mark.parametrize(
    ("ranks", "per_byte"),
    [(2, 2.243e-9), (4, 3.365e-9), (8, 3.926e-9), (16, 4.206e-9), (32, 4.347e-9), (64, 4.417e-9)],
)
def test_ring_constants_of_the_published_simulator(ranks: int, per_byte: float) -> None:
    """10GbE, K80: b as printed there; a in its later form, 2 (N-1) alpha."""
    line = ring(PUBLISHED, Cluster.regular(ranks, 1), "all_reduce")
    assert line.seconds_per_byte == pytest.approx(per_byte, rel=2e-4)
    assert line.startup_seconds == pytest.approx(2 * (ranks - 1) * ALPHA)


@pytest.mark.parametrize("ranks", [2, 5, 64])
def test_the_halves_make_the_whole(ranks: int) -> None:
    cluster = Cluster.regular(ranks, 1)
    whole = ring(PUBLISHED, cluster, "all_reduce")
    scatter = ring(PUBLISHED, cluster, "reduce_scatter")
    gather = ring(PUBLISHED, cluster, "all_gather")
    assert scatter.startup_seconds + gather.startup_seconds == whole.startup_seconds
    assert scatter.seconds_per_byte + gather.seconds_per_byte == pytest.approx(
        whole.seconds_per_byte
    )


def test_a_ring_goes_at_the_pace_of_its_slowest_link() -> None:
    ranks = 8
    share = 2 * (ranks - 1) / ranks
    across = ring(BOTH, Cluster.regular(4, 2), "all_reduce")
    assert across.seconds_per_byte == pytest.approx(share * SLOW.seconds_per_byte)
    within = ring(BOTH, Cluster.regular(1, 8), "all_reduce")
    assert within.seconds_per_byte == pytest.approx(share * FAST.seconds_per_byte)
    assert ring(BOTH, Cluster.regular(1, 1), "all_reduce") == Line(0.0, 0.0)


def test_a_16_bit_wire_halves_what_travels_and_not_what_is_added() -> None:
    cluster = Cluster.regular(4, 1)
    costs = Costs(cluster, {}, PUBLISHED)
    full, half = costs.curve("ring"), costs.curve("ring", wire="bfloat16")
    assert isinstance(full, Line) and isinstance(half, Line)
    added = 3 / 4 * GAMMA
    assert half.seconds_per_byte - added == pytest.approx((full.seconds_per_byte - added) / 2)
    assert half.startup_seconds == full.startup_seconds


def test_links_that_are_needed_and_not_known_are_named() -> None:
    with pytest.raises(CostError, match="lack `intra`"):
        ring(PUBLISHED, Cluster.regular(2, 2), "all_reduce")
    with pytest.raises(CostError, match="lack `inter`"):
        ring(Links(intra=FAST), Cluster.regular(2, 2), "all_reduce")


def test_measured_wins_over_formula_and_formula_serves_the_rest() -> None:
    measured = Line(1.0, 1.0)
    costs = Costs(Cluster.regular(4, 1), {("native", "all_reduce", "float32"): measured}, BOTH)
    assert costs.curve() == measured
    assert costs.curve("ring") == ring(BOTH, costs.cluster, "all_reduce")
    assert costs.curve(operation="all_gather") == ring(BOTH, costs.cluster, "all_gather")
    larger = costs.at(Cluster.regular(16, 1))
    assert larger.curve() == ring(BOTH, Cluster.regular(16, 1), "all_reduce")
    assert costs.at(costs.cluster) is costs


def test_what_nobody_measured_is_an_error_with_a_way_out() -> None:
    costs = Costs.from_curves(Cluster.regular(4, 1), {"native": Line(1.0, 1.0)})
    with pytest.raises(CostError, match=r"reduce_scatter by 'native'.*`links`.*slipstream probe"):
        costs.curve(operation="reduce_scatter")
    with pytest.raises(CostError, match=r"by 'hitopk'.*measured collectives: native"):
        costs.curve("hitopk")
    with pytest.raises(CostError, match=r"by 'torus'.*`links`.*slipstream probe"):
        costs.curve("torus")
    with pytest.raises(CostError, match="8 nodes with 1 rank each are asked for; that takes"):
        costs.at(Cluster.regular(8, 1))


def test_choices_leave_out_what_has_no_cost_but_not_everything() -> None:
    curves = {"native": Line(1.0, 1.0), "torus": Line(2.0, 0.5)}
    costs = Costs.from_curves(Cluster.regular(4, 1), curves)
    found = costs.choices(("torus", "direct", "native"), ("float32", "bfloat16"))
    assert [(choice.collective, choice.wire) for choice in found] == [
        ("torus", "float32"),
        ("native", "float32"),
    ]
    with pytest.raises(CostError, match="by 'direct'"):
        costs.choices(("direct", "hierarchical"))
    with pytest.raises(CostError, match="at least one collective"):
        costs.choices(())


@given(
    st.integers(1, 4096),
    st.sampled_from(["all_reduce", "reduce_scatter", "all_gather"]),
    st.floats(0, 1e-3),
    st.floats(0, 1e-6),
)
def test_more_bandwidth_never_costs_more(
    ranks: int, operation: Operation, latency: float, per_byte: float
) -> None:
    def cost(scale: float) -> float:
        link = Link(latency_seconds=latency, seconds_per_byte=per_byte * scale)
        return ring(Links(inter=link), Cluster.regular(ranks, 1), operation).seconds(2**20)

    assert cost(0.5) <= cost(1.0) <= cost(2.0)
