"""The engine carries every bucket by the collective and wire that the plan gives it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import pytest
import torch

from ranks import Rank, run_ranks, run_ranks_settled
from slipstream.cluster import Cluster
from slipstream.comm.hanging_up import hang_up
from slipstream.errors import PlanError, RankFailure
from slipstream.plan import Bucket, Plan
from slipstream.sync import DDPHookState, GradientSync, NonFinite
from slipstream.wires import DENSE_WIRES, DenseWire
from small_models import (
    Gradients,
    assert_matches,
    batch,
    gradients,
    loss_of,
    mlp,
    reseeded,
    weights,
)

CLUSTER = Cluster((2, 2))
UNEVEN = Cluster((3, 2))
RTOL = {"float32": 1e-12, "bfloat16": 2**-6, "float16": 2**-9}
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


def joined(steps: int, ranks: int = 4) -> list[Gradients]:
    found = []
    for step in range(steps):
        reference = mlp()
        loss_of(reference, torch.cat([batch(rank, step) for rank in range(ranks)])).backward()
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

    rtol = RTOL[way[1]]
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


def test_nodes_with_unequal_numbers_of_ranks_train_alike() -> None:
    """Case S7."""
    ways = [(name, wire) for name, wire in WAYS if name != "torus"]

    def train(rank: Rank) -> list[Gradients]:
        found = []
        for way in ways:
            model = mlp()
            plan = plan_of([way], UNEVEN)
            sync = GradientSync(model, plan=plan, group=rank.new_group(), cluster=UNEVEN)
            loss_of(model, batch(rank.rank)).backward()
            found.append(gradients(model))
            sync.close()
        return found

    [reference] = joined(1, ranks=5)
    outcomes = run_ranks(train, 5)
    for case, (_, wire) in enumerate(ways):
        for found in outcomes:
            assert_matches(found[case], reference, rtol=RTOL[wire])
            assert_matches(found[case], outcomes[0][case], rtol=0.0)


def test_a_torus_over_unequal_nodes_is_refused_on_every_rank_when_it_is_made() -> None:
    """Case S7: before anything is broadcast or changed."""

    def body(rank: Rank) -> list[str]:
        model, said = reseeded(mlp(), rank.rank), []
        before = weights(model)
        for make in (
            lambda: GradientSync(
                model,
                plan=plan_of([("torus", "float32")], UNEVEN),
                group=rank.group,
                cluster=UNEVEN,
            ),
            lambda: DDPHookState("torus", cluster=UNEVEN, group=rank.group),
        ):
            with pytest.raises(PlanError) as caught:
                make()
            said.append(str(caught.value))
        assert torch.equal(weights(model), before)
        return said

    told = (
        "The torus needs as many ranks on every node, and there are 2 nodes with 3, 2 ranks; plan "
        "with another collective, such as hierarchical, ring or direct."
    )
    assert run_ranks(body, 5) == [[told, told]] * 5


def train_until_one_is_lost(rank: Rank, way: tuple[str, DenseWire]) -> None:
    model = mlp()
    sync = GradientSync(
        model, plan=plan_of([way]), group=rank.group, cluster=CLUSTER, timeout_seconds=60.0
    )
    for step in range(4):
        if rank.rank == 2 and step == 2:
            hang_up(rank.group)  # as when its process ends
            return
        model.zero_grad()
        loss_of(model, batch(rank.rank, step)).backward()
    sync.close()


def test_by_every_way_all_others_name_the_lost_rank_and_no_other_long_before_the_limit() -> None:
    with ThreadPoolExecutor(len(WAYS)) as pool:
        ends = pool.map(
            lambda way: run_ranks_settled(
                lambda rank: train_until_one_is_lost(rank, way), 4, timeout_seconds=60.0
            ),
            WAYS,
        )
        for way, outcomes in zip(WAYS, ends, strict=True):
            assert outcomes[2] is None
            for rank in (0, 1, 3):
                assert isinstance(outcomes[rank], RankFailure), (way, outcomes)
                assert "of step 3" in str(outcomes[rank]), (way, outcomes)
                assert "no answer from rank 2:" in str(outcomes[rank]), (way, outcomes)


@pytest.mark.usefixtures("brief_reports")
def test_closing_while_an_average_is_under_way_ends_it_and_the_others_are_told() -> None:
    """Rank 1 never sends its half; rank 0 closes, and its thread and the average end."""

    def body(rank: Rank) -> str:
        model = mlp()
        plan = plan_of([("ring", "float32")], Cluster((2,)))
        sync = GradientSync(model, plan=plan, group=rank.group, timeout_seconds=1.0)
        sync.attach(torch.optim.SGD(model.parameters(), lr=0.1))
        if rank.rank == 1:
            rank.hold(8.0)
            return ""
        loss_of(model, batch(0)).backward()
        with pytest.raises(RankFailure) as caught:
            sync.close()
        with pytest.raises(RankFailure):
            loss_of(model, batch(0)).backward()
            sync.wait()
        return str(caught.value)

    zero, _ = run_ranks_settled(body, 2, timeout_seconds=1.0)
    assert isinstance(zero, str), zero
    assert "averaging bucket 0 of step 1" in zero and "no answer from rank 1" in zero


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
