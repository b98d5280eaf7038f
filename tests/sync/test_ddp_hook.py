"""DDP with our collectives as its hook trains as DDP does, to what the wire can hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ddp_hooks
from processes import run_processes
from ranks import Rank, run_ranks
from slipstream.cluster import Cluster
from slipstream.errors import PlanError, RanksDiffer, SlipstreamError
from slipstream.sync import DDPHookState
from slipstream.wires import DENSE_WIRES

TOLERANCE = {"float32": 1e-12, "bfloat16": 2e-3, "float16": 2e-4}


@pytest.mark.processes
def test_every_collective_trains_as_ddps_own_all_reduce(tmp_path: Path) -> None:
    outcomes = run_processes(ddp_hooks.run_all, 4, tmp_path, limit_seconds=120.0)
    for name, wires in DENSE_WIRES.items():
        for wire in wires:
            way = f"{name} {wire}"
            for found in outcomes:
                assert torch.equal(found[way], outcomes[0][way]), f"{way}: ranks hold the same bits"
                torch.testing.assert_close(
                    found[way], found["torch"], rtol=0.0, atol=TOLERANCE[wire], msg=way
                )
    for rank, found in enumerate(outcomes):
        assert "ValueError: no memory for this bucket" in found["failure"]
        expected = "Rank 1 cannot go on" if rank == 1 else f"Rank {rank} cannot go on while"
        assert expected in found["failure"]


def test_a_closed_state_says_so() -> None:
    def body(rank: Rank) -> str:
        state = DDPHookState(group=rank.group)
        mean = state.average(torch.full((3,), float(rank.rank))).wait()
        assert torch.equal(mean, torch.full((3,), 0.5))
        state.close()
        with pytest.raises(SlipstreamError, match="has been closed"):
            state.average(torch.ones(1))
        return "closed"

    assert run_ranks(body, 2) == ["closed", "closed"]


def test_what_cannot_be_meant_is_refused() -> None:
    for limit in (0.0, -1.0, float("nan"), float("inf"), 1e300):
        with pytest.raises(SlipstreamError, match="timeout_seconds is"):
            DDPHookState(timeout_seconds=limit)
    with pytest.raises(SlipstreamError, match="no member of the group"):
        DDPHookState(group=torch.distributed.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]


def test_settings_that_do_not_fit_are_refused() -> None:
    def body(rank: Rank) -> None:
        with pytest.raises(PlanError, match="sends float32, not 'float16'"):
            DDPHookState("native", "float16", group=rank.group)
        with pytest.raises(RanksDiffer, match=r"direct with float32 .* and direct with bfloat16"):
            DDPHookState("direct", "bfloat16" if rank.rank else "float32", group=rank.group)
        with pytest.raises(RanksDiffer, match=r"on rank 0 and .* on rank 1"):
            shape = (1, 1) if rank.rank else (2,)
            DDPHookState("hierarchical", cluster=Cluster(shape), group=rank.group)
        with pytest.raises(SlipstreamError, match="3 ranks and the group 2"):
            DDPHookState("ring", cluster=Cluster((2, 1)), group=rank.group)

    run_ranks(body, 2)
