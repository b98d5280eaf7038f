"""The plans of a run: auto changes them, files and checkpoints keep them, a resumed run repeats."""

from __future__ import annotations

import html
import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from slipstream.auto import pilot
from slipstream.auto.decision import StepTime, Verdict
from slipstream.auto.settings import AutoSettings
from slipstream.costs import ClusterSpec, Costs, MeasuredCost, Operation
from slipstream.errors import CostError, PlanError
from slipstream.plan import Plan, PlanHistory, plan_step
from slipstream.report.records import read_metrics
from slipstream.trace import Trace
from slipstream.train.checkpoint import find_checkpoint, load
from slipstream.train.recipe import Recipe
from training_runs import run_all, tiny_recipe

PLANNED = 21  # the round after which auto has made up its mind


def recipe(tmp_path: Path, *overrides: str) -> Recipe:
    """7 epochs of 5 steps under auto, with costs from a file, saved in the middle of epochs."""
    costs = tuple(
        MeasuredCost(
            collective="native", operation=operation, startup_seconds=1e-3, seconds_per_byte=1e-9
        )
        for operation in get_args(Operation)
    )
    spec = ClusterSpec(backend="gloo", nodes=1, ranks_per_node=2, costs=costs)
    spec.save(tmp_path / "cluster.json")
    return tiny_recipe(
        "sync.planner=auto",
        f"sync.cluster_file={tmp_path / 'cluster.json'}",
        "train.epochs=7",
        "checkpoint.every_steps=9",
        "checkpoint.keep_last=20",
        *overrides,
    )


@contextmanager
def deciding() -> Iterator[list[float]]:
    """Lets auto change its plan whatever it measured, by default to one bucket a gradient.

    Holds the measured steps of every decision.
    """
    found: list[float] = []

    def decide(
        trace: Trace, costs: Costs, _plan: Plan, measured: StepTime, settings: AutoSettings
    ) -> Verdict:
        found.append(measured.seconds)
        planner = "pipelined" if settings.gathers else "wfbp"
        return Verdict(plan=plan_step(planner, trace, costs), old_seconds=2.0, new_seconds=1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pilot, "decide", decide)
        patch.setattr(StepTime, "is_slower_than", lambda *_: False)
        yield found


@pytest.fixture
def decided() -> Iterator[list[float]]:
    with deciding() as found:
        yield found


@dataclass(frozen=True)
class Whole:
    """A run under auto that nothing interrupted, to be read and copied only."""

    inputs: Path
    folder: Path
    summary: dict[str, Any]
    num_decisions: int
    said: str


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Two ranks, which auto gives another plan after step `PLANNED`."""
    folder = tmp_path_factory.mktemp("whole")
    said = io.StringIO()
    with deciding() as found, redirect_stderr(said):
        summary = run_all(recipe(folder), 2, folder / "run")[0]
    return Whole(folder, folder / "run", summary, len(found), said.getvalue())


def planned(run: Path) -> list[tuple[int, str]]:
    return [
        (entry.step, entry.plan.planner) for entry in PlanHistory.load(run / "plans.json").plans
    ]


def test_a_run_records_what_auto_did_and_repeats_it_from_every_checkpoint(
    whole: Whole, decided: list[float], tmp_path: Path
) -> None:
    assert whole.num_decisions == 1
    history = PlanHistory.load(whole.folder / "plans.json")
    assert planned(whole.folder) == [(0, "ddp"), (1, "ddp"), (PLANNED, "wfbp")]
    assert Plan.load(whole.folder / "plan.json") == history.plans[-1].plan
    assert history.plans[-1].reason in whole.said
    report = (whole.folder / "report.html").read_text()
    assert history.plans[-1].reason in html.unescape(report)
    saved = load(find_checkpoint(whole.folder)).plan
    assert saved is not None and PlanHistory.from_json(saved) == history
    for step in (9, 18, 27):  # before auto had decided, just before, and after
        run = tmp_path / f"from {step}"
        shutil.copytree(whole.folder, run)
        (run / "summary.json").unlink()
        checkpoint = run / "checkpoints" / f"step-{step:08}"
        resumed = run_all(recipe(whole.inputs), 2, run, resume=checkpoint)[0]
        assert resumed["weights_sha256"] == whole.summary["weights_sha256"]
        assert planned(run) == planned(whole.folder)
    assert not decided


def test_other_plans_than_those_of_the_checkpoint_may_be_asked_for(
    whole: Whole, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole.folder, run)
    checkpoint = run / "checkpoints" / "step-00000027"
    run_all(recipe(whole.inputs, "sync.planner=single"), 2, run, resume=checkpoint)
    assert planned(run) == [(27, "single"), (28, "single")]


def test_a_file_of_plans_is_followed_and_bits_are_the_same(whole: Whole, tmp_path: Path) -> None:
    replay = f"sync.plan_file={whole.folder / 'plans.json'}"
    again = run_all(recipe(whole.inputs, replay), 2, tmp_path / "again")[0]
    assert again["weights_sha256"] == whole.summary["weights_sha256"]
    with pytest.raises(PlanError, match="with 2 ranks and this cluster has 1 node with 1 rank"):
        run_all(recipe(whole.inputs, replay), 1, tmp_path / "alone")
    with pytest.raises(PlanError, match="'resnet_small' and this is 'resnet_small'"):
        run_all(recipe(whole.inputs, replay, "model.width=8"), 2, tmp_path / "other")
    with pytest.raises(PlanError, match=r"nowhere\.json cannot be read"):
        run_all(recipe(whole.inputs, "sync.plan_file=nowhere.json"), 1, tmp_path / "missing")


def test_damaged_plans_in_a_run_folder_stop_a_resume_and_are_named(tmp_path: Path) -> None:
    run, whole_run = tmp_path / "run", tmp_path / "whole"
    run_all(tiny_recipe("checkpoint.every_steps=3"), 1, run)
    shutil.copytree(run, whole_run)
    (run / "summary.json").unlink()
    (run / "plans.json").write_text('{"format": "slipstream-plans/1"}')
    checkpoint = run / "checkpoints" / "step-00000006"
    with pytest.raises(PlanError, match=r"plans\.json is not a plan history .*plans: Field"):
        run_all(tiny_recipe(), 1, run, resume=checkpoint)
    (run / "plans.json").write_text('{"format": "slipstream-pl')
    with pytest.raises(PlanError, match=rf"Remove that file: {checkpoint} holds the plans"):
        run_all(tiny_recipe(), 1, run, resume=checkpoint)
    (run / "plans.json").unlink()
    resumed = run_all(tiny_recipe(), 1, run, resume=checkpoint)[0]
    assert resumed["steps"] == 10
    assert planned(run) == planned(whole_run)


def test_costs_of_another_cluster_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CostError, match="on 1 node with 2 ranks and 1 node with 4 ranks"):
        run_all(recipe(tmp_path), 4, tmp_path / "run")


def test_updates_in_the_next_forward_train_evaluate_save_and_resume_at_any_step(
    decided: list[float], tmp_path: Path
) -> None:
    settings = [
        "train.clip_grad_norm=0.5",
        "train.accumulation_steps=2",
        "run.log_every_steps=1",
        "train.on_nonfinite=skip",
    ]
    plain = run_all(recipe(tmp_path, "sync.planner=ddp", *settings), 2, tmp_path / "plain")[0]
    pipelined = recipe(tmp_path, "sync.planner=pipelined", *settings)
    whole = run_all(pipelined, 2, tmp_path / "whole")[0]
    assert planned(tmp_path / "whole")[2:] == [(PLANNED, "pipelined")]
    assert len(decided) == 1
    for name in ("train_loss", "test_accuracy"):
        assert whole[name] == pytest.approx(plain[name], rel=1e-4)
    norms = [
        [
            record["gradient_norm"]
            for record in read_metrics(tmp_path / run / "metrics.jsonl")
            if record["kind"] == "step"
        ]
        for run in ("whole", "plain")
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    for step in (18, 27):
        run = tmp_path / f"from {step}"
        shutil.copytree(tmp_path / "whole", run)
        checkpoint = run / "checkpoints" / f"step-{step:08}"
        (run / "summary.json").unlink()
        resumed = run_all(pipelined, 2, run, resume=checkpoint)[0]
        assert resumed["weights_sha256"] == whole["weights_sha256"]
