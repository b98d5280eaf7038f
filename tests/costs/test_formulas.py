"""Formulas of the collectives: counted by hand on small clusters, and in the right order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.cluster import Cluster
from slipstream.costs import Costs, Link, Links
from slipstream.costs.formulas import ALL_REDUCES
from slipstream.errors import CostError

UNIT = 1e-5
"""Per-byte figures below are in this many seconds."""
INTRA = Link(latency_seconds=1.0, seconds_per_byte=10 * UNIT)
INTER = Link(latency_seconds=100.0, seconds_per_byte=1000 * UNIT)
LINKS = Links(intra=INTRA, inter=INTER)


@pytest.mark.parametrize(
    ("name", "startup", "per_byte"),
    [
        ("ring", 600.0, 2 * 3 / 4 * 1000),
        ("direct", 200.0, 2 * 2 * 2 / 4 * 1000),
        ("recursive_doubling", 101.0, 10 + 2 * 1000),
        ("halving_doubling", 202.0, 2 * (2 * 0.5 * 1000 + 10 / 4)),
        ("hierarchical", 202.0, 2 * 10 + 1000),
        ("torus", 202.0, 10 + 1000),
    ],
)
def test_two_nodes_of_two_ranks(name: str, startup: float, per_byte: float) -> None:
    line = ALL_REDUCES[name](LINKS, Cluster((2, 2)), 1.0)
    assert line.startup_seconds == pytest.approx(startup)
    assert line.seconds_per_byte == pytest.approx(per_byte * UNIT)


@pytest.mark.parametrize("name", ["direct", "hierarchical", "torus"])
def test_a_narrow_wire_halves_what_travels_between_nodes(name: str) -> None:
    cluster = Cluster((1, 1, 1))
    wide, narrow = (ALL_REDUCES[name](Links(inter=INTER), cluster, share) for share in (1.0, 0.5))
    assert narrow.seconds_per_byte == pytest.approx(wide.seconds_per_byte / 2)
    assert narrow.startup_seconds == wide.startup_seconds


@given(nodes=st.integers(1, 40), per_node=st.integers(1, 9), name=st.sampled_from([*ALL_REDUCES]))
def test_no_all_reduce_beats_the_bytes_that_must_cross(
    nodes: int, per_node: int, name: str
) -> None:
    """A node's values must leave it once, and all others' must come in: 2 (m-1)/m of the bytes."""
    line = ALL_REDUCES[name](LINKS, Cluster((per_node,) * nodes), 1.0)
    least = 2 * (nodes - 1) / nodes * INTER.seconds_per_byte
    assert line.seconds_per_byte >= least * (1 - 1e-9)
    assert line.startup_seconds >= 0
    alone = nodes * per_node == 1
    assert alone == (line.startup_seconds == 0)


def test_what_has_no_formula_or_no_link_is_told() -> None:
    with pytest.raises(CostError, match="as many ranks on every node"):
        ALL_REDUCES["torus"](LINKS, Cluster((2, 1)), 1.0)
    with pytest.raises(CostError, match="lack `intra`"):
        ALL_REDUCES["direct"](Links(inter=INTER), Cluster((2, 2)), 1.0)
    with pytest.raises(CostError, match="Nobody has measured"):
        Costs(Cluster((2, 2)), {}, LINKS).curve("hitopk")


def test_planners_are_offered_what_there_is_and_no_wire_that_a_collective_lacks() -> None:
    costs = Costs(Cluster((2, 1)), {}, LINKS)
    names = ("native", "torus", "ring", "direct")
    found = {(c.collective, c.wire) for c in costs.choices(names, ("float32", "float16"))}
    assert found == {
        ("native", "float32"),
        ("ring", "float32"),
        ("direct", "float32"),
        ("direct", "float16"),
    }
    with pytest.raises(CostError, match="'native' does not send float16"):
        costs.choices(("native",), ("float16",))
