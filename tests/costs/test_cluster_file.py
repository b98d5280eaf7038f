"""Cluster files: the documented example, what follows from it, and every kind of damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.cluster import Cluster
from slipstream.costs import ClusterSpec, Costs, Density, Line, Table
from slipstream.errors import CostError

EXAMPLE = """
{"format": "slipstream-cluster/1", "backend": "gloo", "nodes": 4, "ranks_per_node": 2,
 "links": {"intra": {"latency_seconds": 5e-6, "seconds_per_byte": 1e-11,
                     "reduce_seconds_per_byte": 0.0},
           "inter": {"latency_seconds": 3e-5, "seconds_per_byte": 8e-10}},
 "costs": [{"collective": "native", "wire": "float32", "startup_seconds": 1e-3,
            "seconds_per_byte": 8e-10},
           {"collective": "torus", "operation": "all_reduce", "wire": "bfloat16",
            "points": [[1024, 0.0006], [1048576, 0.004]], "spread_seconds": [0.0001, 0.0004]},
           {"collective": "hitopk", "wire": {"density": 0.01, "values": "float32"},
            "points": [[1048576, 0.002]]}]}
"""
LINE = {"collective": "native", "startup_seconds": 1e-3, "seconds_per_byte": 8e-10}
TABLE = {"collective": "native", "points": [[1024, 0.001], [2048, 0.002]]}


def changed(**fields: Any) -> str:
    """The example with top-level fields replaced."""
    return json.dumps({**json.loads(EXAMPLE), **fields})


def test_the_documented_example_is_read() -> None:
    spec = ClusterSpec.from_json(EXAMPLE)
    assert spec.cluster == Cluster.regular(4, 2)
    costs = Costs.of(spec)
    assert costs.curve() == Line(1e-3, 8e-10)
    torus = costs.curve("torus", wire="bfloat16")
    assert torus == Table(((1024, 0.0006), (1048576, 0.004)), (0.0001, 0.0004))
    sparse = costs.curve("hitopk", wire=Density(density=0.01, values="float32"))
    assert sparse.seconds(2 * 1048576) == pytest.approx(0.004)


def test_it_survives_its_file(tmp_path: Path) -> None:
    spec = ClusterSpec.from_json(changed(ranks_per_node=[2, 2, 2, 1]))
    spec.save(tmp_path / "cluster.json")
    assert ClusterSpec.load(tmp_path / "cluster.json") == spec
    assert spec.cluster == Cluster((2, 2, 2, 1))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"nodes": 0}, "nodes"),
        ({"nodes": 2.5}, "nodes"),
        ({"ranks_per_node": 0}, "ranks_per_node"),
        ({"ranks_per_node": [2, 2]}, "lists 2 nodes, and nodes is 4"),
        ({"rank_per_node": 2}, "rank_per_node: Extra inputs"),
        ({"format": "slipstream-trace/1"}, "format"),
        ({"links": None, "costs": []}, "costs and links are both missing"),
        ({"links": {"inter": {"latency_seconds": 1e-5}}}, "links.inter.seconds_per_byte"),
        ({"links": {"across": {}}}, "links.across: Extra inputs"),
        ({"costs": [{**LINE, "startup_seconds": -1.0}]}, "costs.0.startup_seconds"),
        ({"costs": [{**LINE, "seconds_per_byte": float("nan")}]}, "costs.0.seconds_per_byte"),
        ({"costs": [{**LINE, "startup_seconds": 1e9}]}, "costs.0.startup_seconds"),
        ({"costs": [{**LINE, "seconds_per_byte": 1.5}]}, "costs.0.seconds_per_byte"),
        ({"costs": [{**LINE, "collective": "pigeon"}]}, "costs.0.collective"),
        ({"costs": [{**LINE, "operation": "broadcast"}]}, "costs.0.operation"),
        ({"costs": [{**LINE, "wire": "int8"}]}, "costs.0.wire"),
        ({"costs": [{**LINE, "wire": {"density": 0.1, "values": "float32"}}]}, "a density as its"),
        ({"costs": [{**LINE, "collective": "hitopk"}]}, "a density as its wire"),
        ({"costs": [LINE, LINE]}, "all_reduce by native with wire float32 twice"),
        ({"costs": [{"collective": "native"}]}, "startup_seconds and seconds_per_byte, or points"),
        ({"costs": [{**LINE, "seconds_per_byte": None}]}, "or points"),
        ({"costs": [{**LINE, **TABLE}]}, "a line or a table of points, not both"),
        ({"costs": [{**TABLE, "points": []}]}, "1 to 10000 points, not 0"),
        ({"costs": [{**TABLE, "points": [[2048, 0.1], [1024, 0.2]]}]}, "from 2048 to 1024 bytes"),
        ({"costs": [{**TABLE, "points": [[1024, 0.0]]}]}, "costs.0.points.0.1"),
        ({"costs": [{**TABLE, "points": [[0, 0.1]]}]}, "costs.0.points.0.0"),
        ({"costs": [{**TABLE, "points": [[1024]]}]}, "costs.0.points.0"),
        ({"costs": [{**TABLE, "spread_seconds": [0.1]}]}, "2 points have 1 spread_seconds"),
    ],
)
def test_a_damaged_cluster_file_is_refused_with_file_and_field(
    fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(changed(**fields), encoding="utf-8")
    with pytest.raises(CostError, match=rf"cluster\.json is not a cluster .*{words}"):
        ClusterSpec.load(path)


@pytest.mark.parametrize("text", ["", "{", EXAMPLE[:-30], "null"])
def test_a_torn_cluster_file_is_refused(text: str) -> None:
    with pytest.raises(CostError, match="the cluster is not a cluster"):
        ClusterSpec.from_json(text)
