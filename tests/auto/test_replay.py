"""Plans from files and from the record of an earlier run, in force again at their steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from piloted import PLANNED, TOLD, Trainer, reference
from ranks import Rank, run_ranks
from slipstream.auto import GradientSync
from slipstream.cluster import Cluster
from slipstream.errors import PlanError, RanksDiffer, SlipstreamError
from slipstream.plan import Gradient, Plan, PlanHistory, PlannedStep, plan_buckets
from slipstream.sync import GradientSync as PlainSync
from small_models import assert_matches, batch, loss_of, mlp
from worked_models import StoodClock, workers


def planned(planner: str) -> Plan:
    """A plan for three workers on one node of two ranks."""
    gradients = [Gradient(f"{index}.weight", 3, "float64") for index in (2, 1, 0)]
    plan = plan_buckets(planner, gradients)
    return plan.model_copy(update={"ranks_per_node": 2, "model": "Workers"})


def as_recorded() -> PlanHistory:
    """What auto leaves: it changed the plan at step 4 and went back at step 7."""
    names = [(0, "single", ""), (4, "wfbp", "better"), (7, "single", "worse")]
    return PlanHistory(
        plans=tuple(PlannedStep(step=s, plan=planned(p), reason=r) for s, p, r in names)
    )


def seen_under(rank: Rank, history: PlanHistory, first_step: int, steps: int) -> list[int]:
    trainer = Trainer(rank, given={"recorded": history, "first_step": first_step})
    found = []
    for _ in range(steps):
        found.append(len(trainer.sync.plan.reduce))
        trainer.step()
    for step, mine in enumerate(trainer.found):
        assert_matches(mine, reference(2, step, 1))
    assert trainer.sync.history.plans == history.plans
    return found


@pytest.mark.parametrize("first_step", [0, 3, 4, 5, 9])
def test_a_record_is_followed_from_any_step_on_and_nothing_is_measured(first_step: int) -> None:
    whole = [1] * 4 + [3] * 3 + [1] * (TOLD + 10)
    steps = TOLD + 3
    seen = run_ranks(lambda rank: seen_under(rank, as_recorded(), first_step, steps), 2)
    assert seen == [whole[first_step : first_step + steps]] * 2


def test_a_record_without_a_decision_is_followed_and_then_auto_measures() -> None:
    def train(rank: Rank) -> list[tuple[int, str]]:
        recorded = PlanHistory.of(planned("single"))
        trainer = Trainer(rank, given={"recorded": recorded, "first_step": 5}).run(PLANNED + 1)
        return [(step, plan.planner) for step, plan in trainer.sync.plans]

    assert run_ranks(train, 2) == [[(0, "single"), (5 + PLANNED, "optimal")]] * 2


def test_a_plan_recorded_for_other_trainable_parameters_is_used_when_they_change() -> None:
    def first(rank: Rank) -> PlanHistory:
        trainer = Trainer(rank).run(3)
        trainer.model[0].weight.requires_grad_(False)
        return trainer.run(3).sync.history

    history = run_ranks(first, 2)[0]
    assert [entry.step for entry in history.plans] == [0, 1, 3, 4]

    def again(rank: Rank) -> PlanHistory:
        trainer = Trainer(rank, given={"recorded": history, "first_step": 2}).run(1)
        trainer.model[0].weight.requires_grad_(False)
        return trainer.run(3).sync.history

    assert run_ranks(again, 2) == [history] * 2


@pytest.mark.parametrize("kind", ["plan", "plans"])
def test_a_file_is_followed(kind: str, tmp_path: Path) -> None:
    document = planned("wfbp") if kind == "plan" else as_recorded()
    path = tmp_path / f"{kind}.json"
    document.save(path)

    def train(rank: Rank) -> list[int]:
        trainer = Trainer(rank, plan=str(path), given={"model_name": "Workers"}, options=NOTHING)
        return [len(trainer.run(1).sync.plan.reduce) for _ in range(8)]

    expected = [3] * 8 if kind == "plan" else [1, 1, 1, 3, 3, 3, 1, 1]
    assert run_ranks(train, 2) == [expected] * 2


NOTHING = {"costs": None, "steps": None, "clock": None}


def test_a_file_of_another_model_or_cluster_is_refused_and_both_are_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned("wfbp").save(path)
    model = nn.Linear(2, 2)
    with pytest.raises(PlanError, match="'Workers' and this is 'Linear'"):
        GradientSync(model, plan=path)
    with pytest.raises(PlanError, match="with 2 ranks and this cluster has 1 node with 1 rank"):
        GradientSync(workers(StoodClock()).double(), plan=path)
    GradientSync(model).close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the document"),
        ('{"format": "slipstream-plans/2", "plans": []}', "format"),
        ('{"format": "slipstream-plans/1", "plans": []}', "plans"),
        ('{"format": "slipstream-plan/1", "planner": "x"}', "reduce"),
        (as_recorded().to_json().replace('"step": 7', '"step": 2'), "steps increase"),
        (as_recorded().to_json().replace('"step": 0', '"step": -1'), r"plans\.0\.step"),
        (as_recorded().to_json().replace('"reason"', '"cause"', 1), r"plans\.0\.cause"),
        (as_recorded().to_json()[:-40], "the document"),
    ],
)
def test_a_damaged_file_is_refused_with_file_and_field(
    text: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "plans.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=rf"plans\.json.*{words}"):
        GradientSync(nn.Linear(1, 1), plan=path)


def test_histories_come_back_from_their_text_and_know_what_is_in_force() -> None:
    history = as_recorded()
    assert PlanHistory.from_json(history.to_json()) == history
    assert [entry.step for entry in history.until(6)] == [0, 4]
    assert [entry.step for entry in history.after(6)] == [7]
    shorter = PlanHistory(plans=history.plans[:2])
    assert history.agrees_with(shorter, 6) and not history.agrees_with(shorter, 7)
    with pytest.raises(PlanError, match="begin at step 4 and training stands at step 3"):
        PlanHistory(plans=history.plans[1:]).until(3)


def test_a_plan_can_be_changed_by_hand_between_two_steps_only() -> None:
    def train(rank: Rank) -> None:
        model = mlp()
        sync = PlainSync(model, plan="single", group=rank.group, cluster=Cluster((2,)))
        wfbp = plan_buckets("wfbp", [Gradient(n, p.numel(), "float64") for n, p in named(model)])
        with sync.no_sync():
            loss_of(model, batch(rank.rank)).backward()
        with pytest.raises(SlipstreamError, match="between two steps only"):
            sync.use_plan(wfbp)
        loss_of(model, batch(rank.rank)).backward()
        with pytest.raises(RanksDiffer, match=r"on rank 0 and [0-9a-f]{16} on rank 1"):
            sync.use_plan(wfbp if rank.rank else sync.plan)
        sync.use_plan(wfbp, "by hand")
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        loss_of(model, torch.zeros(1, 4, dtype=torch.float64)).backward()
        assert len(sync.plan.reduce) == 6 and sync.history.plans[-1].reason == "by hand"
        assert len(grads) == 6
        with pytest.raises(PlanError, match="lacks the trainable parameter"):
            sync.use_plan(wfbp.model_copy(update={"reduce": wfbp.reduce[1:]}))

    run_ranks(train, 2)


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """From the last parameter to the first."""
    return list(model.named_parameters())[::-1]
