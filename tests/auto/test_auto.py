"""Auto in ranks as threads: it measures, agrees, swaps, stays out of the way, and says so."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch

from piloted import PLANNED, STEPS, TOLD, Trainer, reference, samples, slow_links
from ranks import Rank, run_ranks
from slipstream.auto import GradientSync
from slipstream.cluster import Cluster
from slipstream.costs import Costs, Line
from slipstream.errors import CostError, PlanError, RanksDiffer
from slipstream.plan import Plan
from small_models import assert_matches, batch, loss_of, mlp
from worked_models import StoodClock, Worker, workers

Steps = list[tuple[int, str, int]]


def in_short(plans: list[tuple[int, Plan]]) -> Steps:
    """Step, planner and number of buckets."""
    return [(step, plan.planner, len(plan.reduce)) for step, plan in plans]


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "slipstream")


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "slipstream" and r.levelno >= level]


@pytest.mark.parametrize("world_size", [2, 3])
def test_buckets_change_between_two_steps_and_one_line_says_what_came_of_it(
    world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    def train(rank: Rank) -> tuple[Trainer, Steps]:
        trainer = Trainer(rank)
        before = in_short(trainer.run(PLANNED - 1).sync.plans)
        assert before == [(0, "ddp", 1), (1, "ddp", 1)]
        trainer.run(TOLD - PLANNED + 3)
        return trainer, in_short(trainer.sync.plans)

    outcomes = run_ranks(train, world_size)
    for trainer, plans in outcomes:
        assert plans == [(0, "ddp", 1), (1, "ddp", 1), (PLANNED, "optimal", 3)]
        assert trainer.sync.plan.predicted_step_seconds == pytest.approx(66.0 + 0.4 * 24)
        for step, mine in enumerate(trainer.found):
            assert_matches(mine, reference(world_size, step, 1))
        assert [entry.measured_step_seconds for entry in trainer.sync.history.plans] == [
            None,
            66.0,
            66.0,
        ]
        trainer.sync.close()
    assert lines(caplog) == [
        f"auto, after step {PLANNED}: ddp (1 bucket) -> optimal (3 buckets), step predicted "
        "1 min 35 s -> 1 min 16 s, measured 1 min 6 s -> 1 min 6 s"
    ]


def test_gradients_that_are_accumulated_survive_the_swap_and_no_plan_changes_meanwhile() -> None:
    def train(rank: Rank) -> Trainer:
        trainer = Trainer(rank)
        seen: list[set[int]] = []
        for _ in range(PLANNED + 4):
            during: set[int] = set()
            trainer.step(3, lambda: during.add(len(trainer.sync.plan.reduce)))  # noqa: B023
            seen.append(during)
        assert [len(during) for during in seen] == [1] * (PLANNED + 4)
        assert seen[PLANNED - 1] == {1} and seen[PLANNED] == {3}
        return trainer

    for trainer in run_ranks(train, 2):
        for step, mine in enumerate(trainer.found):
            assert_matches(mine, reference(2, 3 * step, 3))


def test_a_plan_that_turns_out_slower_is_left_again(caplog: pytest.LogCaptureFixture) -> None:
    def train(rank: Rank) -> Steps:
        trainer = Trainer(rank)
        for _ in range(TOLD + 2):
            if trainer.sync.plan.planner == "optimal":
                trainer.clock.wait(9.0)
            trainer.step()
        assert trainer.sync.history.plans[-1].reason == lines(caplog)[0]
        return in_short(trainer.sync.plans)

    for plans in run_ranks(train, 2):
        assert plans[2:] == [(PLANNED, "optimal", 3), (TOLD, "ddp", 1)]
    (line,) = lines(caplog)
    assert line.endswith("measured 1 min 6 s -> 1 min 15 s: slower, so back to ddp (1 bucket)")


def test_a_gain_of_less_than_3_percent_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    cheap = Costs.from_curves(Cluster((2,)), {"native": Line(0.0, 0.01)})

    def train(rank: Rank) -> Steps:
        return in_short(Trainer(rank, {"costs": cheap}).run(TOLD).sync.plans)

    assert run_ranks(train, 2) == [[(0, "ddp", 1), (1, "ddp", 1)]] * 2
    (line,) = lines(caplog)
    assert "ddp (1 bucket) stays" in line and line.endswith("a gain below 3 %")


def test_ranks_that_measure_different_things_follow_the_slowest() -> None:
    def train(rank: Rank) -> Plan:
        trainer = Trainer(rank)
        for _ in range(TOLD):
            trainer.clock.wait(5.0 * rank.rank)
            trainer.step()
        return trainer.sync.plan

    plans = run_ranks(train, 3)
    assert plans[0].planner == "optimal" and plans[0] == plans[1] == plans[2]
    assert plans[0].predicted_step_seconds == pytest.approx(10.0 + 66.0 + 0.4 * 24)


def test_without_an_optimizer_the_plan_stays_and_one_warning_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(rank: Rank) -> Trainer:
        trainer = Trainer(rank)
        trainer.has_optimizer = rank.rank == 0
        return trainer.run(3 * PLANNED + STEPS)

    for trainer in run_ranks(train, 2):
        assert in_short(trainer.sync.plans) == [(0, "ddp", 1), (1, "ddp", 1)]
        assert_matches(trainer.found[-1], reference(2, trainer.count - 1, 1))
    (line,) = lines(caplog, logging.WARNING)
    assert "ddp (1 bucket) stays" in line
    assert "Rank 1 has seen no whole training step" in line


def test_pipelined_updates_in_the_next_forward_from_its_swap_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(rank: Rank) -> tuple[Steps, list[torch.Tensor], int]:
        trainer = Trainer(rank, {"planner": "pipelined"})
        sgd = torch.optim.SGD(trainer.model.parameters(), lr=0.01, momentum=0.9)
        trainer.optimizer = trainer.sync.deferred(sgd)
        trainer.run(TOLD + 3).sync.flush()
        state = trainer.model.state_dict()
        return in_short(trainer.sync.plans), list(state.values()), trainer.count

    model = workers(StoodClock()).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    outcomes = run_ranks(train, 2)
    for count in range(outcomes[0][2]):
        optimizer.zero_grad()
        for rank in range(2):
            (model(samples(rank, count)).square().mean() / 2).backward()
        optimizer.step()
    for plans, mine, _ in outcomes:
        assert plans[2][:2] == (PLANNED, "pipelined") and len(plans) == 3
        torch.testing.assert_close(mine, list(model.state_dict().values()), rtol=1e-12, atol=0.0)
    assert len(lines(caplog)) == 1


def test_pipelined_without_a_deferred_optimizer_changes_nothing_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(rank: Rank) -> Steps:
        return in_short(Trainer(rank, plan="pipelined").run(TOLD).sync.plans)

    assert run_ranks(train, 2) == [[(0, "ddp", 1), (1, "ddp", 1)]] * 2
    assert "optimizer = sync.deferred(optimizer)" in lines(caplog, logging.WARNING)[0]


def test_a_model_that_changes_its_trainable_parameters_is_measured_again() -> None:
    def train(rank: Rank) -> tuple[Steps, Trainer]:
        trainer = Trainer(rank).run(TOLD)
        trainer.model[0].weight.requires_grad_(False)
        trainer.run(1)
        assert trainer.found[-1]["0.weight"] is None
        trainer.run(TOLD - 1)
        return in_short(trainer.sync.plans), trainer

    for plans, trainer in run_ranks(train, 2):
        assert plans[3:] == [
            (TOLD, "ddp", 1),
            (TOLD + 1, "ddp", 1),
            (TOLD + PLANNED, "optimal", 2),
        ]
        expected = {**reference(2, trainer.count - 1, 1), "0.weight": None}
        assert_matches(trainer.found[-1], expected)


def test_it_looks_once_more_later_and_then_leaves_no_hook_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(rank: Rank) -> Trainer:
        trainer = Trainer(rank, {"again_after_steps": 5, "costs": slow_links()})
        trainer.run(TOLD + 5)
        for worker, back in zip(trainer.model, (0.0, 0.0, 60.0), strict=True):
            assert isinstance(worker, Worker)
            worker.back = back  # everything becomes ready at once: one bucket is as good
        return trainer.run(2 * TOLD)

    for trainer in run_ranks(train, 2):
        assert in_short(trainer.sync.plans)[-1][1:] == ("optimal", 3)
        assert not any(module._forward_pre_hooks for module in trainer.model.modules())
        hooks = [p._post_accumulate_grad_hooks for p in trainer.model.parameters()]
        assert [len(found) for found in hooks] == [1, 1, 1]
    assert len(lines(caplog)) == 1
    assert "optimal (3 buckets) stays" in lines(caplog, logging.DEBUG)[-1]


@pytest.mark.parametrize("planner", ["wfbp", "pipelined"])
def test_the_cluster_is_probed_where_no_costs_are_given(
    planner: str, caplog: pytest.LogCaptureFixture
) -> None:
    def train(rank: Rank) -> int:
        model = mlp()
        options = {"probe_seconds": 0.05, "steps": 3, "planner": planner}
        sync = GradientSync(model, plan="auto", plan_options=options, group=rank.group)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if planner == "pipelined":
            optimizer = sync.deferred(optimizer)
        for step in range(PLANNED):
            optimizer.zero_grad()
            loss_of(model, batch(rank.rank, step)).backward()
            optimizer.step()
        sync.close()
        return sync.plan.reduce[0].bytes

    assert len(set(run_ranks(train, 2))) == 1
    assert not lines(caplog, logging.WARNING)


def test_a_single_rank_has_nothing_to_gain(caplog: pytest.LogCaptureFixture) -> None:
    model = workers(StoodClock())
    sync = GradientSync(model, plan="auto", plan_options={"steps": 1})
    for _ in range(20):
        model(torch.ones(4, 3)).sum().backward()
    assert in_short(sync.plans) == [(0, "ddp", 1), (1, "ddp", 1)]
    assert not lines(caplog)
    sync.close()


def test_a_model_that_is_dropped_while_it_is_profiled_goes_away() -> None:
    def train(rank: Rank) -> weakref.ref[torch.nn.Module]:
        trainer = Trainer(rank).run(4)
        return weakref.ref(trainer.model)

    models = run_ranks(train, 2)
    gc.collect()
    assert [model() for model in models] == [None, None]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"planner": "optimum"}, "no planner 'optimum'"),
        ({"tolerance": -1.0}, "tolerance is -1"),
        ({"cap_bytes": 5}, "no option 'cap_bytes'"),
        ({"probe_seconds": 0.0}, "probe_seconds is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"allow": ["bfloat16"]}, "'native' does not send bfloat16"),
    ],
)
def test_options_are_checked_when_the_engine_is_made(
    options: dict[str, object], words: str
) -> None:
    model = mlp()
    with pytest.raises(PlanError, match=words):
        GradientSync(model, plan="auto", plan_options=options)
    GradientSync(model).close()  # nothing of it was left on the model


def test_costs_of_another_cluster_and_ranks_that_differ_are_refused() -> None:
    with pytest.raises(CostError, match="measured on 1 node with 4 ranks and 1 node with 1 rank"):
        GradientSync(mlp(), plan="auto", plan_options={"costs": slow_links(4)})

    def differ(rank: Rank) -> None:
        plan = "auto" if rank.rank else "optimal"
        options = {} if rank.rank else {"tolerance": 0.1}
        GradientSync(mlp(), plan=plan, plan_options=options, group=rank.group)

    with pytest.raises(RanksDiffer, match=r"'tolerance': 0\.1"):
        run_ranks(differ, 2)
