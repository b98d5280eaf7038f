"""A pipelined training is the training of the other plans, however its steps are put."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pipelined import Trainee, assert_same, pipelined_plan
from ranks import Rank, run_ranks
from slipstream.errors import SlipstreamError
from small_models import batch, loss_of, weights

Run = Callable[[Trainee], object]


def both(run: Run, world_size: int = 2, **options: object) -> None:
    """`run` leaves the same weights under a plan that gathers and under one that does not."""

    def body(rank: Rank, pipelined: bool) -> torch.Tensor:
        trainee = Trainee(rank, pipelined=pipelined, **options)  # type: ignore[arg-type]
        run(trainee)
        return trainee.end()

    plain = run_ranks(lambda rank: body(rank, False), world_size)
    assert_same(run_ranks(lambda rank: body(rank, True), world_size), plain[0])


@pytest.mark.parametrize("buckets", [(1, 1), (2, 3), (9, 9)], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_weights_are_those_of_other_plans(world_size: int, buckets: tuple[int, int]) -> None:
    def run(trainee: Trainee) -> None:
        schedule = torch.optim.lr_scheduler.LambdaLR(trainee.optimizer, lambda n: 1 / (1 + n))
        for step in range(5):
            trainee.train(step)
            schedule.step()  # the rate belongs to the step that was taken before

    both(run, world_size, buckets=buckets)


def test_a_step_returns_at_once_and_its_update_comes_with_the_next_forward() -> None:
    def body(rank: Rank) -> None:
        trainee = Trainee(rank, pipelined=True)
        model, seen = trainee.model, list[torch.Tensor]()
        trainee.train(0)
        before = weights(model)
        assert all(p.grad is None for p in model.parameters())
        trainee.train(1)
        middle = weights(model)
        assert not torch.equal(before, middle)
        last = list(model.children())[3]
        hook = last.register_forward_pre_hook(lambda *_: seen.append(weights(last)))
        loss_of(model, batch(rank.rank, 2))
        hook.remove()
        assert not torch.equal(seen[0], middle[-21:]), "updated before its use"
        assert all(p.grad is not None for p in model.parameters()), "readable after the update"
        trainee.end()

    run_ranks(body, 2)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("place", ["before forward", "before backward", "after step", "never"])
def test_gradients_that_were_stepped_with_are_gone_wherever_they_are_cleared(
    place: str, set_to_none: bool
) -> None:
    def run(trainee: Trainee) -> None:
        optimizer = trainee.optimizer
        for step in range(4):
            if place == "before forward":
                optimizer.zero_grad(set_to_none)
            loss = loss_of(trainee.model, batch(trainee.rank, step))
            if place == "before backward":
                optimizer.zero_grad(set_to_none)
            if place == "never" and trainee.sync.plan.gather is None:
                optimizer.zero_grad()  # other plans would add to the gradients of the last step
            loss.backward()
            optimizer.step()
            if place == "after step":
                optimizer.zero_grad(set_to_none)

    both(run)


def test_accumulated_micro_batches_are_averaged_in_the_last_backward() -> None:
    def run(trainee: Trainee) -> None:
        for step in range(3):
            trainee.optimizer.zero_grad()
            with trainee.sync.no_sync():
                trainee.backward(10 + step)
                trainee.backward(20 + step)
            trainee.backward(step)
            trainee.optimizer.step()

    both(run)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_scales_the_pieces_and_returns_one_norm_everywhere(norm_type: float) -> None:
    def body(rank: Rank, pipelined: bool) -> tuple[torch.Tensor, torch.Tensor]:
        trainee = Trainee(rank, pipelined=pipelined, check_finite=True)
        norms = []
        for step in range(4):
            trainee.optimizer.zero_grad()
            trainee.backward(step)
            assert trainee.sync.nonfinite() is None
            norms.append(trainee.sync.clip_grad_norm_(0.3 if step % 2 else 1e9, norm_type))
            if step == 3:
                norms.append(trainee.sync.clip_grad_norm_(torch.inf))
                norms.append(trainee.sync.clip_grad_norm_(0.1, norm_type))
            trainee.optimizer.step()
        return trainee.end(), torch.stack(norms)

    plain = run_ranks(lambda rank: body(rank, False), 3)[0]
    found = run_ranks(lambda rank: body(rank, True), 3)
    for which in (0, 1):
        assert_same([outcome[which] for outcome in found], plain[which])


def test_a_step_with_nan_is_told_on_all_ranks_and_can_be_left_out() -> None:
    def run(trainee: Trainee) -> None:
        for step in range(4):
            trainee.optimizer.zero_grad()
            bad = step == 2 and trainee.rank == 1
            (
                loss_of(trainee.model, batch(trainee.rank, step)) * (torch.nan if bad else 1)
            ).backward()
            found = trainee.sync.nonfinite()
            assert (found is not None) == (step == 2)
            if found is None:
                trainee.optimizer.step()
            else:
                assert found.ranks == (1,) and found.parameter == "3.bias"

    both(run, check_finite=True)


def test_ranks_with_unequal_numbers_of_batches() -> None:
    def run(trainee: Trainee) -> None:
        batches = [batch(trainee.rank, step) for step in range(3 + 2 * trainee.rank)]
        for x, last in trainee.sync.uneven(batches, window=2):
            if x is not None:
                loss_of(trainee.model, x).backward()
            if last:
                trainee.optimizer.step()
                trainee.optimizer.zero_grad()

    both(run)


@pytest.mark.parametrize("steps", [(0, 1), (0, 1, 2)])
def test_a_second_backward_without_a_step_says_what_to_do(steps: tuple[int, ...]) -> None:
    def body(rank: Rank) -> torch.Tensor:
        trainee = Trainee(rank, pipelined=True)
        trainee.train(*steps)
        trainee.optimizer.zero_grad()
        trainee.backward(7)
        with pytest.raises(SlipstreamError, match=r"call optimizer\.step\(\), or"):
            trainee.backward(8)
        trainee.optimizer.zero_grad()  # drops them, and training goes on
        trainee.train(9)
        return trainee.end()

    def reference(rank: Rank) -> torch.Tensor:
        trainee = Trainee(rank, pipelined=False)
        trainee.train(*steps, 9)
        return trainee.end()

    assert_same(run_ranks(body, 2), run_ranks(reference, 2)[0])


def test_after_wait_averages_are_readable_and_further_gradient_adds_to_them() -> None:
    def run(trainee: Trainee) -> None:
        trainee.train(0, 1)
        trainee.optimizer.zero_grad()
        trainee.backward(2)
        trainee.sync.wait()
        assert all(p.grad is not None for p in trainee.model.parameters())
        trainee.backward(3)
        trainee.optimizer.step()
        trainee.train(4)

    both(run)


def test_a_forward_that_fails_half_way_leaves_a_training_that_goes_on() -> None:
    def run(trainee: Trainee) -> None:
        trainee.train(0, 1)

        def fail(*_: object) -> None:
            raise KeyError("half way")

        hook = trainee.model[2].register_forward_pre_hook(fail)  # type: ignore[index]
        with pytest.raises(KeyError):
            trainee.backward(9)
        hook.remove()
        trainee.train(2, 3)

    both(run)


def test_plans_are_changed_between_steps_with_everything_up_to_date() -> None:
    def body(rank: Rank) -> torch.Tensor:
        trainee = Trainee(rank, pipelined=True, buckets=(1, 2))
        trainee.train(0, 1)
        one_bucket = pipelined_plan(trainee.model, 9, 9)
        trainee.sync.use_plan(one_bucket)
        trainee.train(2, 3)
        trainee.sync.use_plan(one_bucket.model_copy(update={"gather": None, "wait": "update"}))
        trainee.train(4, 5)
        assert trainee.sync.plan.wait == "update"
        trainee.sync.use_plan(one_bucket)
        trainee.train(6, 7)
        assert trainee.sync.plan == one_bucket
        return trainee.end()

    def reference(rank: Rank) -> torch.Tensor:
        trainee = Trainee(rank, pipelined=False)
        trainee.train(*range(8))
        return trainee.end()

    assert_same(run_ranks(body, 2), run_ranks(reference, 2)[0])


def test_a_parameter_that_is_frozen_and_unfrozen_between_steps() -> None:
    def run(trainee: Trainee) -> None:
        for step in range(6):
            trainee.model[0].weight.requires_grad_(step not in (2, 3))  # type: ignore[index]
            trainee.train(step)

    both(run)


def test_the_timeline_shows_both_halves_of_the_last_round_that_is_over() -> None:
    def body(rank: Rank) -> None:
        trainee = Trainee(rank, pipelined=True, buckets=(2, 3))
        trainee.train(0)
        assert trainee.sync.timeline.buckets == ()
        trainee.train(1)
        timeline = trainee.sync.timeline
        assert (len(timeline.buckets), len(timeline.gathers)) == (3, 2)
        moments = [b.end_seconds for b in (*timeline.buckets, *timeline.gathers)]
        assert moments == sorted(moments) and timeline.exposed_seconds > 0
        assert sum(b.bytes for b in timeline.gathers) == sum(b.bytes for b in timeline.buckets)
        trainee.end()

    run_ranks(body, 2)
