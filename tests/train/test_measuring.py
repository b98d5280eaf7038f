"""A recipe's own steps, profiled by ranks that are threads."""

from __future__ import annotations

import pytest
from torch.distributed.distributed_c10d import PrefixStore

from ranks import Rank, gloo_group, run_ranks
from slipstream.trace import Trace
from slipstream.train.build import deal
from slipstream.train.measuring import profile_recipe
from training_runs import job_of, tiny_images, tiny_recipe


@pytest.mark.parametrize(
    "overrides", [(), ("train.accumulation_steps=2", "train.clip_grad_norm=1")]
)
def test_ranks_agree_on_the_trace_of_a_recipe(overrides: tuple[str, ...]) -> None:
    recipe = tiny_recipe(*overrides)

    def body(rank: Rank) -> Trace:
        job = job_of(rank)
        data = deal(recipe, job, tiny_images(), tiny_images(16, seed=1))
        alone = gloo_group(PrefixStore(f"alone {rank.rank}", rank.store), 0, 1, 10.0)
        return profile_recipe(recipe, job, data, alone, steps=6)  # more than an epoch has

    zero, one = run_ranks(body, 2)
    assert zero == one
    assert (zero.model, zero.batch_size) == ("resnet_small", 8)
    assert zero.gradients[0].name.startswith("head.")
    assert {gradient.name for gradient in zero.gradients} >= {"stem.weight", "norm.bias"}
    assert all(gradient.needed_seconds is not None for gradient in zero.gradients)
    assert zero.input_seconds > 0 and zero.update_seconds > 0
