"""What a user asked for, which run that means, and the folder of that run."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import (
    CheckpointError,
    DataError,
    PlanError,
    RankFailure,
    RecipeError,
    RunFolderError,
    UnsupportedModel,
)
from slipstream.train.launch.resumed import resumed_recipe
from slipstream.train.looking import looking_at
from slipstream.train.recipe import Recipe, load_recipe
from slipstream.train.run_folder import (
    RECIPE_FILE,
    create_run_folder,
    holds_checkpoint,
    refuse_claimed,
    write_text_atomic,
    writing,
)

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

    @property
    def decided_fields(self) -> set[str]:
        """Dotted names of the recipe's fields that the user gave a value to, beside the recipe."""
        fields = {override.partition("=")[0].strip() for override in self.overrides}
        if self.nodes is not None:
            fields.add("cluster.nodes")
        if self.per_node is not None:
            fields.add("cluster.ranks_per_node")
        return fields


@dataclass(frozen=True)
class Run:
    """A request made definite. ``folder`` is None for a new run whose folder is not made yet."""

    recipe: Recipe
    folder: Path | None
    checkpoint: Path | None


def resolve(request: Request, *, joined: bool = False) -> Run:
    """The run that a request means; nothing is written.

    joined: inside a job, which brings its own cluster. Raises RecipeError, RunFolderError and
    CheckpointError for requests that mean none.
    """
    if request.resume is None:
        recipe = load_recipe(request.recipe or DEFAULT_RECIPE, request.overrides)
        return Run(_named_folder(recipe, request.run_folder), None, None)
    if request.recipe is not None:
        raise RecipeError(
            f"--resume goes on with the run's own recipe: leave out {request.recipe},"
            " and change fields by --set"
        )
    if request.run_folder is not None or "run.folder" in request.decided_fields:
        raise RunFolderError(
            "--resume goes on in the run's own folder: leave out --run-folder and run.folder"
        )
    from slipstream.train.checkpoint import find_checkpoint

    folder = _run_folder_of(request.resume)
    refuse_claimed(folder)
    with looking_at(folder):
        has_checkpoint = holds_checkpoint(folder)
    if not has_checkpoint:
        raise CheckpointError(
            f"run folder {folder} has no checkpoint to go on from: its run ended before it saved"
            " one. Begin anew without --resume, in another --run-folder or after removing this one."
        )
    checkpoint = find_checkpoint(request.resume)
    decided = request.decided_fields
    if joined:
        decided |= {"cluster.nodes", "cluster.ranks_per_node"}
    recipe = resumed_recipe(folder / RECIPE_FILE, checkpoint, request.overrides, decided)
    return Run(recipe, folder, checkpoint)


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
def kept_only_if_begun(folder: Path, *, is_new: bool) -> Iterator[None]:
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


def way_on(folder: Path) -> str:
    """How a run that ended early goes on; empty where nothing was saved."""
    from slipstream.train.checkpoint import find_checkpoint

    try:
        find_checkpoint(folder)
    except CheckpointError:
        return ""
    return f"To go on: slipstream train --resume {shlex.quote(str(folder))}"


@contextmanager
def way_on_told(folder: Path) -> Iterator[None]:
    """Let the error for a rank that was lost say how the run goes on, where it can."""
    try:
        yield
    except RankFailure as error:
        way = way_on(folder)
        if not way:
            raise
        raise RankFailure(f"{str(error).rstrip('.')}. {way}") from error


def _named_folder(recipe: Recipe, run_folder: Path | None) -> Recipe:
    return recipe.replace({"run.folder": str(run_folder)}) if run_folder else recipe


def _run_folder_of(path: Path) -> Path:
    """The run folder that a run folder, its checkpoints or one of those lie in."""
    absolute = Path(os.path.abspath(path))
    with looking_at(path):
        for folder in (absolute, *absolute.parents[:2]):
            if (folder / RECIPE_FILE).is_file() or holds_checkpoint(folder):
                return folder
    known = sorted(str(found.parent) for found in RUNS.glob(f"*/{RECIPE_FILE}"))
    hint = f"; the newest is {known[-1]}" if known else ""
    raise RunFolderError(f"{path} is no run folder: it has no {RECIPE_FILE}{hint}")


def make_folder(recipe: Recipe) -> Path:
    """Make the folder of a new run and leave its recipe there."""
    if recipe.run.folder:
        folder = create_run_folder(Path(recipe.run.folder))
    else:
        folder = create_run_folder(_free_name(recipe.name))
    with writing(folder):
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
