"""Infinities, NaN and 16-bit numbers: all ranks see the same, and know where it began."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from given_gradients import Given
from ranks import Rank, run_ranks
from slipstream.errors import SlipstreamError
from slipstream.sync import GradientSync, NonFinite
from small_models import Gradients, assert_matches, batch, gradients, loss_of, mlp, weights

INF, NAN = math.inf, math.nan
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


# -- reading p.grad, and clipping ---------------------------------------------------------------


def test_gradients_read_right_after_backward_are_the_averages() -> None:
    """As with DDP: nothing to wait for, and what the user writes into them is what step() takes."""

    def train(rank: Rank) -> tuple[Gradients, torch.Tensor]:
        model = mlp()
        sync = GradientSync(model, group=rank.group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss_of(model, batch(rank.rank)).backward()
        found = gradients(model)
        for param in model.parameters():
            assert param.grad is not None and param.grad.is_leaf and not param.grad.requires_grad
            param.grad.mul_(2.0)
        optimizer.step()
        sync.close()
        return found, weights(model)

    reference = mlp()
    loss_of(reference, torch.cat([batch(0), batch(1)])).backward()
    expected = torch.cat([p.grad.reshape(-1) for p in reference.parameters() if p.grad is not None])
    for found, final in run_ranks(train, 2):
        assert_matches(found, gradients(reference))
        torch.testing.assert_close(final, weights(mlp()) - expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_clipping_equals_torchs_on_the_joined_batch(norm_type: float, attached: bool) -> None:
    def train(rank: Rank) -> tuple[list[float], torch.Tensor]:
        model = mlp()
        sync = GradientSync(model, group=rank.group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if attached:
            sync.attach(optimizer)
        norms = []
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, batch(rank.rank, step)).backward()
            norms.append(float(sync.clip_grad_norm_(0.3, norm_type)))
            optimizer.step()
        sync.close()
        return norms, weights(model)

    reference = mlp()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for step in range(4):
        optimizer.zero_grad()
        loss_of(reference, torch.cat([batch(0, step), batch(1, step)])).backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.3, norm_type)
        expected.append(float(norm))
        optimizer.step()
    assert max(expected) > 0.3, "something was clipped"
    zero, one = run_ranks(train, 2)
    assert zero[0] == one[0] and torch.equal(zero[1], one[1])
    assert zero[0] == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(zero[1], weights(reference), rtol=1e-12, atol=1e-15)


# -- 16-bit numbers (case 28's dense half) ------------------------------------------------------


def averaged(dtype: torch.dtype, values: list[float]) -> list[list[float]]:
    """Every rank's gradient after one backward in which rank r's was values[r]."""

    def train(rank: Rank) -> list[float]:
        model = Given({"w": ((2,), dtype)})
        sync = GradientSync(model, group=rank.group, check_finite=True)
        model.feed(w=values[rank.rank])
        assert sync.nonfinite() is None
        sync.close()
        grad = model.get_parameter("w").grad
        assert grad is not None and grad.dtype == dtype
        found: list[float] = grad.tolist()
        return found

    return run_ranks(train, len(values))


SMALLEST_HALF = 2.0**-24  # 6e-8 in float16
SMALLEST_SINGLE = 2.0**-149
LARGEST_SINGLE = float(torch.finfo(torch.float32).max)


@pytest.mark.parametrize(
    ("dtype", "values", "mean"),
    [
        (F16, [2000.0] * 4, 2000.0),
        (F16, [65504.0] * 4, 65504.0),
        (F16, [6e-8] * 4, SMALLEST_HALF),
        (F16, [2000.0, 6e-8, 6e-8, -2000.0], 0.0),
        (F16, [2000.0, 2000.0, -2000.0, 6e-8], 500.0),
        (F16, [4 * SMALLEST_HALF, 0.0, 0.0, 0.0], SMALLEST_HALF),
        (BF16, [2.0**126] * 2, 2.0**126),
        (BF16, [2.0**-133] * 4, 2.0**-133),
        # 32 bits and more are divided before they are summed: no sum overflows, and nothing is
        # lost above the number of ranks times the smallest denormal
        (F32, [LARGEST_SINGLE] * 4, LARGEST_SINGLE),
        (F32, [4 * SMALLEST_SINGLE] * 4, 4 * SMALLEST_SINGLE),
        (F32, [4 * SMALLEST_SINGLE, 8 * SMALLEST_SINGLE, 0.0, 0.0], 3 * SMALLEST_SINGLE),
        (F64, [1e-323] * 2, 1e-323),
        (F64, [1.7e308] * 2, 1.7e308),
    ],
)
def test_means_neither_overflow_nor_underflow(
    dtype: torch.dtype, values: list[float], mean: float
) -> None:
    for found in averaged(dtype, values):
        assert found == [mean, mean]


# -- where infinities and NaN began (case 26's engine half) -------------------------------------

THREE: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "first": ((2,), F32),
    "middle": ((3,), F32),
    "last": ((2, 2), F32),
}
CLEAN = {"first": 1.0, "middle": 2.0, "last": 3.0}


def found_by(feeds: list[dict[str, float]], *, attached: bool = False) -> list[NonFinite | None]:
    """What `nonfinite` says on each rank after one backward with these gradients."""

    def train(rank: Rank) -> NonFinite | None:
        model = Given(THREE)
        sync = GradientSync(model, plan="wfbp", group=rank.group, check_finite=True)
        if attached:
            sync.attach(torch.optim.SGD(model.parameters(), lr=1.0))
        model.feed(**feeds[rank.rank])
        found = sync.nonfinite()
        sync.close()
        return found

    return run_ranks(train, len(feeds))


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("name", list(THREE))
def test_nonfinite_names_rank_and_parameter(name: str, culprit: int, bad: float) -> None:
    feeds = [{**CLEAN, name: bad} if rank == culprit else CLEAN for rank in range(3)]
    assert found_by(feeds, attached=culprit == 1) == [NonFinite((culprit,), name)] * 3


def test_nonfinite_on_several_ranks_names_all_and_the_lowest_ones_parameter() -> None:
    feeds = [CLEAN, {**CLEAN, "first": NAN}, CLEAN, {**CLEAN, "last": INF, "middle": NAN}]
    assert found_by(feeds) == [NonFinite((1, 3), "first")] * 4
    # opposite infinities cancel to NaN in the mean; both ranks began it
    feeds = [{**CLEAN, "middle": INF}, {**CLEAN, "middle": -INF}]
    assert found_by(feeds) == [NonFinite((0, 1), "middle")] * 2


def test_a_nan_in_a_parameter_that_only_one_rank_used() -> None:
    feeds = [{"first": 1.0}, {"first": 1.0, "middle": NAN}]
    assert found_by(feeds) == [NonFinite((1,), "middle")] * 2


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_only_bfloat16_sums_can_overflow_and_then_they_are_flagged(dtype: torch.dtype) -> None:
    def train(rank: Rank) -> tuple[Any, bool]:
        model = Given({"w": ((2,), dtype), "v": ((2,), dtype)})
        sync = GradientSync(model, group=rank.group, check_finite=True)
        model.feed(w=0.9 * torch.finfo(dtype).max, v=1.0)
        found = sync.nonfinite()
        sync.close()
        grad = model.get_parameter("w").grad
        assert grad is not None
        return found, bool(torch.isfinite(grad).all())

    overflows = (NonFinite((0, 1), "w"), False)
    assert run_ranks(train, 2) == [overflows if dtype == BF16 else (None, True)] * 2


def test_a_nan_of_an_earlier_micro_batch_is_found() -> None:
    def train(rank: Rank) -> tuple[Any, Any]:
        model = Given(THREE)
        sync = GradientSync(model, group=rank.group, check_finite=True)
        with sync.no_sync():
            model.feed(first=NAN if rank.rank == 1 else 1.0)
        model.feed(middle=1.0)
        unused_later = sync.nonfinite()
        model.zero_grad()
        with sync.no_sync():
            model.feed(last=NAN if rank.rank == 0 else 1.0)
        model.feed(last=1.0)
        used_again = sync.nonfinite()
        sync.close()
        return unused_later, used_again

    assert run_ranks(train, 2) == [(NonFinite((1,), "first"), NonFinite((0,), "last"))] * 2


class Forbidden:
    """Stands for the other ranks where nobody may turn to them."""

    def gather(self, _value: object, _doing: str) -> list[object]:
        raise AssertionError("a clean step communicates")


def test_clean_steps_communicate_nothing_and_follow_a_bad_one() -> None:
    def train(rank: Rank) -> list[NonFinite | None]:
        model = Given(THREE)
        sync = GradientSync(model, group=rank.group, check_finite=True)
        found = []
        for step in range(5):
            model.zero_grad()
            model.feed(**{**CLEAN, "last": NAN if step == 2 and rank.rank == 1 else 3.0})
            peers = sync._peers
            if step != 2:
                sync._peers = Forbidden()  # type: ignore[assignment]
            found.append(sync.nonfinite())
            sync._peers = peers
        sync.close()
        return found

    bad = NonFinite((1,), "last")
    assert run_ranks(train, 2) == [[None, None, bad, None, None]] * 2


def test_a_step_with_a_nan_can_be_left_out_and_leaves_no_trace() -> None:
    """Rank 1 feeds one NaN input at step 3, the norm is clipped to 1, momentum runs on."""

    def train(poisoned: bool) -> Callable[[Rank], tuple[list[Any], torch.Tensor]]:
        def body(rank: Rank) -> tuple[list[Any], torch.Tensor]:
            model = mlp()
            sync = GradientSync(model, group=rank.group, check_finite=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            seen = []
            for step in range(6):
                if step == 3 and not poisoned:
                    continue
                optimizer.zero_grad()
                x = batch(rank.rank, step)
                if step == 3 and rank.rank == 1:
                    x[0, 0] = NAN
                loss_of(model, x).backward()
                seen.append(sync.nonfinite())
                if seen[-1] is None:
                    sync.clip_grad_norm_(1.0)
                    optimizer.step()
            sync.close()
            return seen, weights(model)

        return body

    poisoned, clean = run_ranks(train(True), 2), run_ranks(train(False), 2)
    for seen, final in poisoned:
        assert [s is None for s in seen] == [True, True, True, False, True, True]
        assert seen[3] is not None and seen[3].ranks == (1,)
        assert seen[3].parameter in dict(mlp().named_parameters())
        assert torch.equal(final, clean[0][1])


def test_nonfinite_without_the_check_is_refused() -> None:
    with pytest.raises(SlipstreamError, match="check_finite=True"):
        GradientSync(mlp()).nonfinite()


def test_a_single_rank_finds_its_own() -> None:
    model = Given(THREE)
    sync = GradientSync(model, check_finite=True)
    model.feed(**{**CLEAN, "middle": NAN})
    assert sync.nonfinite() == NonFinite((0,), "middle")
