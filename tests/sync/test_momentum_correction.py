"""Momentum correction in the engine: as its formulas say, moved with plans, saved and undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from fed_model import (
    CLUSTER,
    NAMES,
    SHAPES,
    TENTH,
    Cut,
    Fed,
    gradients,
    integers,
    mean,
    owed_by,
    plan_of,
    trained_over,
)
from ranks import Rank, run_ranks
from slipstream.errors import RanksDiffer, SlipstreamError
from slipstream.sparsify import k_of
from slipstream.sync import GradientSync

MIXED: Cut = [("dc", "hitopk", TENTH), ("b", "native", "float32"), ("a", "hitopk", TENTH)]
DENSE: Cut = [("dcba", "native", "float32")]
State = Mapping[str, torch.Tensor]


def plain(model: Fed) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def engine(rank: Rank, model: Fed, cut: Cut, momentum: float, **options: object) -> GradientSync:
    sync = GradientSync(model, plan=plan_of(cut), group=rank.group, cluster=CLUSTER)
    sync.correct_momentum(plain(model), momentum, **options)  # type: ignore[arg-type]
    return sync


def random(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Reference:
    """Momentum correction as the paper's formulas say it, on one process.

    teams: ranks whose gradients are added before they select; rows: into how many a bucket is cut.
    """

    def __init__(self, cut: Cut, teams: Sequence[Sequence[int]], rows: int, nesterov: bool) -> None:
        self._cut, self._teams, self._rows = cut, teams, rows
        self._nesterov = nesterov
        self._state: dict[tuple[str, int, int], list[torch.Tensor]] = {}

    def updates(self, step: int, factor: float) -> dict[str, torch.Tensor]:
        each = [random(rank, step) for rank in range(4)]
        found = {}
        for letters, _, wire in self._cut:
            flats = [torch.cat([e[letter].flatten() for letter in letters]) / 4 for e in each]
            is_dense = isinstance(wire, str)
            teams = [range(4)] if is_dense else self._teams
            total = torch.zeros_like(flats[0])
            for team, members in enumerate(teams):
                mine = torch.stack([flats[rank] for rank in members]).sum(0)
                pieces = list(
                    zip(mine.tensor_split(self._rows), total.tensor_split(self._rows), strict=True)
                )
                for row, (gradient, out) in enumerate(pieces):
                    k = len(gradient) if is_dense else k_of(0.1, len(gradient))
                    out += self._sent((letters, team, row), gradient, factor, k, is_dense)
            sizes = [torch.Size(SHAPES[letter]).numel() for letter in letters]
            for letter, part in zip(letters, total.split(sizes), strict=True):
                found[letter] = part.view(SHAPES[letter])
        return found

    def _sent(
        self, key: tuple[str, int, int], g: torch.Tensor, factor: float, k: int, is_dense: bool
    ) -> torch.Tensor:
        u, v = self._state.setdefault(key, [torch.zeros_like(g), torch.zeros_like(g)])
        u.copy_(factor * (u + g) if self._nesterov else factor * u + g)
        v += u + g if self._nesterov else u
        places = v.abs().topk(k).indices
        sent = torch.zeros_like(v)
        sent[places] = v[places]
        v[places] = 0.0
        if not is_dense:
            u[places] = 0.0
        return sent


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("name", ["hitopk", "naive_topk"])
def test_updates_are_those_of_the_formulas(name: str, nesterov: bool) -> None:
    cut: Cut = [(letters, name if way == "hitopk" else way, wire) for letters, way, wire in MIXED]
    steps = 12

    def train(rank: Rank) -> list[dict[str, torch.Tensor]]:
        model, found = Fed(), []
        sync = engine(rank, model, cut, 0.9, nesterov=nesterov)
        for step in range(steps):
            model.zero_grad()
            model.feed(random(rank.rank, step))
            found.append(gradients(model))
        sync.close()
        return found

    teams = [[0, 1], [2, 3]] if name == "hitopk" else [[0], [1], [2], [3]]
    reference = Reference(cut, teams, 2 if name == "hitopk" else 1, nesterov)
    outcomes = run_ranks(train, 4, timeout_seconds=30.0)
    for step in range(steps):
        expected = reference.updates(step, 0.9)
        for found in outcomes:
            for letter in SHAPES:
                torch.testing.assert_close(found[step][letter], expected[letter])
                assert torch.equal(found[step][letter], outcomes[0][step][letter])


def test_in_dense_buckets_it_is_the_optimizers_momentum() -> None:
    """Also where a parameter is not used in a step by any rank, or by some."""
    used = ["abcd", "abc", "d", "abcd", "bd"]

    def train(rank: Rank, is_ours: bool) -> dict[str, torch.Tensor]:
        model = Fed()
        sync = GradientSync(model, plan=plan_of(DENSE), group=rank.group, cluster=CLUSTER)
        momentum = 0.0 if is_ours else 0.9
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=momentum, nesterov=not is_ours
        )
        if is_ours:
            sync.correct_momentum(optimizer, 0.9, nesterov=True)
        for step, names in enumerate(used):
            optimizer.zero_grad()
            model.feed(integers(rank.rank, step, names if rank.rank else names[0]))
            optimizer.step()
        sync.close()
        return {name: param.detach().clone() for name, param in model.named_parameters()}

    ours = run_ranks(lambda rank: train(rank, True), 4)
    theirs = run_ranks(lambda rank: train(rank, False), 4)
    for mine, reference in zip(ours, theirs, strict=True):
        for name in SHAPES:
            torch.testing.assert_close(mine[name], reference[name], rtol=1e-5, atol=1e-3)


CUTS: tuple[Cut, ...] = (
    MIXED,
    [("dcb", "a2a_topk", TENTH), ("a", "torus", "float32")],
    DENSE,
    [("dcba", "naive_topk", TENTH)],
)


@pytest.mark.parametrize("first", range(len(CUTS)))
def test_without_momentum_nothing_is_lost_over_other_plans(first: int) -> None:
    """What is owed to a bucket that becomes dense is paid back as it is."""
    steps, each = 24, 6

    def train(rank: Rank) -> tuple[list[dict[str, torch.Tensor]], State]:
        model = Fed()
        cuts = [*CUTS[first:], *CUTS[:first]]
        sync = engine(rank, model, cuts[0], 0.0)
        return trained_over(model, sync, rank.rank, cuts, each)

    outcomes = run_ranks(train, 4, timeout_seconds=30.0)
    owed = owed_by([state for _, state in outcomes])
    for name in SHAPES:
        given = torch.stack([step[name] for step in outcomes[0][0]]).sum(0)
        total = torch.stack([mean(step)[name] for step in range(steps)]).sum(0)
        assert torch.equal(given + owed[name], total), name


def velocities(states: Sequence[State]) -> dict[str, torch.Tensor]:
    """The sum over ranks of each parameter's velocity."""
    found = {name: torch.zeros(torch.Size(shape).numel()) for name, shape in SHAPES.items()}
    for state in states:
        for key, values in state.items():
            if key.endswith("~"):
                name, _, start = key.removesuffix("~").partition("@")
                found[name][int(start) : int(start) + values.numel()] += values
    return found


def trained(cut: Cut, momentum: float, steps: range) -> Callable[[Rank, Sequence[State]], State]:
    """A rank's state after these steps, begun with what others have saved."""

    def train(rank: Rank, saved: Sequence[State] = ()) -> State:
        model = Fed()
        sync = engine(rank, model, cut, momentum)
        if saved:
            sync.load_residual_state(saved)
        for step in steps:
            model.zero_grad()
            model.feed(integers(rank.rank, step))
        state = sync.residual_state()
        sync.close()
        return state

    return train


@pytest.mark.parametrize("cut", CUTS, ids=["mixed", "a2a", "dense", "naive"])
def test_a_restored_state_goes_on_bit_for_bit(cut: Cut) -> None:
    whole = run_ranks(lambda rank: trained(cut, 0.9, range(8))(rank, ()), 4)
    saved = run_ranks(lambda rank: trained(cut, 0.9, range(5))(rank, ()), 4)
    again = run_ranks(lambda rank: trained(cut, 0.9, range(5, 8))(rank, saved), 4)
    assert any(key.endswith("~") for key in whole[0])
    for mine, reference in zip(again, whole, strict=True):
        assert mine.keys() == reference.keys()
        assert all(torch.equal(mine[key], reference[key]) for key in mine)


@pytest.mark.parametrize("new", CUTS, ids=["mixed", "a2a", "dense", "naive"])
@pytest.mark.parametrize("old", CUTS, ids=["mixed", "a2a", "dense", "naive"])
def test_under_another_plan_velocities_and_residuals_add_up_to_the_same(old: Cut, new: Cut) -> None:
    saved = run_ranks(lambda rank: trained(old, 0.5, range(5))(rank, ()), 4)
    moved = run_ranks(lambda rank: trained(new, 0.5, range(0))(rank, saved), 4)
    before, after = velocities(saved), velocities(moved)
    owed_before, owed_after = owed_by(saved), owed_by(moved)
    assert any(before[name].any() for name in SHAPES)
    for name in SHAPES:
        assert torch.equal(after[name], before[name]), name
        assert torch.equal(owed_after[name], owed_before[name]), name


@pytest.mark.parametrize("where", ["d", "b"])
def test_a_step_that_is_not_finite_changes_nothing(where: str) -> None:
    def train(rank: Rank) -> tuple[State, State]:
        model = Fed()
        sync = engine(rank, model, MIXED, 0.9)
        states = []
        for step in range(3):
            model.zero_grad()
            fed = integers(rank.rank, step)
            if step == 2 and rank.rank == 1:
                fed[where].view(-1)[3] = torch.inf
            model.feed(fed)
            if step:
                states.append(sync.residual_state())
        sync.close()
        return states[0], states[1]

    for before, after in run_ranks(train, 4):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", NAMES)
def test_each_ranks_gradients_are_clipped_before_they_are_added(name: str) -> None:
    """At 8 / sqrt(4 ranks): c alone is longer than 4 on every rank, and b on none."""

    def fed_to(rank: int) -> dict[str, torch.Tensor]:
        return {"b": torch.full((7,), 0.25 * rank), "c": torch.full((11, 3, 3), 1.0 + rank)}

    def train(rank: Rank) -> tuple[dict[str, torch.Tensor], State]:
        model = Fed()
        cut: Cut = [("c", name, TENTH), ("dba", "native", "float32")]
        sync = engine(rank, model, cut, 0.0, clip_norm=8.0)
        model.feed(fed_to(rank.rank))
        found, state = gradients(model), sync.residual_state()
        sync.close()
        return found, state

    outcomes = run_ranks(train, 4)
    owed = owed_by([state for _, state in outcomes])
    for found, _ in outcomes:
        torch.testing.assert_close(found["b"], torch.full((7,), 0.375))
        clipped = torch.full((11, 3, 3), 4.0 / 99**0.5)
        torch.testing.assert_close(found["c"] + owed["c"], clipped)


def test_what_cannot_be_is_refused() -> None:
    def body(rank: Rank) -> None:
        model = Fed()
        sync = GradientSync(model, plan=plan_of(MIXED), group=rank.group, cluster=CLUSTER)
        for optimizer in (
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            torch.optim.Adam(model.parameters()),
        ):
            with pytest.raises(SlipstreamError, match=f"{type(optimizer).__name__} has .*="):
                sync.correct_momentum(optimizer)
        impossible: list[dict[str, Any]] = [{"momentum": 1.0}, {"clip_norm": 0.0}]
        for options in (*impossible, {"momentum": float("nan")}):
            with pytest.raises(SlipstreamError, match=r"momentum of|clip_norm is"):
                sync.correct_momentum(plain(model), **options)
        with pytest.raises(RanksDiffer, match=r"factor=0.9.* on rank 0 and .*factor=0.5"):
            sync.correct_momentum(plain(model), 0.5 if rank.rank else 0.9)
        assert not sync.corrects_momentum
        sync.correct_momentum(plain(model), 0.9)
        with pytest.raises(SlipstreamError, match="before the first backward, once"):
            sync.correct_momentum(plain(model), 0.9)
        with pytest.raises(SlipstreamError, match="corrects momentum"):
            sync.deferred(plain(model))
        sync.close()
        wide = Fed(torch.float64)
        sync = GradientSync(wide, plan="single", group=rank.group)
        with pytest.raises(SlipstreamError, match="'a' is float64"):
            sync.correct_momentum(plain(wide))
        sync.close()

    run_ranks(body, 4)
