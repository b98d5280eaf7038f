"""Sparse sums are measured beside dense ones, selection included."""

from __future__ import annotations

import torch

from ranks import Rank, run_ranks
from slipstream.cluster import Cluster
from slipstream.comm import Collectives
from slipstream.comm.sparse import TopK
from slipstream.costs import ClusterSpec, Costs
from slipstream.measure import probe_budgeted
from slipstream.measure.sparse import SparseSum
from slipstream.wires import Density

WIRE = Density(density=0.1, values="bfloat16")


def test_a_probe_measures_dense_and_sparse_ways_alike() -> None:
    def body(rank: Rank) -> ClusterSpec:
        return probe_budgeted(
            rank.group,
            Cluster((1, 1)),
            [1024, 4096],
            0.3,
            ways=[("native", "float32"), ("hitopk", WIRE), ("naive_topk", WIRE)],
            store=rank.store,
        )

    first, second = run_ranks(body, 2)
    assert first == second
    costs = Costs.of(ClusterSpec.from_json(first.to_json(), "what was probed"))
    for name in ("hitopk", "naive_topk"):
        assert costs.curve(name, "all_reduce", WIRE).seconds(4096) > 0
    assert costs.collectives == ("native",)


def test_what_is_measured_selects_among_values_that_differ_and_stays_finite() -> None:
    def body(rank: Rank) -> tuple[int, bool]:
        run = SparseSum(Collectives(rank.group, Cluster((1, 1))), "hitopk", WIRE, 2)
        flat = torch.zeros(2000)
        for _ in range(50):
            run(flat)
        made = run._sum
        assert isinstance(made, TopK)
        return int(next(made.kept()).values.unique().numel()), bool(flat.isfinite().all())

    for distinct, is_finite in run_ranks(body, 2):
        assert distinct > 1000 and is_finite
