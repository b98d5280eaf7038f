"""Recipes: everything that decides a training run, as one frozen value that TOML files hold.

    recipe = load_recipe("fashion", ["train.epochs=3"])
    recipe.validate_for(world_size=4)
    text = recipe.to_toml()        # resolved and commented; reloads equal

A wrong name or value is a RecipeError that names file, field and the nearest right one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from slipstream.errors import RecipeError
from slipstream.train.recipe.settings import (
    AugmentSettings,
    CheckpointSettings,
    ClusterSettings,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    RunSettings,
    ScheduleSettings,
    Settings,
    SyncSettings,
    TrainSettings,
)
from slipstream.train.recipe.sparse import SparseSettings
from slipstream.train.recipe.text import (
    default_of,
    explain,
    field_at_fault,
    field_names,
    nearest,
    override_value,
    shown,
    write_toml,
)


class Recipe(Settings):
    """A training run in full: what is trained, how, on which ranks, and what it leaves behind."""

    name: str = Field(
        min_length=1,
        max_length=64,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        description="letters, digits, '_', '.', '-'; part of the run folder's name",
    )
    data: DataSettings
    augment: AugmentSettings = AugmentSettings()
    model: ModelSettings = ModelSettings()
    train: TrainSettings = TrainSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    sync: SyncSettings = SyncSettings()
    sparse: SparseSettings = SparseSettings()
    cluster: ClusterSettings = ClusterSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    run: RunSettings = RunSettings()

    @model_validator(mode="after")
    def _warmup_fits(self) -> Recipe:
        if self.schedule.warmup_epochs > self.train.epochs:
            raise ValueError(
                f"schedule.warmup_epochs={self.schedule.warmup_epochs:g} is longer than"
                f" train.epochs={self.train.epochs}: set schedule.warmup_epochs="
                f"{self.train.epochs} or less"
            )
        return self

    @property
    def world_size(self) -> int:
        """Ranks that the cluster table asks for."""
        return self.cluster.nodes * self.cluster.ranks_per_node

    def to_toml(self) -> str:
        """The whole recipe as commented TOML; loading it gives an equal recipe."""
        return write_toml(self)

    def replace(self, overrides: Mapping[str, object]) -> Recipe:
        """A copy with fields such as ``"cluster.nodes"`` set to new, already typed values.

        Raises RecipeError like ``load_recipe``.
        """
        document = self.model_dump()
        for key, value in overrides.items():
            _put(document, key, value)
        source = ", ".join(f"{key}={value}" for key, value in overrides.items())
        return _validate(document, {}, f"recipe {self.name} with {source}")

    def validate_for(self, world_size: int) -> None:
        """Raise RecipeError if the batch cannot be shared evenly by ``world_size`` ranks."""
        batch = self.train.global_batch_size
        share = world_size * self.train.accumulation_steps
        if batch % share == 0:
            return
        lower = batch // share * share
        choices = [lower, lower + share] if lower else [share]
        closest = min(choices, key=lambda choice: abs(choice - batch))
        raise RecipeError(
            f"train.global_batch_size={batch} cannot be divided by {world_size} ranks x"
            f" {self.train.accumulation_steps} accumulation steps = {share}:"
            f" set train.global_batch_size={closest} or change the number of ranks"
        )

    @property
    def corrects_momentum(self) -> bool:
        """Whether the engine, and not the optimizer, applies the momentum."""
        return self.sparse.correct_momentum and self.sync.may_be_sparse

    def ignored(self) -> list[str]:
        """Sentences, one for each setting that has no effect in this recipe, or not its whole."""
        conditions = {
            "model.width": (self.model.name == "resnet_small", 'model.name="resnet_small"'),
            "schedule.step_epochs": (self.schedule.kind == "step", 'schedule.kind="step"'),
            "schedule.step_factor": (self.schedule.kind == "step", 'schedule.kind="step"'),
            "schedule.power": (self.schedule.kind == "polynomial", 'schedule.kind="polynomial"'),
            "schedule.final_fraction": (self.schedule.kind != "step", 'schedule.kind="cosine"'),
            "sync.collectives": (self.sync.chooses, 'sync.planner="auto" and no sync.plan_file'),
            "sparse.density": (
                self.sync.may_be_sparse,
                'no sync.plan_file, and a sync.planner other than "pipelined" and "four_minutes"',
            ),
            "sync.allow": (self.sync.may_round, 'sync.planner="auto" and no sync.plan_file'),
            "sync.cluster_file": (self.sync.measures, 'sync.planner="auto" and no sync.plan_file'),
            "sync.first_bytes": (self.sync.planner == "fixed", 'sync.planner="fixed"'),
            "sync.cap_bytes": (self.sync.planner == "fixed", 'sync.planner="fixed"'),
            "sync.last_bytes": (self.sync.planner == "fixed", 'sync.planner="fixed"'),
        }
        notes = []
        for key, (used, need) in conditions.items():
            table, field = key.split(".")
            value = getattr(getattr(self, table), field)
            if not used and value != default_of(Recipe, key):
                written = shown(value) if isinstance(value, tuple) else value
                notes.append(f"{key}={written} has no effect here: it needs {need}")
        notes += self.sync.never_used()
        warmup, half = self.schedule.warmup_epochs, self.train.epochs / 2
        if warmup > half:
            notes.append(
                f"schedule.warmup_epochs={warmup:g} is cut to {half:g}: a warm-up takes at most"
                f" half of train.epochs={self.train.epochs}"
            )
        return notes


def recipe_names() -> tuple[str, ...]:
    """Names of the recipes in the package, sorted."""
    entries = files("slipstream").joinpath("recipes").iterdir()
    return tuple(sorted(entry.name[:-5] for entry in entries if entry.name.endswith(".toml")))


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of that name in the package, or of that TOML file, with overrides put in.

    An override is ``table.field=value``, its value in TOML or, for text, bare. A shipped name wins
    over a file of the same name (``./fashion`` is the file). Raises RecipeError.
    """
    text, where = _read(name_or_path)
    return parse_recipe(text, where, overrides)


def parse_recipe(text: str, where: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in ``text``; ``where`` names it in errors. Raises RecipeError."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{where} is not valid TOML: {error}") from error
    recipe = _validate(document, {}, where)
    if not overrides:
        return recipe
    sources: dict[str, str] = {}
    for override in overrides:
        key, separator, value = (part.strip() for part in override.partition("="))
        if not separator or not key:
            raise RecipeError(
                f"--set {override} is not of the form table.field=value, as in train.epochs=3"
            )
        if key not in field_names(Recipe):
            raise RecipeError(f"--set {override}: there is no field {key}" + nearest(Recipe, key))
        _put(document, key, override_value(Recipe, key, value))
        sources[key] = f"--set {override}"
    return _validate(document, sources, " ".join(sources.values()))


def _put(document: dict[str, Any], key: str, value: object) -> None:
    """Set ``table.field`` or a field at the top of a document, in place."""
    table, _, field = key.rpartition(".")
    target = document.setdefault(table, {}) if table else document
    target[field] = value


def _validate(document: Mapping[str, object], sources: Mapping[str, str], elsewhere: str) -> Recipe:
    """The recipe in a document; ``sources`` says where single fields came from."""
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        where = sources.get(field_at_fault(error), elsewhere)
        raise RecipeError(f"{where}: {explain(Recipe, error)}") from error


def _read(name_or_path: str | Path) -> tuple[str, str]:
    """Text of a recipe, and how to call it in an error."""
    shipped = recipe_names()
    if name_or_path in shipped:
        resource = files("slipstream").joinpath("recipes", f"{name_or_path}.toml")
        return resource.read_text(encoding="utf-8"), f"recipe {name_or_path}"
    path = Path(name_or_path)
    try:
        return path.read_text(encoding="utf-8"), f"recipe {path}"
    except FileNotFoundError as error:
        guess = nearest(shipped, str(name_or_path))
        raise RecipeError(f"there is no recipe or file {name_or_path}{guess}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"recipe {path} is not a text in UTF-8") from error
    except (OSError, ValueError) as error:
        raise RecipeError(f"recipe {path} cannot be read: {error}") from error
