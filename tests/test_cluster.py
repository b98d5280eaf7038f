"""The shape of a cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.cluster import Cluster
from slipstream.errors import SlipstreamError


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_every_rank_has_one_place(ranks_per_node: list[int]) -> None:
    cluster = Cluster(tuple(ranks_per_node))
    places = [(cluster.node_of(r), cluster.local_rank_of(r)) for r in range(cluster.world_size)]
    assert places == [(node, i) for node, count in enumerate(ranks_per_node) for i in range(count)]
    for node in range(cluster.nodes):
        for rank in cluster.ranks_of_node(node):
            assert cluster.node_of(rank) == node


def test_regular_clusters() -> None:
    assert Cluster.regular(3, 2) == Cluster((2, 2, 2))
    assert Cluster.regular(3, 2).world_size == 6


@pytest.mark.parametrize("ranks_per_node", [(), (2, 0), (-1,)])
def test_clusters_without_ranks_are_refused(ranks_per_node: tuple[int, ...]) -> None:
    with pytest.raises(SlipstreamError, match="at least one"):
        Cluster(ranks_per_node)


def test_places_that_do_not_exist_are_refused() -> None:
    cluster = Cluster((2, 1))
    for ask in (cluster.node_of, cluster.local_rank_of):
        with pytest.raises(SlipstreamError, match="no rank 3 among 3"):
            ask(3)
    with pytest.raises(SlipstreamError, match="no node -1 among 2"):
        cluster.ranks_of_node(-1)
