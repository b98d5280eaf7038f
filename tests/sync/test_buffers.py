"""Buffers agree after `sync_buffers`, however they were changed, and forwards never touch them."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from averages import check_averages
from ranks import Rank, run_ranks, run_ranks_settled
from slipstream.comm.peers import Peers
from slipstream.errors import RanksDiffer, UnsupportedModel
from slipstream.sync import GradientSync
from small_models import Gradients, assert_matches, batch, gradients, loss_of, reseeded

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


class Counting(nn.Module):
    """One buffer of every kind; `forward` replaces the counter by assignment."""

    counter: torch.Tensor
    count: torch.Tensor
    scratch: torch.Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear = reseeded(nn.Linear(4, 2).double(), rank)
        self.register_buffer("counter", torch.full((2, 3), float(rank)))
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril(-rank))
        self.register_buffer("scratch", torch.full((2,), 10.0 + rank), persistent=False)
        self.register_buffer("count", torch.tensor(7 * (rank + 1)))
        self.register_buffer("image", torch.full((1, 2, 2, 2), rank).to(memory_format=LAST))
        self.register_buffer("every_other", torch.arange(6.0)[::2] + rank)
        self.register_buffer("nothing", torch.zeros(0, 5))
        self.register_buffer("absent", None)
        self.register_buffer("repeated", torch.full((1, 3), float(rank)).expand(4, 3))
        for dtype in DTYPES:
            self.register_buffer(f"of_{str(dtype)[6:]}", torch.full((3,), rank).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter = self.counter + 1 + x.shape[0]
        self.count += x.shape[0]
        out: torch.Tensor = self.linear(x)
        return out


LAST = torch.channels_last


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the buffers by name."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_equal(mine: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(mine[name], value) and mine[name].dtype == value.dtype, name


@pytest.mark.parametrize("world_size", [1, 3])
def test_rank_0s_buffers_win_at_the_wrap_whatever_their_type(world_size: int) -> None:
    def wrap(rank: Rank) -> tuple[dict[str, torch.Tensor], bool]:
        model = Counting(rank.rank)
        GradientSync(model, group=rank.group).close()
        kept = model.get_buffer("image").is_contiguous(memory_format=LAST)
        return buffers(model), kept

    for mine, kept_layout in run_ranks(wrap, world_size):
        assert_equal(mine, buffers(Counting(0)))
        assert kept_layout


def test_after_sync_buffers_all_ranks_hold_rank_0s_however_they_changed() -> None:
    def train(rank: Rank) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        model = Counting(rank.rank)
        sync = GradientSync(model, group=rank.group)
        for step in range(2):
            loss_of(model, batch(rank.rank, step, size=2 + rank.rank)).backward()
        model.scratch = torch.full((2,), 100.0 + rank.rank)
        model.get_buffer("mask").logical_not_() if rank.rank else None
        before = buffers(model)
        sync.sync_buffers()
        sync.close()
        return before, buffers(model)

    zero, one = run_ranks(train, 2)
    assert zero[0]["counter"].eq(6.0).all() and one[0]["counter"].eq(8.0).all()
    assert zero[0]["count"] == 11 and one[0]["count"] == 13
    assert_equal(zero[1], zero[0])
    assert_equal(one[1], zero[0])


def test_a_non_persistent_buffer_is_synced_and_not_saved() -> None:
    def train(rank: Rank) -> tuple[float, list[str]]:
        model = Counting(rank.rank)
        sync = GradientSync(model, group=rank.group)
        model.scratch += 5 * rank.rank
        sync.sync_buffers()
        sync.close()
        return float(model.scratch[0]), list(model.state_dict())

    for value, saved in run_ranks(train, 2):
        assert value == 10.0
        assert "scratch" not in saved and "counter" in saved


def test_buffers_are_left_alone_until_the_sync_point() -> None:
    def train(rank: Rank) -> float:
        model = Counting(0)
        sync = GradientSync(model, group=rank.group)
        model.scratch.fill_(rank.rank)
        loss_of(model, batch(rank.rank)).backward()
        sync.close()
        return float(model.scratch[0])

    assert run_ranks(train, 2) == [0.0, 1.0]


def test_sync_buffers_waits_for_what_is_in_flight() -> None:
    """One channel at a time: a broadcast must not run beside an average of the same group."""

    def train(rank: Rank) -> tuple[bool, Gradients, dict[str, torch.Tensor]]:
        model = Counting(rank.rank)
        sync = GradientSync(model, group=rank.group)
        sync.attach(torch.optim.SGD(model.parameters(), lr=0.1))
        model.count += rank.rank
        loss_of(model, batch(rank.rank)).backward()
        sync.sync_buffers()
        in_flight = sync._rounds.in_flight
        sync.close()
        return in_flight, gradients(model), buffers(model)

    zero, one = run_ranks(train, 2)
    assert not zero[0] and not one[0]
    assert_matches(one[1], zero[1], rtol=0.0)
    assert_equal(one[2], zero[2])


def test_ignored_buffers_stay_the_ranks_own() -> None:
    def train(rank: Rank) -> tuple[float, int]:
        model = Counting(rank.rank)
        sync = GradientSync(model, ignore=["scratch"], group=rank.group)
        sync.sync_buffers()
        sync.close()
        return float(model.scratch[0]), int(model.count)

    assert run_ranks(train, 2) == [(10.0, 7), (11.0, 7)]


class Odd(nn.Module):
    """Holds a buffer that another rank lacks, or has in another form."""

    odd: torch.Tensor | None

    def __init__(self, odd: Any) -> None:
        super().__init__()
        self.linear = reseeded(nn.Linear(4, 2).double(), 0)
        self.register_buffer("first", torch.zeros(2))
        self.register_buffer("odd", odd)


DIFFERENT = {
    "shape": torch.zeros(3, 2),
    "dtype": torch.zeros(2, 3, dtype=torch.float64),
    "lacking": None,
}
WORDS = {"shape": "float32 [3, 2]", "dtype": "float64 [2, 3]", "lacking": "nothing"}


@pytest.mark.parametrize("odd_rank", [0, 1])
@pytest.mark.parametrize("difference", DIFFERENT)
def test_other_buffers_on_one_rank_are_refused_on_every_rank(
    difference: str, odd_rank: int
) -> None:
    def wrap(rank: Rank) -> None:
        odd = DIFFERENT[difference] if rank.rank == odd_rank else torch.zeros(2, 3)
        GradientSync(Odd(odd), group=rank.group)

    for outcome in run_ranks_settled(wrap, 3):
        assert isinstance(outcome, RanksDiffer), outcome
        assert WORDS[difference] in str(outcome) and "float32 [2, 3]" in str(outcome)


@pytest.mark.parametrize("difference", DIFFERENT)
def test_a_buffer_assigned_in_another_form_on_one_rank_is_refused_at_the_sync_point(
    difference: str,
) -> None:
    def train(rank: Rank) -> None:
        model = Odd(torch.zeros(2, 3))
        sync = GradientSync(model, group=rank.group)
        if rank.rank == 1:
            model.odd = DIFFERENT[difference]
        try:
            sync.sync_buffers()
        finally:
            sync.close()

    for outcome in run_ranks_settled(train, 2):
        assert isinstance(outcome, RanksDiffer), outcome
        assert WORDS[difference] in str(outcome) and "float32 [2, 3]" in str(outcome)


def test_the_first_difference_is_named() -> None:
    def broadcast(rank: Rank) -> None:
        peers = Peers(rank.group, rank.store, 10.0, torch.device("cpu"))
        odd = torch.zeros(3 if rank.rank == 2 else 2)
        peers.broadcast({"running_mean": torch.zeros(1), "odd": odd}, "broadcasting buffers")

    for outcome in run_ranks_settled(broadcast, 3):
        assert isinstance(outcome, RanksDiffer)
        assert "'odd' (float32 [2]) on rank 0 stands where rank 2 has 'odd'" in str(outcome)


def test_a_sparse_buffer_is_refused_unless_it_is_ignored() -> None:
    sparse = torch.eye(3).to_sparse()

    def wrap(rank: Rank) -> None:
        GradientSync(Odd(sparse), group=rank.group)

    for outcome in run_ranks_settled(wrap, 2):
        assert isinstance(outcome, UnsupportedModel)
        assert "sparse (float32 [3, 3] sparse_coo)" in str(outcome) and "ignore" in str(outcome)

    def wrap_ignoring(rank: Rank) -> None:
        model = Odd(sparse)
        sync = GradientSync(model, ignore=["odd"], group=rank.group)
        sync.sync_buffers()
        sync.close()

    run_ranks(wrap_ignoring, 2)


# -- batch norm with several forwards before one backward (S5) ----------------------------------


class Judge(nn.Module):
    """Convolution and batch norm, as a discriminator of images has them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(16, 1)
        reseeded(self.double(), 0)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(images))
        return out


def real_and_fake(model: nn.Module, rank: int, step: int) -> None:
    """Two forwards through batch norm, one backward."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    real, fake = torch.randn(2, 3, 1, 4, 4, dtype=torch.float64, generator=generator)
    loss = nn.functional.softplus(-model(real)).mean() + nn.functional.softplus(model(fake)).mean()
    loss.backward()


@pytest.mark.parametrize("planner", ["wfbp", "ddp"])
def test_two_forwards_through_batch_norm_before_one_backward(planner: str) -> None:
    check_averages(Judge, real_and_fake, planner=planner)


def test_running_statistics_agree_after_the_sync_point_and_survive_saving() -> None:
    def train(rank: Rank) -> tuple[dict[str, torch.Tensor], bytes]:
        model = Judge()
        sync = GradientSync(model, group=rank.group)
        for step in range(3):
            real_and_fake(model, rank.rank, step)
            sync.sync_buffers()  # between a backward and the next forward, also each step
        sync.close()
        saved = io.BytesIO()
        torch.save(model.state_dict(), saved)
        return buffers(model), saved.getvalue()

    zero, one = run_ranks(train, 2)
    assert_equal(one[0], zero[0])
    assert zero[0]["body.1.num_batches_tracked"] == 6
    lone = Judge()
    for step in range(3):
        real_and_fake(lone, 0, step)
    torch.testing.assert_close(zero[0]["body.1.running_mean"], buffers(lone)["body.1.running_mean"])
    thawed = Judge()
    thawed.load_state_dict(torch.load(io.BytesIO(one[1]), weights_only=True))
    assert_equal(buffers(thawed), zero[0])
