"""Runs that send a share of the elements: resumed bit for bit, by schedule, and all at the end."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from slipstream.costs import ClusterSpec, MeasuredCost
from slipstream.errors import RecipeError
from slipstream.plan import Bucket, PlanHistory
from slipstream.report.records import read_metrics
from slipstream.train import training
from slipstream.train.checkpoint import find_checkpoint, load
from slipstream.train.recipe import Recipe
from slipstream.wires import Density, Wire
from training_runs import run_all, tiny_recipe

SPARSE = ("sparse.density=0.05", "sparse.small_numel=40", "sparse.collective=naive_topk")
TWENTIETH = Density(density=0.05, values="float32")


def recipe(*overrides: str) -> Recipe:
    """3 epochs of 5 steps, saved every other step."""
    return tiny_recipe(
        "train.epochs=3",
        "checkpoint.every_steps=2",
        "checkpoint.keep_last=20",
        *SPARSE,
        *overrides,
    )


def sparse_wires(run: Path) -> list[tuple[int, set[Wire]]]:
    """Of each plan: from which step on it was in force, and what its sparse buckets send."""
    return [
        (entry.step, {b.wire for b in entry.plan.reduce if not isinstance(b.wire, str)})
        for entry in PlanHistory.load(run / "plans.json").plans
    ]


def resumed(whole: Path, step: int, run: Path, recipe: Recipe, ranks: int) -> dict[str, Any]:
    shutil.copytree(whole, run)
    (run / "summary.json").unlink()
    return run_all(recipe, ranks, run, resume=run / "checkpoints" / f"step-{step:08}")[0]


@pytest.mark.parametrize("collective", ["hitopk", "naive_topk", "a2a_topk"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    collective: str, tmp_path: Path
) -> None:
    """Case 31."""
    this = recipe(f"sparse.collective={collective}", "sparse.values=bfloat16")
    whole = run_all(this, 2, tmp_path / "whole")[0]
    saved = load(find_checkpoint(tmp_path / "whole"))
    assert any("/residual/" in name for name in saved.tensors)
    records = [
        r for r in read_metrics(tmp_path / "whole" / "metrics.jsonl") if r["kind"] == "sparse"
    ]
    assert [record["epoch"] for record in records] == [1, 2, 3]
    for record in records:  # a twentieth, of 6 bytes each, rounded up to whole elements
        assert 10 < record["compression"] <= 4 / (0.05 * 6)
        assert record["residual_norm"] > 0 and record["selection_seconds"] > 0
    assert "residual norm" in (tmp_path / "whole" / "report.html").read_text()
    for step in (2, 6, 10):
        again = resumed(tmp_path / "whole", step, tmp_path / f"from {step}", this, 2)
        assert again["weights_sha256"] == whole["weights_sha256"], step


@pytest.mark.parametrize(
    "more",
    [
        ("sparse.selector=mstopk",),
        ("sparse.correct_momentum=true", "sparse.clip_norm=5", "sparse.until_epoch=2"),
    ],
    ids=["drawing", "momentum"],
)
def test_so_is_one_that_draws_or_keeps_velocities(more: tuple[str, ...], tmp_path: Path) -> None:
    this = recipe("sparse.collective=hitopk", *more)
    whole = run_all(this, 2, tmp_path / "whole")[0]
    for step in (6, 12):
        again = resumed(tmp_path / "whole", step, tmp_path / f"from {step}", this, 2)
        assert again["weights_sha256"] == whole["weights_sha256"], step


def test_densities_follow_the_epochs_and_the_last_ones_are_dense(tmp_path: Path) -> None:
    this = recipe("sparse.warmup_densities=[0.5]", "sparse.until_epoch=2")
    whole = run_all(this, 2, tmp_path / "whole")[0]
    half = Density(density=0.5, values="float32")
    assert sparse_wires(tmp_path / "whole") == [
        (0, {half}),
        (1, {half}),
        (5, {TWENTIETH}),
        (10, set()),
    ]
    assert not any("/residual/" in n for n in load(find_checkpoint(tmp_path / "whole")).tensors)
    for step in (4, 5, 8, 10, 12):
        again = resumed(tmp_path / "whole", step, tmp_path / f"from {step}", this, 2)
        assert again["weights_sha256"] == whole["weights_sha256"], step
        assert sparse_wires(tmp_path / f"from {step}") == sparse_wires(tmp_path / "whole")


def test_a_checkpoint_without_residuals_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(training, "gather_residuals", lambda *_: {})
        run_all(recipe(), 2, tmp_path / "whole")
    said = io.StringIO()
    with redirect_stderr(said):
        resumed(tmp_path / "whole", 6, tmp_path / "again", recipe(), 2)
    assert "holds no residuals" in said.getvalue()
    assert "2 ranks had not sent by step 6 is lost" in said.getvalue()


@pytest.fixture
def cluster_file(tmp_path: Path) -> Iterator[Path]:
    def cost(seconds_per_byte: float, **fields: Any) -> MeasuredCost:
        return MeasuredCost(startup_seconds=1e-3, seconds_per_byte=seconds_per_byte, **fields)

    sparse = cost(1e-9, collective="naive_topk", wire=TWENTIETH)
    dense = cost(1e-3, collective="native")
    spec = ClusterSpec(backend="gloo", nodes=1, ranks_per_node=2, costs=(dense, sparse))
    path = tmp_path / "cluster.json"
    spec.save(path)
    yield path


def test_auto_begins_dense_and_sends_sparsely_where_it_is_cheaper(
    cluster_file: Path, tmp_path: Path
) -> None:
    this = recipe("sync.planner=auto", f"sync.cluster_file={cluster_file}", "train.epochs=7")
    run_all(this, 2, tmp_path / "run")
    plans = PlanHistory.load(tmp_path / "run" / "plans.json").plans
    ways = [{way_of(bucket) for bucket in entry.plan.reduce} for entry in plans]
    assert ways[0] == ways[1] == {("native", "float32")}
    assert ("naive_topk", TWENTIETH) in ways[2]


def way_of(bucket: Bucket) -> tuple[str, Wire]:
    return bucket.collective, bucket.wire


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["sparse.density=2"], "sparse.density"),
        (["sparse.density=0"], ""),
        (["sparse.warmup_densities=[0.5, 0]"], "above 0 and at most 1"),
        (["sparse.density=0", "sparse.until_epoch=1"], "until_epoch needs sparse.density"),
        (["sparse.density=0", "sparse.correct_momentum=true"], "momentum needs sparse.density"),
        (["sparse.clip_norm=1"], "set sparse.correct_momentum=true"),
        (["sparse.selector=largest"], "sparse.selector"),
        (["sparse.collective=torus"], "sparse.collective"),
    ],
)
def test_settings_that_cannot_be_are_refused(overrides: list[str], said: str) -> None:
    if not said:
        assert recipe(*overrides).sparse.in_epoch(0) is None
        return
    with pytest.raises(RecipeError, match=said):
        recipe(*overrides)


def test_what_does_not_fit_model_or_cluster_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"holds 'embeding\.\*', which no parameter of"):
        run_all(recipe('sparse.dense=["embeding.*"]'), 2, tmp_path / "a")
    note = recipe("sync.planner=pipelined").ignored()
    assert any("sparse.density=0.05 has no effect here" in sentence for sentence in note)
