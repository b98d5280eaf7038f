"""The engine carries every bucket by the collective and wire that the plan gives it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import pytest
import torch

from ranks import Rank, run_ranks
from slipstream.cluster import Cluster
from slipstream.errors import PlanError
from slipstream.plan import Bucket, Plan
from slipstream.sync import GradientSync, NonFinite
from slipstream.wires import DENSE_WIRES, DenseWire
from small_models import Gradients, assert_matches, batch, gradients, loss_of, mlp

CLUSTER = Cluster((2, 2))
WAYS = [(name, wire) for name, wires in DENSE_WIRES.items() for wire in wires]


def plan_of(ways: Sequence[tuple[str, DenseWire]], cluster: Cluster = CLUSTER) -> Plan:
    """A bucket a gradient; the ways take turns."""
    model = mlp()
    return Plan(
        planner="fixed",
        nodes=cluster.nodes,
        ranks_per_node=cluster.ranks_per_node,
        reduce=tuple(
            Bucket.model_validate(
                {"gradients": (n,), "bytes": p.nbytes, "collective": way, "wire": wire}
            )
            for (n, p), (way, wire) in zip(
                reversed(list(model.named_parameters())), cycle(ways), strict=False
            )
        ),
    )


def joined(steps: int) -> list[Gradients]:
    found = []
    for step in range(steps):
        reference = mlp()
        loss_of(reference, torch.cat([batch(rank, step) for rank in range(4)])).backward()
        found.append(gradients(reference))
    return found


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_averages_by_every_way_are_the_joined_batchs(way: tuple[str, DenseWire]) -> None:
    def train(rank: Rank) -> list[Gradients]:
        model = mlp()
        sync = GradientSync(model, plan=plan_of([way]), group=rank.group, cluster=CLUSTER)
        found = []
        for step in range(3):
            model.zero_grad()
            loss_of(model, batch(rank.rank, step)).backward()
            found.append(gradients(model))
        sync.close()
        return found

    rtol = {"float32": 1e-12, "bfloat16": 2**-6, "float16": 2**-9}[way[1]]
    outcomes = run_ranks(train, 4)
    for step, reference in enumerate(joined(3)):
        for found in outcomes:
            assert_matches(found[step], reference, rtol=rtol)
            assert_matches(found[step], outcomes[0][step], rtol=0.0)


def test_ways_may_differ_from_bucket_to_bucket() -> None:
    def train(rank: Rank) -> Gradients:
        model = mlp()
        ways = [(name, wire) for name, wire in WAYS if wire == "float32"]
        sync = GradientSync(model, plan=plan_of(ways), group=rank.group, cluster=CLUSTER)
        loss_of(model, batch(rank.rank)).backward()
        sync.close()
        return gradients(model)

    for found in run_ranks(train, 4):
        assert_matches(found, joined(1)[0])


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_accumulated_and_unused_gradients_keep_their_meaning_with_a_16_bit_wire(
    wire: DenseWire,
) -> None:
    def train(rank: Rank) -> Gradients:
        model = mlp()
        plan = plan_of([("torus", wire)])
        sync = GradientSync(model, plan=plan, group=rank.group, cluster=CLUSTER)
        with sync.no_sync():
            loss_of(model, batch(rank.rank, 0)).backward()
        loss_of(model, batch(rank.rank, 1)).backward()
        found = gradients(model)
        model.zero_grad()
        model[0](batch(rank.rank, 2)).square().mean().backward()
        assert model[3].weight.grad is None, "nobody used it"
        sync.close()
        return found

    reference = mlp()
    for step in range(2):
        loss_of(reference, torch.cat([batch(rank, step) for rank in range(4)])).backward()
    for found in run_ranks(train, 4):
        assert_matches(found, gradients(reference), rtol=2**-6)


def test_a_gradient_that_float16_cannot_carry_is_told_as_not_finite_on_all_ranks() -> None:
    def train(rank: Rank) -> NonFinite | None:
        model = mlp()
        sync = GradientSync(
            model,
            plan=plan_of([("direct", "float16")]),
            group=rank.group,
            cluster=CLUSTER,
            check_finite=True,
        )
        loss = loss_of(model, batch(rank.rank))
        (loss * 1e9 if rank.rank == 2 else loss).backward()
        found = sync.nonfinite()
        sync.close()
        return found

    for found in run_ranks(train, 4):
        assert found is not None
        assert found.ranks == (2,)


def test_plans_that_the_engine_cannot_carry_out_are_refused_when_it_is_made() -> None:
    def body(rank: Rank) -> None:
        with pytest.raises(PlanError, match="as many ranks on every node"):
            uneven = Cluster((2, 1))
            GradientSync(
                mlp(),
                plan=plan_of([("torus", "float32")], uneven),
                group=rank.group,
                cluster=uneven,
            )
        with pytest.raises(PlanError, match="not 'float16'"):
            plan = plan_of([("native", "float16")], Cluster((3,)))
            GradientSync(mlp(), plan=plan, group=rank.group)

    run_ranks(body, 3)
