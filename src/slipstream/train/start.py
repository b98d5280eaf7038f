"""From a command line to a run: which recipe, which folder, which ranks.

Everything that a user can have wrong is looked at here, before any rank works and before anything
is written. Then the run either starts its ranks on this machine or joins the job around it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.cluster import Cluster
from slipstream.errors import (
    CheckpointError,
    DataError,
    PlanError,
    RecipeError,
    RunFolderError,
    UnsupportedModel,
)
from slipstream.train.job import JoinedJob, shape
from slipstream.train.recipe import Recipe, load_recipe
from slipstream.train.run_folder import create_run_folder, write_text_atomic
from slipstream.train.worker import TRAINING, call_task

RECIPE_FILE = "recipe.toml"
SUMMARY_FILE = "summary.json"
DEFAULT_RECIPE = "fashion"
RUNS = Path("runs")


@dataclass(frozen=True)
class Request:
    """What the user asked for; None where nothing was said."""

    recipe: str | None = None
    overrides: Sequence[str] = ()
    nodes: int | None = None
    per_node: int | None = None
    run_folder: Path | None = None
    resume: Path | None = None


@dataclass(frozen=True)
class Run:
    """A request made definite. ``folder`` is None for a new run whose folder is not made yet."""

    recipe: Recipe
    folder: Path | None
    checkpoint: Path | None


def resolve(request: Request) -> Run:
    """The run that a request means; nothing is written.

    Raises RecipeError, RunFolderError and CheckpointError for requests that mean none.
    """
    if request.resume is None:
        recipe = load_recipe(request.recipe or DEFAULT_RECIPE, request.overrides)
        return Run(_named_folder(recipe, request.run_folder), None, None)
    if request.recipe is not None:
        raise RecipeError(
            f"--resume goes on with the run's own recipe: leave out {request.recipe},"
            " and change fields by --set"
        )
    if request.run_folder is not None or any(
        override.partition("=")[0].strip() == "run.folder" for override in request.overrides
    ):
        raise RunFolderError(
            "--resume goes on in the run's own folder: leave out --run-folder and run.folder"
        )
    from slipstream.train.checkpoint import find_checkpoint

    folder = _run_folder_of(request.resume)
    checkpoint = find_checkpoint(request.resume)
    return Run(load_recipe(folder / RECIPE_FILE, request.overrides), folder, checkpoint)


def train_here(request: Request) -> dict[str, Any]:
    """Train with ranks started on this machine; the summary.

    Raises SlipstreamError for whatever ends the run, and launch.Interrupted after a signal.
    """
    run = resolve(request)
    wanted = {"cluster.nodes": request.nodes, "cluster.ranks_per_node": request.per_node}
    recipe = run.recipe.replace({key: ranks for key, ranks in wanted.items() if ranks is not None})
    recipe.validate_for(recipe.world_size)
    _tell_ignored(recipe)
    _prepare_data(recipe)
    from slipstream.train.launch import Interrupted, launch

    folder = run.folder or _make_folder(recipe)
    cluster = Cluster.regular(recipe.cluster.nodes, recipe.cluster.ranks_per_node)
    try:
        with _kept_only_if_begun(folder, is_new=run.folder is None):
            launch(recipe, run_folder=folder, cluster=cluster, resume=run.checkpoint)
    except Interrupted as stop:
        raise Interrupted(stop.signal_number, f"{stop} {_way_on(folder)}") from stop
    return read_summary(folder)


def train_in_job(request: Request, job: JoinedJob) -> dict[str, Any]:
    """Train as one rank of a job that torchrun or srun started; the summary, on every rank.

    Raises SlipstreamError; what rank 0 or a node's first rank cannot do fails all, naming it.
    """
    os.environ.update(job.variables)
    run = resolve(request)
    if job.world_size == 1:
        meeting = None
        cluster = shape((1,), request.nodes, request.per_node)
    else:
        from slipstream.train.meeting import Meeting

        meeting = Meeting(job, run.recipe.sync.timeout_seconds)
        cluster = shape(meeting.ranks_per_node(), request.nodes, request.per_node)
    recipe = run.recipe
    if len(set(cluster.ranks_per_node)) == 1:
        recipe = recipe.replace(
            {
                "cluster.nodes": cluster.nodes,
                "cluster.ranks_per_node": cluster.ranks_per_node[0],
            }
        )
    recipe.validate_for(cluster.world_size)

    def make_folder() -> str:
        _tell_ignored(recipe)
        return str(run.folder or _make_folder(recipe))

    def prepare_data() -> str:
        _prepare_data(recipe)
        return ""

    if meeting is None:
        prepare_data()
        folder = Path(make_folder())
    else:
        meeting.from_first_of_node("prepare the data", prepare_data)
        folder = Path(meeting.from_rank_zero("make the run folder", make_folder))
    with _kept_only_if_begun(folder, is_new=run.folder is None and job.rank == 0):
        return call_task(
            TRAINING, recipe, run_folder=folder, cluster=cluster, resume=run.checkpoint
        )


def read_summary(run_folder: Path) -> dict[str, Any]:
    """What a finished run left in its folder. Raises RunFolderError where that is nothing."""
    path = run_folder / SUMMARY_FILE
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"the run ended without a readable {path}: {error}") from error
    if not isinstance(summary, dict):
        raise RunFolderError(f"{path} is damaged: it holds no JSON object")
    return summary


@contextmanager
def _kept_only_if_begun(folder: Path, *, is_new: bool) -> Iterator[None]:
    """Empty the folder of a new run that a user's mistake kept from its first step.

    So the command works once it is put right, and a name is not taken by a run that never was.
    """
    try:
        yield
    except (RecipeError, DataError, PlanError, UnsupportedModel):
        metrics, checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
        has_metrics = metrics.is_file() and metrics.stat().st_size > 0
        has_checkpoints = checkpoints.is_dir() and any(checkpoints.glob("step-*"))
        if is_new and not has_metrics and not has_checkpoints:
            shutil.rmtree(folder)
        raise


def _way_on(folder: Path) -> str:
    """How a run that was stopped goes on."""
    from slipstream.train.checkpoint import find_checkpoint

    try:
        find_checkpoint(folder)
    except CheckpointError:
        return "Nothing was saved."
    return f"To go on: slipstream train --resume {shlex.quote(str(folder))}"


def _named_folder(recipe: Recipe, run_folder: Path | None) -> Recipe:
    return recipe.replace({"run.folder": str(run_folder)}) if run_folder else recipe


def _run_folder_of(path: Path) -> Path:
    """The run folder that a run folder, its checkpoints or one of those lie in."""
    absolute = Path(os.path.abspath(path))
    for folder in (absolute, *absolute.parents[:2]):
        if (folder / RECIPE_FILE).is_file():
            return folder
    known = sorted(str(found.parent) for found in RUNS.glob(f"*/{RECIPE_FILE}"))
    hint = f"; the newest is {known[-1]}" if known else ""
    raise RunFolderError(f"{path} is no run folder: it has no {RECIPE_FILE}{hint}")


def _make_folder(recipe: Recipe) -> Path:
    """Make the folder of a new run and leave its recipe there."""
    if recipe.run.folder:
        folder = create_run_folder(Path(recipe.run.folder))
    else:
        folder = create_run_folder(_free_name(recipe.name))
    write_text_atomic(folder / RECIPE_FILE, recipe.to_toml())
    return folder


def _free_name(name: str) -> Path:
    """A new folder under ``runs``, named by recipe and time; two jobs of one second get two."""
    stem = RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(1, 1000):
        path = stem if attempt == 1 else stem.with_name(f"{stem.name}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RunFolderError(
                f"run folder {path} cannot be made: {error.strerror};"
                " choose another place with --run-folder"
            ) from error
        return path
    raise RunFolderError(f"there are too many runs named {stem}: choose one with --run-folder")


def _prepare_data(recipe: Recipe) -> None:
    from slipstream.data import prepare

    prepare(recipe.data.dataset, Path(recipe.data.folder) if recipe.data.folder else None)


def _tell_ignored(recipe: Recipe) -> None:
    for note in recipe.ignored():
        print(f"slipstream: note: {note}", file=sys.stderr)
