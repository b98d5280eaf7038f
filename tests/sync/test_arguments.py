"""What cannot be meant is refused in a sentence, before anything is made or overwritten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import slipstream
from ranks import Rank, run_ranks
from slipstream import Cluster
from slipstream.errors import PlanError, SlipstreamError, UnsupportedModel
from slipstream.sync import GradientSync
from small_models import mlp, weights


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"timeout_seconds": float("inf")}, "timeout_seconds is inf"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds is nan"),
        ({"timeout_seconds": 1e300}, "timeout_seconds is 1e\\+300"),
        ({"timeout_seconds": -1.0}, "timeout_seconds is -1.0"),
        ({"ignore": "weight"}, "ignore is the text 'weight'"),
        ({"group": torch.distributed.GroupMember.NON_GROUP_MEMBER}, "no member of the group"),
        ({"cluster": (1,)}, "give a slipstream.Cluster"),
        ({"cluster": Cluster((2, 1))}, "3 ranks and the group 1"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], said: str) -> None:
    model = mlp()
    with pytest.raises(SlipstreamError, match=said):
        GradientSync(model, **settings)
    GradientSync(model).close()  # nothing is left on it


def test_what_is_no_model() -> None:
    with pytest.raises(SlipstreamError, match="and this is a list"):
        GradientSync([nn.Linear(2, 2)])  # type: ignore[arg-type]


def test_a_cluster_of_other_ranks_and_a_model_without_memory_are_refused_by_every_rank() -> None:
    def body(rank: Rank) -> None:
        model = mlp()
        before = weights(model)
        with pytest.raises(SlipstreamError, match="has 3 ranks and the group 2"):
            GradientSync(model, group=rank.group, cluster=Cluster((3,)))
        assert torch.equal(weights(model), before)
        with pytest.raises(UnsupportedModel, match="lives on a meta device"):
            GradientSync(nn.Linear(2, 2, device="meta"), group=rank.group)
        GradientSync(model, group=rank.group).close()

    run_ranks(body, 2)


@pytest.mark.parametrize("plan", ["optimall", None, 3])
def test_what_is_no_plan_names_all_that_is(plan: Any) -> None:
    with pytest.raises(PlanError, match=r"plan is .* auto, wfbp, .* optimal, pipelined"):
        slipstream.GradientSync(mlp(), plan=plan)
