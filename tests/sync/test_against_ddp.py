"""In real processes GradientSync trains exactly as torch's DistributedDataParallel does."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

import ddp_scenarios
from processes import run_processes

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", params=[2, 4], ids=["2-ranks", "4-ranks"])
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """One start of the processes for all scenarios: results[rank][scenario][way]."""
    return run_processes(ddp_scenarios.run_all, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("way", ddp_scenarios.OURS)
@pytest.mark.parametrize("scenario", ddp_scenarios.SCENARIOS)
def test_gradients_and_weights_equal_ddps(
    outcomes: list[dict[str, Any]], scenario: str, way: str
) -> None:
    for rank, results in enumerate(outcomes):
        ours, torchs = results[scenario][way], results[scenario]["torch"]
        for what in ("gradients", "weights") if way != ddp_scenarios.HIDDEN else ("weights",):
            torch.testing.assert_close(
                ours[what],
                torchs[what],
                rtol=1e-12,
                atol=1e-14,
                equal_nan=True,
                msg=f"{what} on rank {rank}",
            )
        assert torch.equal(ours["weights"], outcomes[0][scenario][way]["weights"])
        assert torch.equal(ours["buffers"], outcomes[0][scenario][way]["buffers"])
        # DDP's buffers agree when the next forward begins; until then rank 0's are what will be
        rank_0s = outcomes[0][scenario]["torch"]["buffers"]
        torch.testing.assert_close(ours["buffers"], rank_0s, rtol=1e-12, atol=1e-14)


def test_gradients_of_heads_that_nobody_used_stay_none(outcomes: list[dict[str, Any]]) -> None:
    num_missing = 2 * sum(p.numel() for p in ddp_scenarios.Branches().heads[1].parameters())
    for results in outcomes:
        for way, found in results["unused"].items():
            if way != ddp_scenarios.HIDDEN:
                assert int(found["gradients"].isnan().sum()) == num_missing


def test_a_failing_rank_is_reported_and_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"rank 1 failed and said: (.|\n)*one is odd"):
        run_processes(ddp_scenarios.rank_1_raises, 2, tmp_path)
    assert not multiprocessing.active_children()
