"""Recomputed activations (case 10), and backwards that end in an error.

Ranks are threads here and share torch's default generator. Two of them that restore its state at
once can wait for each other, one for the generator and one for the interpreter's lock to free the
old state, so recomputation leaves it alone (`preserve_rng_state=False`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranks import Rank, run_ranks
from slipstream.cluster import Cluster
from slipstream.comm import Collective, Collectives
from slipstream.errors import SlipstreamError
from slipstream.sync import GradientSync
from slipstream.sync.reducer import Reducer
from slipstream.wires import DenseWire, Wire
from small_models import Gradients, assert_matches, batch, gradients, loss_of, mlp, reseeded


class Recomputed(nn.Module):
    """A residual block 8-32-8 whose layers are recomputed in backward, or not."""

    def __init__(self, mode: str, repeats: int = 1, frozen_first: bool = False) -> None:
        super().__init__()
        self.mode, self.repeats = mode, repeats
        self.head = nn.Linear(4, 8)
        self.wide, self.narrow = nn.Linear(8, 32), nn.Linear(32, 8)
        reseeded(self.double(), 0)
        self.head.requires_grad_(not frozen_first)

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.mode == "plain":
            out: torch.Tensor = layer(x)
            return out
        recomputed: torch.Tensor = checkpoint(
            layer, x, use_reentrant=self.mode == "reentrant", preserve_rng_state=False
        )
        return recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        for _ in range(self.repeats):
            x = x + self.run(self.narrow, self.run(self.wide, x).tanh())
        return x


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("frozen_first", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_recomputation(mode: str, repeats: int, frozen_first: bool, accumulate: bool) -> None:
    """Case 10: the bits of the run without it, and one reduction per bucket and step."""

    def train(mode: str) -> Callable[[Rank], tuple[list[Gradients], int]]:
        def body(rank: Rank) -> tuple[list[Gradients], int]:
            model = Recomputed(mode, repeats, frozen_first)
            sync = GradientSync(model, plan="wfbp", group=rank.group)
            sent = count_sends(sync)
            seen = []
            for step in range(3):
                model.zero_grad()
                if accumulate:
                    with sync.no_sync():
                        loss_of(model, leaf(rank.rank, 10 + step)).backward()
                loss_of(model, leaf(rank.rank, step)).backward()
                seen.append(gradients(model))
            sync.close()
            return seen, len(sent)

        return body

    def leaf(rank: int, step: int) -> torch.Tensor:
        return batch(rank, step).requires_grad_()  # reentrant mode wants an input with gradient

    plain = run_ranks(train("plain"), 2)
    recomputed = run_ranks(train(mode), 2)
    num_buckets = 6 - 2 * frozen_first
    for (mine, sends), (expected, _) in zip(recomputed, plain, strict=True):
        assert sends == 3 * num_buckets
        # reentrant segments add to an accumulated gradient one by one, without us too
        regrouped = mode == "reentrant" and repeats > 1 and accumulate
        for a, b in zip(mine, expected, strict=True):
            assert_matches(a, b, rtol=1e-13 if regrouped else 0.0)


def count_sends(sync: GradientSync) -> list[int]:
    """Grows by one for each collective that the engine starts."""
    sent: list[int] = []
    inner = sync._rounds._means.collectives.get()

    class Counting:
        name = "native"
        wire: DenseWire = "float32"
        layout_invariant = False

        def sum_(self, flat: torch.Tensor, divisor: int = 1) -> None:
            sent.append(flat.numel())
            inner.sum_(flat, divisor)

        def begin(self, flat: torch.Tensor, divisor: int = 1) -> None:
            """Leaves it to sum_."""

    class Counted(Collectives):
        def get(self, name: str = "native", wire: Wire = "float32") -> Collective:
            return Counting()

    means = replace(sync._rounds._means, collectives=Counted(None, Cluster((1,))))
    sync._rounds._means = means
    assert isinstance(sync._rounds.reducer, Reducer)
    for buffer in sync._rounds.reducer.buffers:
        buffer.collective = means.collectives.get()
    return sent


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_all_parameters_inside_reentrant_segments_and_segments_nested() -> None:
    """No hook ever fires in the outer graph task, yet the average is there after backward."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            reseeded(self.double(), 0)

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = checkpoint(
                self.b, self.a(x).tanh(), use_reentrant=True, preserve_rng_state=False
            )
            return out

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = checkpoint(
                self.inner, x, use_reentrant=True, preserve_rng_state=False
            )
            return out

    def train(rank: Rank) -> Gradients:
        model = Nested()
        sync = GradientSync(model, plan="wfbp", group=rank.group)
        for step in range(2):
            model.zero_grad()
            loss_of(model, batch(rank.rank, step).requires_grad_()).backward()
        sync.close()
        return gradients(model)

    reference = Nested()
    loss_of(reference, torch.cat([batch(r, 1) for r in range(2)]).requires_grad_()).backward()
    for mine in run_ranks(train, 2):
        assert_matches(mine, gradients(reference))


def test_a_parameter_used_outside_and_inside_a_reentrant_segment() -> None:
    """Its bucket goes out before the segment adds to it: sent again, warned about, and right."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            reseeded(self.double(), 0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(self.shared, x, use_reentrant=True, preserve_rng_state=False)
            out: torch.Tensor = self.shared(self.last(hidden.tanh()))
            return out

    def train(rank: Rank) -> list[Gradients]:
        model = Tied()
        sync = GradientSync(model, plan="wfbp", group=rank.group)
        seen = []
        for step in range(3):
            model.zero_grad()
            loss_of(model, batch(rank.rank, step).requires_grad_()).backward()
            seen.append(gradients(model))
        sync.close()
        return seen

    def reference(step: int) -> Gradients:
        model = Tied()
        loss_of(model, torch.cat([batch(r, step) for r in range(2)]).requires_grad_()).backward()
        return gradients(model)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Parameter 'shared")
        outcomes = run_ranks(train, 2)
    for mine in outcomes:
        for step, seen in enumerate(mine):
            assert_matches(seen, reference(step))


class Fragile(torch.autograd.Function):
    """Its backward fails, as users' own functions may."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        raise ValueError("the user's own")


def test_an_error_inside_backward_leaves_the_engine_usable_if_nothing_was_sent() -> None:
    model = mlp()
    sync = GradientSync(model, plan="single")
    with pytest.raises(ValueError, match="the user's own"):
        Fragile.apply(model[0](batch(0))).sum().backward()
    hidden = Fragile.apply(model[0](batch(0)))
    with pytest.raises(ValueError, match="the user's own"):
        model[3](model[2](hidden)).square().mean().backward()
    model.zero_grad()
    loss_of(model, batch(0)).backward()
    reference = mlp()
    loss_of(reference, batch(0)).backward()
    assert_matches(gradients(model), gradients(reference))
    sync.close()


def test_an_error_inside_backward_after_a_bucket_went_out_is_final() -> None:
    model = mlp()
    sync = GradientSync(model, plan="wfbp")
    with pytest.raises(ValueError, match="the user's own"):
        model[3](Fragile.apply(model[2](model[0](batch(0))))).sum().backward()
    with pytest.raises(SlipstreamError, match="backward of step 1 ended in an error"):
        loss_of(model, batch(0)).backward()
    sync.close()
