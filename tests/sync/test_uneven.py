"""Unequal numbers of batches (case 18) and of samples (case 20)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ranks import Rank, run_ranks, run_ranks_settled
from slipstream.errors import RankFailure, SlipstreamError
from slipstream.sync import GradientSync
from small_models import Gradients, assert_matches, batch, gradients, loss_of, mlp, weights

COUNTS = [[5, 4], [3, 1, 4, 1], [0, 2]]


def joined(counts: list[int], mode: str, window: int) -> tuple[torch.Tensor, int]:
    """One process that does what the ranks should do together: weights and number of steps."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = 0
    for first in range(0, max(counts), window):
        held = [[i for i in range(first, first + window) if i < count] for count in counts]
        sizes = [len(part) for part in held]
        if mode == "stop" and min(sizes) < max(sizes):
            break
        optimizer.zero_grad()
        for rank, part in enumerate(held):
            for index in part:
                (loss_of(model, batch(rank, index)) / len(counts)).backward()
        optimizer.step()
        steps += 1
    return weights(model), steps


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("mode", ["stop", "join"])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("attached", [False, True])
def test_ranks_with_unequal_numbers_of_batches_end_together(
    counts: list[int], mode: str, window: int, attached: bool
) -> None:
    def train(rank: Rank) -> tuple[torch.Tensor, int]:
        model = mlp()
        sync = GradientSync(model, plan="wfbp", group=rank.group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if attached:
            sync.attach(optimizer)
        mine = [batch(rank.rank, index) for index in range(counts[rank.rank])]
        steps = 0
        for x, last in sync.uneven(mine, mode=mode, window=window):
            if x is not None:
                loss_of(model, x).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
        sync.close()
        return weights(model), steps

    expected, expected_steps = joined(counts, mode, window)
    outcomes = run_ranks(train, len(counts))
    for final, steps in outcomes:
        assert torch.equal(final, outcomes[0][0])
        torch.testing.assert_close(final, expected, rtol=1e-12, atol=1e-14)
        assert steps == expected_steps


@pytest.mark.usefixtures("brief_reports")
def test_one_batch_more_without_a_mode_is_an_error_within_the_limit() -> None:
    def train(rank: Rank) -> None:
        model = mlp()
        sync = GradientSync(model, group=rank.group, timeout_seconds=1.0)
        for step in range(2 - rank.rank):
            model.zero_grad()
            loss_of(model, batch(rank.rank, step)).backward()
        assert sync.rank == rank.rank
        rank.hold(5.0)

    zero, one = run_ranks_settled(train, 2, timeout_seconds=1.0)
    assert one is None
    assert isinstance(zero, RankFailure)
    assert "no answer from rank 1" in str(zero)


@pytest.mark.parametrize(
    ("settings", "words"), [({"mode": "wait"}, "no mode 'wait'"), ({"window": 0}, "window is 0")]
)
def test_wrong_settings_for_uneven_batches_are_refused(
    settings: dict[str, object], words: str
) -> None:
    sync = GradientSync(mlp())
    with pytest.raises(SlipstreamError, match=words):
        next(sync.uneven([batch(0)], **settings))  # type: ignore[arg-type]


def test_leaving_the_loop_early_switches_averaging_on_again() -> None:
    model = mlp()
    sync = GradientSync(model)
    loop = sync.uneven([batch(0), batch(0, 1)], window=2)
    next(loop)
    loop.close()  # type: ignore[attr-defined]
    loss_of(model, batch(0)).backward()
    assert sync.timeline.buckets


def regression() -> nn.Linear:
    layer = nn.Linear(4, 1).double()
    nn.init.constant_(layer.weight, 0.5)
    nn.init.constant_(layer.bias, 0.1)
    return layer


@pytest.mark.parametrize("windows", [[(3, 1)], [(3, 1), (2, 4)]])
def test_mean_over_ranks_by_default_and_over_samples_with_loss_scale(
    windows: list[tuple[int, int]],
) -> None:
    """Case 20: rank 0 has 3 samples and rank 1 has 1, then two micro-batches of unequal sizes."""

    def micro_batches(rank: int) -> list[torch.Tensor]:
        return [batch(rank, i, size=sizes[rank]) for i, sizes in enumerate(windows)]

    def train(rank: Rank) -> tuple[Gradients, Gradients]:
        seen = []
        for by_samples in (False, True):
            model = regression()
            sync = GradientSync(model, group=rank.new_group())
            parts = micro_batches(rank.rank)
            scale = sync.loss_scale(sum(len(x) for x in parts))
            for x, last in sync.uneven(parts, window=len(parts)):
                assert x is not None
                losses = model(x).square()
                loss = losses.sum() * scale if by_samples else losses.mean() / len(parts)
                loss.backward()
                assert last == (x is parts[-1])
            seen.append(gradients(model))
            sync.close()
        return seen[0], seen[1]

    every_sample = regression()
    every_sample(
        torch.cat([x for r in range(2) for x in micro_batches(r)])
    ).square().mean().backward()
    mean_of_means = regression()
    for rank in range(2):
        for x in micro_batches(rank):
            (mean_of_means(x).square().mean() / (2 * len(windows))).backward()
    for by_rank, by_sample in run_ranks(train, 2):
        assert_matches(by_rank, gradients(mean_of_means))
        assert_matches(by_sample, gradients(every_sample))


def test_a_mean_over_no_samples_is_refused() -> None:
    with pytest.raises(SlipstreamError, match="No rank has a sample"):
        GradientSync(mlp()).loss_scale(0)
