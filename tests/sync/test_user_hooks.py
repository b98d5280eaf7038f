"""Users have hooks of their own on parameters, beside the engine's."""

from __future__ import annotations

import torch
from torch import nn

from ranks import Rank, run_ranks
from slipstream.sync import GradientSync
from small_models import Gradients, assert_matches, batch, gradients, loss_of, mlp


def test_a_gradient_that_the_users_own_hook_puts_aside_still_counts_and_stays_aside() -> None:
    """Optimizers that step inside hooks set p.grad to None there."""

    def train(rank: Rank) -> tuple[Gradients, torch.Tensor]:
        model = mlp()
        sync = GradientSync(model, plan="single", group=rank.group)
        aside = model[0].bias
        assert isinstance(aside, nn.Parameter)
        aside.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
        loss_of(model, batch(rank.rank)).backward()
        averaged = sync._rounds.reducer.slots["0.bias"].view.clone()
        sync.close()
        return gradients(model), averaged

    reference = mlp()
    loss_of(reference, torch.cat([batch(0), batch(1)])).backward()
    expected = gradients(reference)
    for mine, averaged in run_ranks(train, 2):
        assert_matches({"0.bias": averaged}, {"0.bias": expected["0.bias"]})
        assert_matches(mine, expected | {"0.bias": None})
