"""DDP's hook with sparse sums: nothing is lost, whatever becomes of DDP's buckets."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import ddp_hooks
from fed_model import CLUSTER, SHAPES, Fed, integers, mean, owed_by
from processes import run_processes
from ranks import Rank, run_ranks
from slipstream.errors import CheckpointError, RanksDiffer, SlipstreamError
from slipstream.plan.sparsity import Sparsity
from slipstream.sync import DDPHookState, ddp_hook
from slipstream.sync.owed_state import state_of
from slipstream.wires import SPARSE_COLLECTIVES

TENTH = Sparsity(0.1, small_numel=8)
FIRST, REBUILT = ("dc", "ba"), ("d", "cb", "a")
"""How DDP cuts buckets before and after its first step."""


@dataclass
class Bucket:
    """As DDP hands one to its hook."""

    params: Sequence[torch.nn.Parameter]
    number: int
    last: bool

    def __post_init__(self) -> None:
        self._flat = torch.cat([p.grad.flatten() for p in self.params if p.grad is not None])

    def buffer(self) -> torch.Tensor:
        return self._flat

    def parameters(self) -> Sequence[torch.nn.Parameter]:
        return self.params

    def gradients(self) -> list[torch.Tensor]:
        parts = self._flat.split([p.numel() for p in self.params])
        return [part.view(p.shape) for part, p in zip(parts, self.params, strict=True)]

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.last


def averaged(
    state: DDPHookState, model: Fed, cut: Sequence[str], values: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What the hook makes of one step's gradients."""
    model.zero_grad()
    model.feed(values)
    buckets = [
        Bucket([model.get_parameter(letter) for letter in letters], number, number == len(cut) - 1)
        for number, letters in enumerate(cut)
    ]
    futures: list[Any] = [ddp_hook(state, bucket) for bucket in buckets]  # type: ignore[arg-type]
    found = {}
    for letters, bucket, future in zip(cut, buckets, futures, strict=True):
        assert future.wait() is bucket.buffer()
        for letter, gradient in zip(letters, bucket.gradients(), strict=True):
            found[letter] = gradient.clone()
    return found


def kept(state: DDPHookState) -> dict[str, torch.Tensor]:
    assert state._sums is not None
    return state_of(state._sums.owed())


def made(rank: Rank, model: Fed, sparsity: Sparsity = TENTH) -> DDPHookState:
    return DDPHookState(sparsity=sparsity, model=model, cluster=CLUSTER, group=rank.group)


@pytest.mark.parametrize("name", SPARSE_COLLECTIVES)
@pytest.mark.parametrize("values", ["float32", "bfloat16"])
def test_nothing_is_lost_where_ddp_cuts_its_buckets_anew(name: str, values: str) -> None:
    steps = 10

    def train(rank: Rank) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        model = Fed()
        sparsity = Sparsity(0.1, values, name, small_numel=8)  # type: ignore[arg-type]
        state = made(rank, model, sparsity)
        found = []
        for step in range(steps):
            cut = FIRST if step in (0, 7) else REBUILT
            found.append(averaged(state, model, cut, integers(rank.rank, step)))
        owed = kept(state)
        state.close()
        return found, owed

    outcomes = run_ranks(train, 4)
    owed = owed_by([state for _, state in outcomes])
    assert owed["a"].any() and not owed["b"].any(), "b has 7 elements, and is sent in full"
    for step in range(steps):
        assert torch.equal(outcomes[0][0][step]["b"], mean(step)["b"])
        for found, _ in outcomes[1:]:
            assert all(torch.equal(found[step][n], outcomes[0][0][step][n]) for n in SHAPES)
    for name in SHAPES:
        given = torch.stack([step[name] for step in outcomes[0][0]]).sum(0)
        total = torch.stack([mean(step)[name] for step in range(steps)]).sum(0)
        assert torch.equal(given + owed[name], total), name


def test_a_loaded_state_goes_on_bit_for_bit() -> None:
    """Its residuals, and where a selector that draws at random has got to."""
    drawing = Sparsity(0.1, selector="mstopk", small_numel=8)

    def train(rank: Rank) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
        outcomes = []
        for stops in (False, True):
            model, found = Fed(), []
            state = made(rank, model, drawing)
            for step in range(8):
                if stops and step == 5:
                    file = io.BytesIO()
                    torch.save(state, file)
                    file.seek(0)
                    state = torch.load(file, weights_only=True)
                    state._group = rank.group
                    state.of(model)
                cut = FIRST if step == 0 else REBUILT
                found.append(averaged(state, model, cut, integers(rank.rank, step)))
            outcomes.append(found)
        return outcomes[0], outcomes[1]

    for whole, resumed in run_ranks(train, 4):
        for step, (mine, reference) in enumerate(zip(resumed, whole, strict=True)):
            assert all(torch.equal(mine[name], reference[name]) for name in SHAPES), step


@pytest.mark.parametrize("where", ["d", "b"])
def test_a_step_that_is_not_finite_sends_nothing(where: str) -> None:
    def train(rank: Rank) -> None:
        model = Fed()
        state = made(rank, model)
        states = []
        for step in range(3):
            fed = integers(rank.rank, step)
            if step == 2 and rank.rank == 1:
                fed[where].view(-1)[3] = torch.inf
            found = averaged(state, model, REBUILT, fed)
            states.append(kept(state))
        assert not found[where].isfinite().all()
        assert states[1].keys() == states[2].keys()
        assert all(torch.equal(states[1][key], states[2][key]) for key in states[1])
        state.close()

    run_ranks(train, 4)


def test_settings_and_states_that_do_not_fit_are_refused() -> None:
    def body(rank: Rank) -> None:
        model = Fed()
        with pytest.raises(SlipstreamError, match="give the model, too"):
            DDPHookState(sparsity=TENTH, group=rank.group)
        with pytest.raises(RanksDiffer, match=r"density=0.1, .* on rank 0 and .*density=0.2"):
            made(rank, model, Sparsity(0.2) if rank.rank else TENTH)
        state = made(rank, model)
        averaged(state, model, FIRST, integers(rank.rank, 0))
        saved = state.__getstate__()
        state.close()
        other = DDPHookState.__new__(DDPHookState)
        other.__setstate__(saved)
        with pytest.raises(CheckpointError, match="belongs to no parameter of this model"):
            other.of(torch.nn.Linear(2, 2))
        other._group = rank.group
        other._names = {}
        with pytest.raises(SlipstreamError, match=r"none of the model's; call of\(model\)"):
            averaged(other, model, FIRST, integers(rank.rank, 0))
        for fields in ({"density": 2.0}, {"density": 0.1, "dense": [], "colour": 1}):
            with pytest.raises(SlipstreamError, match=r"density of 2|colour"):
                DDPHookState.__new__(DDPHookState).__setstate__({**saved, "sparsity": fields})

    run_ranks(body, 4)


@pytest.mark.processes
def test_under_ddp_itself_nothing_is_lost(tmp_path: Path) -> None:
    outcomes = run_processes(ddp_hooks.run_sparse, 4, tmp_path, limit_seconds=120.0)
    for name in SPARSE_COLLECTIVES:
        owed = sum(found[f"{name} owed"] for found in outcomes)
        assert owed.any()
        for found in outcomes:
            assert torch.equal(found[f"{name} given"], outcomes[0][f"{name} given"])
            torch.testing.assert_close(
                found[f"{name} given"] + owed, found["in full"], rtol=0.0, atol=1e-5
            )
