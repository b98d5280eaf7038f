"""What a user's loop relies on: p.grad right after backward is the mean over ranks."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ranks import Rank, run_ranks
from slipstream.errors import PlanError, SlipstreamError, UnsupportedModel
from slipstream.plan import Bucket, Plan
from slipstream.sync import GradientSync
from slipstream.sync.reducer import Reducer
from slipstream.wires import DenseWire
from small_models import Gradients, assert_matches, batch, gradients, loss_of, mlp, weights

PLANNERS = ["wfbp", "single", "fixed", "ddp"]


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_equal_one_process_on_the_joined_batch(planner: str, world_size: int) -> None:
    def train(rank: Rank) -> tuple[dict[str, Any], torch.Tensor]:
        model = mlp(seed=rank.rank)  # rank 0's weights win
        sync = GradientSync(model, plan=planner, group=rank.group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, batch(rank.rank, step)).backward()
            optimizer.step()
        sync.close()
        return gradients(model), weights(model)

    outcomes = run_ranks(train, world_size)
    reference = mlp()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for step in range(4):
        optimizer.zero_grad()
        joined = torch.cat([batch(rank, step) for rank in range(world_size)])
        loss_of(reference, joined).backward()
        optimizer.step()
    for mine, final in outcomes:
        assert_matches(mine, gradients(reference))
        assert torch.equal(final, outcomes[0][1]), "ranks hold the same bits"


def test_one_rank_gives_the_bits_of_the_unwrapped_model() -> None:
    wrapped, plain = mlp(), mlp()
    sync = GradientSync(wrapped)
    for model in (wrapped, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(0, step)).backward()
            optimizer.step()
    assert torch.equal(weights(wrapped), weights(plain))
    assert sync.world_size == 1 and sync.rank == 0


def test_gradients_are_views_of_the_buckets_and_cost_no_second_copy() -> None:
    def train(rank: Rank) -> tuple[int, int]:
        model = mlp()
        sync = GradientSync(model, plan="single", group=rank.group)
        loss_of(model, batch(rank.rank)).backward()
        storages = {
            p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None
        }
        held = sum(b.flat.numel() for b in sync._rounds.reducer.buffers)
        sync.close()
        return len(storages), held

    elements = sum(p.numel() for p in mlp().parameters())
    num_params = len(list(mlp().parameters()))
    assert run_ranks(train, 2) == [(1, elements + num_params)] * 2


def test_a_new_plan_frees_the_buckets_of_the_old_one() -> None:
    model = mlp()
    sync = GradientSync(model, plan="wfbp")
    old = [weakref.ref(buffer.flat) for buffer in sync._rounds.reducer.buffers]
    gc.disable()  # freed by itself, not when the collector happens to run
    try:
        for step in range(2):
            model.zero_grad()
            loss_of(model, batch(0, step)).backward()
        assert [reference() for reference in old] == [None] * len(old)
    finally:
        gc.enable()


def test_accumulation_averages_all_micro_batches_in_the_last_backward() -> None:
    def train(rank: Rank) -> dict[str, Any]:
        model = mlp()
        sync = GradientSync(model, group=rank.group)
        for _ in range(2):  # the second time with gradients that were views
            model.zero_grad()
            for micro in range(3):
                if micro < 2:
                    with sync.no_sync():
                        loss_of(model, batch(rank.rank, micro)).backward()
                else:
                    loss_of(model, batch(rank.rank, micro)).backward()
        sync.close()
        return gradients(model)

    reference = mlp()
    for micro in range(3):
        loss_of(reference, torch.cat([batch(r, micro) for r in range(2)])).backward()
    for mine in run_ranks(train, 2):
        assert_matches(mine, gradients(reference))


def test_no_sync_is_left_by_an_exception() -> None:
    model = mlp()
    sync = GradientSync(model)
    with pytest.raises(ValueError, match="user"), sync.no_sync():
        raise ValueError("user")
    assert sync._rounds.enabled


def test_several_backwards_equal_one_on_the_sum() -> None:
    def train(rank: Rank) -> dict[str, Any]:
        model = mlp()
        sync = GradientSync(model, plan="wfbp", group=rank.group)
        losses = [loss_of(model, batch(rank.rank, step)) for step in range(3)]
        for loss in losses:
            loss.backward()
        sync.close()
        return gradients(model)

    reference = mlp()
    joined = [torch.cat([batch(r, step) for r in range(2)]) for step in range(3)]
    torch.stack([loss_of(reference, x) for x in joined]).sum().backward()
    for mine in run_ranks(train, 2):
        assert_matches(mine, gradients(reference))


def test_wait_in_update_gives_the_same_weights_as_wait_in_backward() -> None:
    def train(attached: bool) -> Callable[[Rank], torch.Tensor]:
        def body(rank: Rank) -> torch.Tensor:
            model = mlp()
            sync = GradientSync(model, plan="wfbp", group=rank.group)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            if attached:
                sync.attach(optimizer)
                assert sync.plan.wait == "update"
            for step in range(4):
                optimizer.zero_grad()
                for micro in range(2):
                    loss_of(model, batch(rank.rank, 10 * step + micro)).backward()
                norm = sync.clip_grad_norm_(0.5)
                assert norm > 0
                optimizer.step()
            sync.close()
            return weights(model)

        return body

    late, early = run_ranks(train(True), 2), run_ranks(train(False), 2)
    assert torch.equal(late[0], late[1])
    assert torch.equal(late[0], early[0])


def test_three_backwards_while_a_delayed_collective_is_in_flight() -> None:
    """The second and third backward add to buckets whose average has not come back yet."""

    class Delayed:
        name = "native"
        wire: DenseWire = "float32"
        layout_invariant = False

        def __init__(self, inner: Any, rank: int) -> None:
            self.inner, self.rank = inner, rank

        def sum_(self, flat: torch.Tensor, divisor: int = 1) -> None:
            torch.ones(1).add_(1)
            _pause.wait(0.05 * (1 + self.rank))
            self.inner.sum_(flat, divisor)

        def begin(self, flat: torch.Tensor, divisor: int = 1) -> None:
            """Leaves it to sum_."""

    import threading

    _pause = threading.Event()

    def train(rank: Rank) -> dict[str, Any]:
        model = mlp()
        sync = GradientSync(model, plan="wfbp", group=rank.group)
        assert isinstance(sync._rounds.reducer, Reducer)
        for buffer in sync._rounds.reducer.buffers:
            buffer.collective = Delayed(buffer.collective, rank.rank)
        sync._rounds._keeper.learning = False
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sync.attach(optimizer)
        for step in range(3):
            loss_of(model, batch(rank.rank, step)).backward()
            assert sync._rounds.reducer.in_flight
        optimizer.step()
        sync.close()
        return gradients(model)

    reference = mlp()
    for step in range(3):
        loss_of(reference, torch.cat([batch(r, step) for r in range(2)])).backward()
    for mine in run_ranks(train, 2):
        assert_matches(mine, gradients(reference))


def test_named_plans_learn_the_order_in_which_gradients_become_ready() -> None:
    class Crossed(nn.Module):
        """Uses its layers in another order than it registers them."""

        def __init__(self) -> None:
            super().__init__()
            self.second, self.first = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.second(self.first(x).relu())
            return out

    def train(rank: Rank) -> tuple[list[str], list[str]]:
        model = Crossed()
        sync = GradientSync(model, plan="wfbp", group=rank.group)
        before = [name for bucket in sync.plan.reduce for name in bucket.gradients]
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        after = [name for bucket in sync.plan.reduce for name in bucket.gradients]
        sync.close()
        return before, after

    for before, after in run_ranks(train, 2):
        assert before[0].startswith("first")
        assert after[0].startswith("second") and after[-1].startswith("first")


def test_a_given_plan_is_the_plan_that_runs() -> None:
    names = tuple(name for name, _ in mlp().named_parameters())
    sizes = {n: p.numel() * 8 for n, p in mlp().named_parameters()}
    cut = [names[3:], names[:3]]
    plan = Plan(
        planner="by hand",
        reduce=tuple(Bucket(gradients=part, bytes=sum(sizes[n] for n in part)) for part in cut),
    )

    def train(rank: Rank) -> tuple[Plan, list[int]]:
        model = mlp()
        sync = GradientSync(model, plan=plan, group=rank.group)
        for step in range(2):
            loss_of(model, batch(rank.rank, step)).backward()
        times = sync.timeline.buckets
        sync.close()
        assert times[0].end_seconds <= times[1].start_seconds, "buckets go one after the other"
        return sync.plan, [t.bytes for t in times]

    for used, sent in run_ranks(train, 2):
        assert used == plan
        assert sent == [bucket.bytes for bucket in plan.reduce]


def test_a_plan_for_another_model_is_refused() -> None:
    plan = Plan(planner="x", reduce=(Bucket(gradients=("other",), bytes=4),))
    with pytest.raises(PlanError, match="'other'"):
        GradientSync(mlp(), plan=plan)


def test_a_plan_beyond_the_engine_is_refused() -> None:
    names = tuple(name for name, _ in mlp().named_parameters())
    num_bytes = sum(param.numel() * 4 for param in mlp().parameters())
    in_full = Bucket(gradients=names, bytes=num_bytes, collective="hitopk")
    with pytest.raises(PlanError, match="'hitopk' sends a share of the elements, not all of them"):
        GradientSync(mlp(), plan=Plan(planner="x", reduce=(in_full,)))
    by_torus = Bucket(gradients=names, bytes=num_bytes, collective="torus")
    gathers = Plan(planner="x", wait="forward", reduce=(by_torus,), gather=(by_torus,))
    with pytest.raises(PlanError, match="Bucket 0 of the plan travels by 'torus'"):
        GradientSync(mlp(), plan=gathers)
    native = Bucket(gradients=names, bytes=num_bytes)
    with pytest.raises(PlanError, match="in the next forward, which the engine cannot do yet"):
        GradientSync(mlp(), plan=Plan(planner="x", wait="forward", reduce=(native,)))


def test_an_unknown_planner_is_refused() -> None:
    with pytest.raises(PlanError, match="no planner 'dpp'"):
        GradientSync(mlp(), plan="dpp")


def test_close_removes_every_trace_and_the_model_lives_on() -> None:
    model = mlp()
    sync = GradientSync(model)
    loss_of(model, batch(0)).backward()
    sync.close()
    sync.close()
    for param in model.parameters():
        assert not param._backward_hooks
        assert not param._post_accumulate_grad_hooks
    model.zero_grad()
    loss_of(model, batch(0)).backward()
    assert sync.timeline.buckets, "the last timeline stays readable"


def test_the_wrapped_model_is_copied_pickled_and_saved_like_any_other() -> None:
    model = mlp()
    sync = GradientSync(model)
    loss_of(model, batch(0)).backward()
    twin = copy.deepcopy(model)
    thawed = pickle.loads(pickle.dumps(model))
    assert list(model.state_dict()) == list(mlp().state_dict())
    for other in (twin, thawed):
        assert torch.equal(weights(other), weights(model))
        other.zero_grad()
        loss_of(other, batch(0, 1)).backward()
    sync.close()


def test_an_engine_that_nobody_keeps_averages_all_the_same() -> None:
    def train(rank: Rank) -> Gradients:
        model = mlp(seed=rank.rank)
        GradientSync(model, group=rank.group)
        gc.collect()
        loss_of(model, batch(rank.rank)).backward()
        return gradients(model)

    reference = mlp()
    loss_of(reference, torch.cat([batch(r) for r in range(2)])).backward()
    for mine in run_ranks(train, 2):
        assert_matches(mine, gradients(reference))


def test_a_model_takes_one_engine_at_a_time() -> None:
    model = mlp()
    sync = GradientSync(model)
    with pytest.raises(SlipstreamError, match="has a GradientSync already"):
        GradientSync(model)
    sync.close()
    GradientSync(model)


def test_buffers_of_a_model_that_is_gone_are_an_error() -> None:
    sync = GradientSync(mlp())
    gc.collect()
    with pytest.raises(SlipstreamError, match="does not exist any more"):
        sync.sync_buffers()


def test_a_model_on_the_meta_device_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="meta"):
        GradientSync(nn.Linear(2, 2, device="meta"))


def test_unknown_names_in_ignore_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="'wieght'"):
        GradientSync(mlp(), ignore=["wieght"])


def test_ignored_parameters_stay_the_ranks_own() -> None:
    def train(rank: Rank) -> dict[str, Any]:
        model = mlp(seed=rank.rank)
        sync = GradientSync(model, ignore=["0.weight"], group=rank.group)
        loss_of(model, batch(rank.rank)).backward()
        sync.close()
        return gradients(model)

    zero, one = run_ranks(train, 2)
    assert not torch.equal(zero["0.weight"], one["0.weight"])
    assert torch.equal(zero["3.weight"], one["3.weight"])


def test_a_differentiable_backward_is_refused_by_name() -> None:
    model = mlp()
    sync = GradientSync(model)
    with pytest.raises(
        UnsupportedModel, match=r"weight' was made with create_graph|bias' was made"
    ):
        loss_of(model, batch(0)).backward(create_graph=True)
    with pytest.raises(SlipstreamError, match="create_graph"):
        sync.wait()
    model.zero_grad()
