"""One step at a time: equal to one process on the joined batch, by one averaging rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ranks import Rank, run_ranks
from slipstream.cluster import Cluster
from slipstream.data import Batch
from slipstream.optim.schedules import Schedule
from slipstream.sync import GradientSync
from slipstream.train.distributed import Job
from slipstream.train.recipe.settings import TrainSettings
from slipstream.train.record.tally import Tally
from slipstream.train.step import Stepper, StepResult, stream_seed, windows
from small_models import assert_matches, gradients, reseeded
from training_runs import job_of

CPU = torch.device("cpu")
SCHEDULE = Schedule(kind="cosine", peak=0.2, num_updates=6, warmup_updates=2)


def classifier() -> nn.Module:
    """5 features -> 3 classes, in 64 bits."""
    return reseeded(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double(), seed=1)


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """`count` samples that depend on the seed alone: float64 [count, 5], int64 [count]."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, 5, dtype=torch.float64, generator=generator),
        torch.randint(0, 3, (count,), generator=generator),
    )


def as_batch(images: Tensor, labels: Tensor, step: int = 0, micro_step: int = 0) -> Batch:
    """A batch as the input pipeline would hand it over."""
    return Batch(images, labels, 0, step, micro_step, 0.0, 0.0)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the loop, with everything on."""
    return torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2, fused=True
    )


def stepper(model: nn.Module, rank: Rank | None, **settings: Any) -> tuple[Stepper, GradientSync]:
    """A Stepper on one rank; `settings` are those of the recipe's train table."""
    group = job_of(rank).gradient_group if rank else None
    sync = GradientSync(model, group=group, check_finite=True)
    train = TrainSettings(**settings)
    return Stepper(model, sgd(model), sync, SCHEDULE, train, device=CPU), sync


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_six_steps_equal_one_process_on_the_joined_batch(
    world_size: int, accumulation: int, clip: float
) -> None:
    def share(step: int, rank: int) -> list[Batch]:
        images, labels = samples(24, seed=step)
        parts = zip(images.chunk(accumulation), labels.chunk(accumulation), strict=True)
        return [
            as_batch(x.chunk(world_size)[rank], y.chunk(world_size)[rank], step, micro_step)
            for micro_step, (x, y) in enumerate(parts)
        ]

    def train(rank: Rank) -> list[Tensor]:
        model = classifier()
        step_of, sync = stepper(model, rank, label_smoothing=0.1, clip_grad_norm=clip)
        for step in range(6):
            step_of.run(share(step, rank.rank), step=step, update=step)
        sync.close()
        return [parameter.detach().clone() for parameter in model.parameters()]

    reference = classifier()
    optimizer = sgd(reference)
    for step in range(6):
        images, labels = samples(24, seed=step)
        optimizer.zero_grad()
        F.cross_entropy(reference(images), labels, label_smoothing=0.1).backward()
        if clip:
            nn.utils.clip_grad_norm_(reference.parameters(), clip)
        for group in optimizer.param_groups:
            group["lr"] = SCHEDULE.rate(step)
        optimizer.step()
    outcomes = run_ranks(train, world_size)
    for outcome in outcomes:
        for mine, first, right in zip(outcome, outcomes[0], reference.parameters(), strict=True):
            assert torch.equal(mine, first)
            torch.testing.assert_close(mine, right.detach(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("counts", [[[3], [1]], [[3, 2], [1, 4]]])
def test_gradients_and_the_logged_loss_follow_one_rule(counts: list[list[int]]) -> None:
    """Case 20: the mean over ranks of the means over micro-batches of their local means."""

    def part(rank: int, micro_step: int) -> tuple[Tensor, Tensor]:
        return samples(counts[rank][micro_step], seed=10 * rank + micro_step)

    def train(rank: Rank) -> tuple[dict[str, Tensor | None], float]:
        model = classifier()
        step_of, sync = stepper(model, rank)
        window = [
            as_batch(*part(rank.rank, micro_step), 0, micro_step)
            for micro_step in range(len(counts[rank.rank]))
        ]
        result = step_of.run(window, step=0, update=0)
        tally = Tally(CPU)
        tally.add(
            loss=result.loss,
            correct=result.correct,
            samples=result.samples,
            seconds=1.0,
            hidden_seconds=0.0,
            exposed_seconds=0.0,
            input_wait_seconds=0.0,
        )
        totals = tally.share(Job(rank.rank, Cluster((2,)), group=rank.group))
        assert totals.samples == sum(sum(of_rank) for of_rank in counts)
        sync.close()
        return gradients(model), totals.mean_loss

    model = classifier()
    losses = [
        torch.stack(
            [
                F.cross_entropy(model(x), y)
                for x, y in (part(rank, micro_step) for micro_step in range(len(counts[rank])))
            ]
        ).mean()
        for rank in range(2)
    ]
    loss = torch.stack(losses).mean()
    loss.backward()
    for mine, logged in run_ranks(train, 2):
        assert_matches(mine, gradients(model))
        assert logged == pytest.approx(float(loss.detach()), rel=1e-6)


def test_the_last_incomplete_window_counts_what_it_holds() -> None:
    """Case S1: 10 micro-batches, window 4; the last update is the mean of its two."""
    model, reference = classifier(), classifier()
    step_of, sync = stepper(model, None)
    parts = [samples(4, seed) for seed in range(10)]
    batches = [as_batch(x, y, index // 4, index % 4) for index, (x, y) in enumerate(parts)]
    results = [
        step_of.run(window, step=step, update=step)
        for step, window in enumerate(windows(batches, 4))
    ]
    sync.close()
    optimizer = sgd(reference)
    for step, indices in enumerate(([0, 1, 2, 3], [4, 5, 6, 7], [8, 9])):
        optimizer.zero_grad()
        joined = [torch.cat([parts[index][which] for index in indices]) for which in (0, 1)]
        F.cross_entropy(reference(joined[0]), joined[1]).backward()
        for group in optimizer.param_groups:
            group["lr"] = SCHEDULE.rate(step)
        optimizer.step()
    assert [result.learning_rate for result in results] == [SCHEDULE.rate(u) for u in range(3)]
    assert [result.samples for result in results] == [16, 16, 8]
    for mine, right in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-13)


@given(st.integers(0, 30), st.integers(1, 7))
def test_windows_keep_every_batch_once_and_in_order(num_batches: int, size: int) -> None:
    images, labels = samples(1, 0)
    batches = [
        as_batch(images, labels, index // size, index % size) for index in range(num_batches)
    ]
    grouped = list(windows(batches, size))
    assert [batch for window in grouped for batch in window] == batches
    assert all(len(window) == size for window in grouped[:-1])
    assert all({batch.step for batch in window} == {step} for step, window in enumerate(grouped))


def test_a_window_does_not_wait_for_the_batch_after_it() -> None:
    images, labels = samples(1, 0)
    taken: list[int] = []

    def source() -> Any:
        for index in range(4):
            taken.append(index)
            yield as_batch(images, labels, index // 2, index % 2)

    next(windows(source(), 2))
    assert taken == [0, 1]


def test_random_streams_differ_between_steps_and_ranks_and_repeat() -> None:
    """Case S9, for layers such as dropout."""
    seeds = [
        stream_seed(seed, step, rank) for seed in (0, 1) for step in range(50) for rank in range(8)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)

    def dropped(step: int) -> Tensor:
        model = nn.Sequential(nn.Dropout(0.5), classifier())
        step_of, sync = stepper(model, None)
        step_of.run([as_batch(*samples(8, 0))], step=step, update=0)
        sync.close()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    assert torch.equal(dropped(3), dropped(3))
    assert not torch.equal(dropped(3), dropped(4))


class Moving(nn.Module):
    """A classifier whose forward moves a buffer in place and assigns another anew."""

    mean: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = classifier()
        self.register_buffer("mean", torch.zeros(5, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, images: Tensor) -> Tensor:
        self.mean.lerp_(images.mean(dim=0), 0.1)
        self.calls = self.calls + 1
        logits: Tensor = self.layers(images)
        return logits


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_skipped_step_changes_nothing_but_says_so(value: float, world_size: int) -> None:
    """Cases 25 and 26: weights, momentum, buffers, rate stay; the next step is clean."""
    bad_rank = world_size - 1

    def train(rank: Rank) -> tuple[StepResult, bool, bool]:
        model, twin = Moving(), Moving()
        step_of, sync = stepper(model, rank, on_nonfinite="skip", clip_grad_norm=1.0)
        good = [as_batch(*samples(4, seed=rank.rank + 10 * step)) for step in range(3)]
        images = good[1].images.clone()
        if rank.rank == bad_rank:
            images[0, 0] = value
        bad = as_batch(images, good[1].labels, 1)
        step_of.run([good[0]], step=0, update=0)
        before = state_of(model, step_of)
        result = step_of.run([bad], step=1, update=1)
        unchanged = equal(before, state_of(model, step_of))
        step_of.run([good[2]], step=2, update=1)
        # A twin that never saw the bad batch ends the same.
        twin_step_of, twin_sync = stepper(
            twin, twin_rank(rank), on_nonfinite="skip", clip_grad_norm=1.0
        )
        twin_step_of.run([good[0]], step=0, update=0)
        twin_step_of.run([good[2]], step=1, update=1)
        same = equal(state_of(model, step_of), state_of(twin, twin_step_of))
        sync.close()
        twin_sync.close()
        return result, unchanged, same

    for result, unchanged, same in run_ranks(train, world_size):
        assert result.nonfinite is not None
        assert result.nonfinite.ranks == (bad_rank,)
        assert result.nonfinite.parameter in dict(Moving().named_parameters())
        assert unchanged and same


def twin_rank(rank: Rank) -> Rank:
    """The same rank with a store prefix of its own, for a second group."""
    from torch.distributed.distributed_c10d import PrefixStore

    return Rank(rank.rank, rank.world_size, rank.group, PrefixStore("twin", rank.store))


def state_of(model: nn.Module, step_of: Stepper) -> list[Tensor]:
    """Copies of weights, buffers and momentum."""
    optimizer = step_of.optimizer
    momentum = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    return [t.detach().clone() for t in (*model.state_dict().values(), *momentum)]


def equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether all tensors are equal bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
