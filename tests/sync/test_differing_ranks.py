"""Ranks that differ are told apart before anything is broadcast (case 21); lost ones are named."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ranks import Rank, run_ranks, run_ranks_settled
from slipstream.errors import RankFailure, RanksDiffer, SlipstreamError
from slipstream.sync import GradientSync
from slipstream.sync.channel import ThreadChannel
from small_models import batch, loss_of, mlp, reseeded, weights


def renamed() -> nn.Module:
    model = nn.Module()
    for name, layer in mlp().named_children():
        model.add_module({"0": "first"}.get(name, name), layer)
    return model


def swapped() -> nn.Module:
    layers = list(mlp().named_children())
    model = nn.Module()
    for name, layer in [layers[3], *layers[1:3], layers[0]]:
        model.add_module(name, layer)
    return model


def extra_layer() -> nn.Module:
    return mlp().append(nn.Linear(3, 3).double())


def wider() -> nn.Module:
    model = mlp()
    model[3] = nn.Linear(6, 4).double()
    return model


DIFFERENCES: list[tuple[str, Callable[[], nn.Module], dict[str, object], str]] = [
    ("an extra layer", extra_layer, {}, "'4.weight' exists on rank 1 and not on rank 0"),
    ("all frozen", lambda: mlp().requires_grad_(False), {}, "trainable of parameter '0.weight'"),
    (
        "one ignored more",
        mlp,
        {"ignore": ["2.bias"]},
        "'2.bias' exists on rank 0 and not on rank 1",
    ),
    ("another name", renamed, {}, "'0.weight' exists on rank 0 and not on rank 1"),
    ("another order", swapped, {}, "number 0 is '0.weight' on rank 0 and '3.weight' on rank 1"),
    ("another shape", wider, {}, "shape of parameter '3.weight' is [3, 6] on rank 0 and [4, 6]"),
    ("another dtype", lambda: mlp().float(), {}, "dtype of parameter '0.weight' is float64"),
    ("another planner", mlp, {"plan": "wfbp"}, "planner 'ddp' and options {} on rank 0"),
    ("another check", mlp, {"check_finite": True}, "check_finite=False on rank 0"),
]


@pytest.mark.parametrize(
    ("build", "settings", "words"), [d[1:] for d in DIFFERENCES], ids=[d[0] for d in DIFFERENCES]
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_learns_the_first_difference_before_weights_change(
    build: Callable[[], nn.Module], settings: dict[str, object], words: str, world_size: int
) -> None:
    untouched: dict[int, bool] = {}

    def wrap(rank: Rank) -> None:
        different = rank.rank == 1
        model = reseeded(build() if different else mlp(), rank.rank)
        before = weights(model)
        try:
            GradientSync(model, group=rank.group, **(settings if different else {}))  # type: ignore[arg-type]
        finally:
            untouched[rank.rank] = torch.equal(weights(model), before)

    for outcome in run_ranks_settled(wrap, world_size):
        assert isinstance(outcome, RanksDiffer), outcome
        assert words in str(outcome)
    assert all(untouched.values()) and len(untouched) == world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_never_wraps_is_named(world_size: int) -> None:
    def wrap(rank: Rank) -> None:
        if rank.rank == world_size - 1:
            rank.hold(8.0)
        else:
            GradientSync(mlp(), group=rank.group, timeout_seconds=1.0)

    outcomes = run_ranks_settled(wrap, world_size, timeout_seconds=1.0)
    for outcome in outcomes[:-1]:
        assert isinstance(outcome, RankFailure)
        assert "while comparing models" in str(outcome)
        assert f"no answer from rank {world_size - 1}" in str(outcome)


@pytest.mark.parametrize("attached", [False, True])
def test_a_rank_that_stops_coming_is_named_with_step_and_bucket(attached: bool) -> None:
    def train(rank: Rank) -> None:
        model = mlp()
        sync = GradientSync(model, plan="wfbp", group=rank.group, timeout_seconds=1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if attached:
            sync.attach(optimizer)
        for step in range(4):
            if rank.rank == 2 and step == 3:
                rank.hold(8.0)
                return
            optimizer.zero_grad()
            loss_of(model, batch(rank.rank, step)).backward()
            optimizer.step()

    outcomes = run_ranks_settled(train, 3, timeout_seconds=1.0)
    assert outcomes[2] is None
    for outcome in outcomes[:2]:
        assert isinstance(outcome, RankFailure), outcome
        assert "averaging bucket 0 of step 4" in str(outcome)
        assert "no answer from rank 2" in str(outcome)


def test_an_error_of_one_rank_is_what_the_others_report() -> None:
    """A refused gradient on rank 1 reaches rank 0 as the reason, not as a broken connection."""

    def train(rank: Rank) -> None:
        model = mlp()
        sync = GradientSync(model, plan="single", group=rank.group, timeout_seconds=1.0)
        loss_of(model, batch(rank.rank)).backward(create_graph=rank.rank == 1)
        assert sync.rank == 0

    zero, one = run_ranks_settled(train, 2, timeout_seconds=1.0)
    assert isinstance(one, SlipstreamError) and "create_graph" in str(one)
    assert isinstance(zero, SlipstreamError) and "because of rank 1" in str(zero)
    assert "create_graph" in str(zero)


@pytest.mark.usefixtures("brief_reports")
def test_after_a_failure_every_later_use_raises_it_at_once() -> None:
    def train(rank: Rank) -> list[str]:
        model = mlp()
        sync = GradientSync(model, plan="wfbp", group=rank.group, timeout_seconds=1.0)
        if rank.rank == 1:
            rank.hold(8.0)
            return []
        errors = []
        for attempt in range(2):
            with pytest.raises(RankFailure) as caught:
                loss_of(model, batch(0, attempt)).backward()
            errors.append(str(caught.value))
        with pytest.raises(RankFailure):
            sync.wait()
        sync.close()
        return errors

    zero, _ = run_ranks_settled(train, 2, timeout_seconds=1.0)
    assert isinstance(zero, list), zero
    assert zero[0] == zero[1]


def test_closing_ends_the_channel_and_so_does_forgetting() -> None:
    def train(rank: Rank) -> list[threading.Thread]:
        threads = []
        for closed in (True, False):
            model = mlp()
            sync = GradientSync(model, group=rank.group)
            loss_of(model, batch(rank.rank)).backward()
            assert isinstance(sync._channel, ThreadChannel)
            sync._channel.submit(lambda: None).wait(5.0)
            assert sync._channel._thread is not None
            threads.append(sync._channel._thread)
            if closed:
                sync.close()
        return threads

    ranks_threads = run_ranks(train, 2)
    gc.collect()
    for thread in [thread for threads in ranks_threads for thread in threads]:
        thread.join(5.0)
        assert not thread.is_alive()


def test_closing_ends_the_channel_also_where_waiting_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def body(rank: Rank) -> bool:
        model = mlp()
        sync = GradientSync(model, group=rank.group)
        loss_of(model, batch(rank.rank)).backward()

        def fail() -> None:
            raise RankFailure("Rank 7 is gone.")

        monkeypatch.setattr(sync, "wait", fail)
        with pytest.raises(RankFailure, match="Rank 7 is gone"):
            sync.close()
        channel = sync._channel
        assert isinstance(channel, ThreadChannel)
        return channel._thread is None

    assert run_ranks(body, 2) == [True, True]
