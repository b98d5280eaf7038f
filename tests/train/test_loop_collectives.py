"""Runs whose recipe allows several collectives and wires: what is used, kept, repeated, refused."""

from __future__ import annotations

import html
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ranks import Rank, run_ranks
from slipstream.auto.decision import StepTime
from slipstream.cluster import Cluster
from slipstream.costs import ClusterSpec, Link, Links, MeasuredCost
from slipstream.errors import CostError, RecipeError
from slipstream.plan import Plan, PlanHistory
from slipstream.train.build import build_model
from slipstream.train.distributed import Job
from slipstream.train.plans import build_sync
from slipstream.train.recipe import Recipe
from slipstream.wires import CollectiveName, DenseWire
from training_runs import run_all, tiny_images, tiny_recipe

PLANNED = 21  # the round after which auto has made up its mind
COSTS: dict[tuple[CollectiveName, DenseWire], float] = {
    ("native", "float32"): 10.0,
    ("ring", "float32"): 2.0,
    ("direct", "float32"): 1.0,
    ("direct", "bfloat16"): 0.1,
}
"""Seconds a bucket, which no step here takes: so it always pays to change."""


def recipe(folder: Path, *overrides: str, links: Links | None = None) -> Recipe:
    """7 epochs of 5 steps under auto, with these costs from a file."""
    costs = tuple(
        MeasuredCost(collective=name, wire=wire, startup_seconds=seconds, seconds_per_byte=0.0)
        for (name, wire), seconds in COSTS.items()
    )
    spec = ClusterSpec(backend="gloo", nodes=1, ranks_per_node=2, costs=costs, links=links)
    spec.save(folder / "cluster.json")
    return tiny_recipe(
        "sync.planner=auto",
        f"sync.cluster_file={folder / 'cluster.json'}",
        "train.epochs=7",
        "checkpoint.every_steps=9",
        "checkpoint.keep_last=20",
        *overrides,
    )


@pytest.fixture(autouse=True)
def _never_back() -> Iterator[None]:
    """The costs are made up, so that steps turn out as they may."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepTime, "is_slower_than", lambda *_: False)
        yield


def carriers(run: Path) -> set[tuple[str, object]]:
    return {(bucket.collective, bucket.wire) for bucket in Plan.load(run / "plan.json").reduce}


@pytest.mark.parametrize(
    ("overrides", "way", "told"),
    [
        ([], ("native", "float32"), ""),
        (["sync.collectives=native,ring"], ("ring", "float32"), "(given costs: native, ring)"),
        (["sync.collectives=all"], ("direct", "float32"), "(given costs: native, ring, direct)"),
        (
            ["sync.collectives=native,direct", "sync.allow=float32,bfloat16"],
            ("direct", "bfloat16"),
            "(given costs: native, direct; with bfloat16 direct)",
        ),
    ],
    ids=["default", "named", "all of the file", "with a wire"],
)
def test_buckets_use_what_the_recipe_allows_of_what_the_file_holds(
    overrides: list[str], way: tuple[str, str], told: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run_all(recipe(tmp_path, *overrides), 2, run)
    assert carriers(run) == {way}
    reason = PlanHistory.load(run / "plans.json").plans[-1].reason
    assert told in reason and ("given costs" in reason) == bool(told)
    report = html.unescape((run / "report.html").read_text())
    assert reason in report and f"<td>{way[0]}</td><td>{way[1]}</td>" in report


def test_a_resumed_run_repeats_them_and_other_ones_mean_another_plan(tmp_path: Path) -> None:
    both = ["sync.collectives=native,direct", "sync.allow=float32,bfloat16"]
    whole = run_all(recipe(tmp_path, *both), 2, tmp_path / "whole")[0]
    cases = (
        (18, both, True),
        (27, both, True),
        (27, ["sync.collectives=native,ring"], False),
        (27, [both[0]], False),
    )
    for number, (step, overrides, again) in enumerate(cases):
        run = tmp_path / f"case {number}"
        shutil.copytree(tmp_path / "whole", run)
        (run / "summary.json").unlink()
        checkpoint = run / "checkpoints" / f"step-{step:08}"
        resumed = run_all(recipe(tmp_path, *overrides), 2, run, resume=checkpoint)[0]
        assert (resumed["weights_sha256"] == whole["weights_sha256"]) == again
        history = PlanHistory.load(run / "plans.json")
        planned = [(entry.step, entry.plan.planner) for entry in history.plans]
        kept = [(0, "ddp"), (1, "ddp"), (PLANNED, "optimal")]
        assert planned == (kept if again else [(27, "ddp"), (28, "ddp")])


def engine(recipe: Recipe, cluster: Cluster, rank: Rank | None = None) -> None:
    job = Job(0, cluster)
    if rank is not None:
        job = Job(rank.rank, cluster, rank.group, rank.group, rank.store)
    model = build_model(recipe, tiny_images(), job.device)
    build_sync(recipe, job, model, num_steps=100, loaded=None, run_folder=Path("nowhere")).close()


def test_a_torus_on_unequal_nodes_is_refused_by_name_and_left_out_of_all() -> None:
    uneven = Cluster((2, 1))
    measuring = ["sync.planner=auto", "run.folder=x"]
    named = tiny_recipe(*measuring, "sync.collectives=native,torus")
    with pytest.raises(RecipeError, match=r"sync\.collectives holds torus\. The torus needs as"):
        engine(named, uneven)
    engine(named, Cluster((1,)))
    all_that_works = tiny_recipe(*measuring, "sync.collectives=all")
    run_ranks(lambda rank: engine(all_that_works, uneven, rank), 3)


def test_a_file_that_lacks_what_the_recipe_allows_is_refused(tmp_path: Path) -> None:
    torus = recipe(tmp_path, "sync.collectives=native,torus")
    with pytest.raises(CostError, match="all_reduce by 'torus' with wire 'float32'"):
        run_all(torus, 2, tmp_path / "torus")
    wires = recipe(tmp_path, "sync.collectives=native,ring", "sync.allow=float32,bfloat16")
    with pytest.raises(CostError, match="measured ring with bfloat16 travelling"):
        run_all(wires, 2, tmp_path / "wires")


def test_what_a_file_has_only_links_for_is_by_formula_and_told(tmp_path: Path) -> None:
    link = Link(latency_seconds=1e-9, seconds_per_byte=0.0)
    allowed = "sync.collectives=native,torus"
    run_all(recipe(tmp_path, allowed, links=Links(intra=link)), 2, tmp_path / "run")
    assert carriers(tmp_path / "run") == {("torus", "float32")}
    reason = PlanHistory.load(tmp_path / "run" / "plans.json").plans[-1].reason
    assert reason.endswith("(given costs: native; by formula: torus)")
