"""torch's GradScaler beside the engine: one rank's overflow skips the step on all (case 25)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ranks import Rank, run_ranks, run_ranks_settled
from slipstream.errors import SlipstreamError
from slipstream.sync import GradientSync
from small_models import batch, loss_of, mlp, weights

BAD_STEP = 4
LOOPS = ["unmodified", "unmodified, unscaled for clipping", "attached"]


def scaled_training(loop: str, bad_rank: int | None) -> Callable[[Rank], dict[str, Any]]:
    """Eight steps in 32 bits under a GradScaler; one rank's gradient overflows at step 4."""

    def body(rank: Rank) -> dict[str, Any]:
        model = mlp().float()
        sync = GradientSync(model, group=rank.group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=100)
        if loop == "attached":
            sync.attach(optimizer)
        scales, skipped, untouched = [], [], True
        for step in range(8):
            optimizer.zero_grad()
            x = batch(rank.rank, step).float()
            loss = loss_of(model, x)
            if step == BAD_STEP and rank.rank == bad_rank:
                loss = loss * 1e36  # finite, until it is scaled
            scaler.scale(loss).backward()
            if loop == "attached":
                sync.unscale_(scaler, optimizer)
            elif loop == "unmodified, unscaled for clipping":
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1e3)
            before = (weights(model), copy.deepcopy(optimizer.state_dict()["state"]))
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            skipped.append(scaler.get_scale() < scale)
            if skipped[-1]:
                after = optimizer.state_dict()["state"]
                untouched &= torch.equal(before[0], weights(model))
                untouched &= all(
                    torch.equal(state["momentum_buffer"], after[index]["momentum_buffer"])
                    for index, state in before[1].items()
                )
            else:
                schedule.step()
        sync.close()
        rate = optimizer.param_groups[0]["lr"]
        return {
            "scales": scales,
            "skipped": skipped,
            "untouched": untouched,
            "weights": weights(model),
            "rate": rate,
        }

    return body


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("loop", LOOPS)
def test_all_ranks_skip_the_step_in_which_one_overflowed(
    loop: str, world_size: int, bad_rank: int
) -> None:
    outcomes = run_ranks(scaled_training(loop, bad_rank), world_size)
    for mine in outcomes:
        assert mine["skipped"] == [step == BAD_STEP for step in range(8)]
        assert mine["scales"] == [2.0**16] * BAD_STEP + [2.0**15] * (8 - BAD_STEP)
        assert mine["untouched"]
        assert mine["rate"] == outcomes[0]["rate"]
        assert torch.equal(mine["weights"], outcomes[0]["weights"])
        assert torch.isfinite(mine["weights"]).all()


def test_both_waits_and_a_loop_without_scaler_agree() -> None:
    """Scales are powers of two, so that scaling changes no bit of the weights."""

    def plain(rank: Rank) -> torch.Tensor:
        model = mlp().float()
        sync = GradientSync(model, group=rank.group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(8):
            if step == BAD_STEP:
                continue
            optimizer.zero_grad()
            loss_of(model, batch(rank.rank, step).float()).backward()
            optimizer.step()
            schedule.step()
        sync.close()
        return weights(model)

    expected = run_ranks(plain, 2)[0]
    for loop in LOOPS:
        final = run_ranks(scaled_training(loop, 1), 2)[0]["weights"]
        assert torch.equal(final, expected), loop


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_reads_gradients_in_flight_is_refused(fused: bool, world_size: int) -> None:
    def train(rank: Rank) -> torch.Tensor:
        model = mlp().float()
        sync = GradientSync(model, group=rank.group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        sync.attach(optimizer)
        scaler = torch.amp.GradScaler("cpu")
        before = weights(model)
        scaler.scale(loss_of(model, batch(rank.rank).float())).backward()
        try:
            with pytest.raises(SlipstreamError, match=r"call sync\.unscale_\(scaler, optimizer\)"):
                scaler.step(optimizer)
            assert torch.equal(weights(model), before)
        finally:
            sync.close()
        return weights(model)

    outcomes = run_ranks_settled(train, world_size)
    assert all(isinstance(outcome, torch.Tensor) for outcome in outcomes), outcomes


def test_waiting_before_the_scalers_step_is_enough() -> None:
    def train(rank: Rank) -> tuple[torch.Tensor, torch.Tensor]:
        model = mlp().float()
        sync = GradientSync(model, group=rank.group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync.attach(optimizer)
        scaler = torch.amp.GradScaler("cpu")
        before = weights(model)
        scaler.scale(loss_of(model, batch(rank.rank).float())).backward()
        sync.wait()
        scaler.step(optimizer)
        sync.close()
        return before, weights(model)

    (before, zero), (_, one) = run_ranks(train, 2)
    assert torch.equal(zero, one) and not torch.equal(before, zero)
