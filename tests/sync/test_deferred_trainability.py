"""Parameters frozen and unfrozen between steps: a pipelined training is the plain one's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipelined import MakeOptimizer, Trainee, assert_same, sgd
from ranks import Rank, run_ranks, run_ranks_settled
from slipstream.errors import RanksDiffer, SlipstreamError
from small_models import batch, loss_of

Trainable = Callable[[int, int], bool]
"""Whether parameter number `index` of the model is trained in step number `step`."""

COURSES: dict[str, Trainable] = {
    "the first of the forward": lambda index, step: index != 0 or step not in (2, 3),
    "the last of the forward": lambda index, step: index < 4 or step not in (2, 3),
    "a layer after the other": lambda index, step: index // 2 <= step % 3,
    "every other one, in turn": lambda index, step: index % 2 == step % 2,
    "all but one": lambda index, step: index == 3 or step < 2 or step > 4,
    "every second step": lambda index, step: index != 2 or step % 2 == 0,
    "only from the third step on": lambda index, step: index > 1 or step >= 2,
    "never again": lambda index, step: index != 1 or step < 2,
}
PLACES = ("before zero_grad", "before forward", "before step", "after step", "never cleared")
NUM_STEPS = 7


def toggled(model: nn.Module, trainable: Trainable, step: int) -> None:
    for index, param in enumerate(model.parameters()):
        param.requires_grad_(trainable(index, step))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def course(trainee: Trainee, trainable: Trainable, place: str, clip: bool) -> None:
    model, optimizer = trainee.model, trainee.optimizer
    toggled(model, trainable, 0)
    clears = place != "never cleared" or trainee.sync.plan.gather is None
    for step in range(NUM_STEPS):
        if place in ("before zero_grad", "never cleared"):
            toggled(model, trainable, step)
        if place != "after step" and clears:
            optimizer.zero_grad()
        if place == "before forward":
            toggled(model, trainable, step)
        trainee.backward(step)
        if place == "before step":
            toggled(model, trainable, step + 1)
        if clip:
            trainee.sync.clip_grad_norm_(0.3)
        optimizer.step()
        if place == "after step":
            toggled(model, trainable, step + 1)
            optimizer.zero_grad()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", COURSES)
def test_weights_are_those_of_the_plain_engine(name: str, place: str) -> None:
    optimizer: MakeOptimizer = sgd if place == "before forward" else adam

    def body(rank: Rank, pipelined: bool) -> torch.Tensor:
        trainee = Trainee(rank, pipelined=pipelined, optimizer=optimizer, buckets=(2, 3))
        course(trainee, COURSES[name], place, clip=optimizer is adam)
        return trainee.end()

    plain = run_ranks(lambda rank: body(rank, False), 2)
    assert_same(run_ranks(lambda rank: body(rank, True), 2), plain[0], 1e-10)


@pytest.mark.parametrize("name", COURSES)
def test_switches_between_windows_of_accumulated_micro_batches(name: str) -> None:
    def run(trainee: Trainee) -> None:
        for step in range(NUM_STEPS):
            trainee.optimizer.zero_grad()
            toggled(trainee.model, COURSES[name], step)
            with trainee.sync.no_sync():
                trainee.backward(10 + step)
                trainee.backward(20 + step)
            trainee.backward(step)
            trainee.optimizer.step()

    both(run)


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_switch_inside_of_such_a_window_would_leave_ranks_with_gradients_of_their_own(
    pipelined: bool,
) -> None:
    def body(rank: Rank, cleared: bool) -> torch.Tensor:
        trainee = Trainee(rank, pipelined=pipelined, timeout_seconds=2.0)
        trainee.train(0, 1)
        trainee.optimizer.zero_grad()
        with trainee.sync.no_sync():
            trainee.backward(2)
        if cleared:
            trainee.optimizer.zero_grad(set_to_none=False)
        trainee.model.get_parameter("2.weight").requires_grad_(False)
        trainee.backward(3)
        trainee.optimizer.step()
        return trainee.end()

    for outcome in run_ranks_settled(lambda rank: body(rank, False), 2, timeout_seconds=2.0):
        assert isinstance(outcome, SlipstreamError)
        assert "Parameter '2.weight' was frozen while gradient" in str(outcome)
    one, two = run_ranks(lambda rank: body(rank, True), 2)
    assert torch.equal(one, two)


@pytest.mark.parametrize("between", ["flush", "wait", "evaluation", "state_dict", "left out"])
@pytest.mark.parametrize("name", ["a layer after the other", "every other one, in turn"])
def test_whatever_brings_parameters_up_to_date_between_the_switches(
    name: str, between: str
) -> None:
    def run(trainee: Trainee) -> None:
        for step in range(NUM_STEPS):
            trainee.optimizer.zero_grad()
            trainee.backward(step)
            if between == "wait":
                trainee.sync.wait()
            if between == "left out" and step in (2, 4):
                continue  # the step; zero_grad() drops the averages
            trainee.optimizer.step()
            toggled(trainee.model, COURSES[name], step + 1)
            if between == "flush":
                trainee.sync.flush()
            elif between == "evaluation":
                with torch.no_grad():
                    loss_of(trainee.model, batch(trainee.rank, 50))
            elif between == "state_dict":
                trainee.model.state_dict()

    both(run)


def both(run: Callable[[Trainee], None]) -> None:
    """`run` leaves the same weights under a plan that gathers and under one that does not."""

    def body(rank: Rank, pipelined: bool) -> torch.Tensor:
        trainee = Trainee(rank, pipelined=pipelined, buckets=(2, 3))
        run(trainee)
        return trainee.end()

    plain = run_ranks(lambda rank: body(rank, False), 2)
    assert_same(run_ranks(lambda rank: body(rank, True), 2), plain[0], 1e-10)


def test_ranks_that_freeze_differently_are_told_as_under_any_plan() -> None:
    def body(rank: Rank) -> None:
        trainee = Trainee(rank, pipelined=True, timeout_seconds=2.0)
        trainee.train(0, 1)
        if rank.rank == 1:
            toggled(trainee.model, COURSES["the last of the forward"], 2)
        trainee.train(2)
        trainee.end()

    outcomes = run_ranks_settled(body, 2, timeout_seconds=2.0)
    assert isinstance(outcomes[1], RanksDiffer), outcomes
    assert "Parameter '3.weight' is frozen on rank 1" in str(outcomes[1])
    assert "Parameter '3.weight'" in str(outcomes[0])
