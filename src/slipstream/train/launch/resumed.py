"""The recipe of a run that goes on: its folder's, checked against the one in its checkpoint.

Both are the same as a run leaves them. Where they are not, the file was edited or damaged, or the
run went on with other settings after the checkpoint was saved; then the user says which hold.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Collection, Sequence
from functools import reduce
from pathlib import Path

from slipstream.errors import RecipeError
from slipstream.train.recipe import Recipe, load_recipe, parse_recipe
from slipstream.train.recipe.text import field_names

_KEPT = ("data.dataset", "train.seed", "train.global_batch_size")
"""Without these a run would lose its place in the data."""


def resumed_recipe(
    path: Path, checkpoint: Path, overrides: Sequence[str], decided: Collection[str]
) -> Recipe:
    """The recipe of the file `path` with overrides put in; the checkpoint's where it is missing.

    decided: dotted names of the fields in which file and checkpoint may differ, since the user said
    what they shall be. Raises RecipeError, which names file and fields, for a file that cannot be
    read or differs in others, and CheckpointError for overrides by which the run would lose its
    place in the data.
    """
    from slipstream.train.checkpoint.manifest import read_manifest

    text = read_manifest(checkpoint).recipe
    if text is None:
        return load_recipe(path, overrides)
    where = f"the recipe in {checkpoint}"
    saved = parse_recipe(text, where)
    if os.path.lexists(path):
        _require_equal(_on_file(path), saved, path, checkpoint, decided)
        recipe = load_recipe(path, overrides)
    else:
        recipe = parse_recipe(text, where, overrides)
    _require_same_samples(recipe, saved, checkpoint)
    return recipe


def _on_file(path: Path) -> Recipe:
    try:
        return load_recipe(path)
    except RecipeError as error:
        raise RecipeError(
            f"{error}; if the file is damaged, remove it: the checkpoint holds the recipe, too"
        ) from error


def _require_equal(
    on_file: Recipe, saved: Recipe, path: Path, checkpoint: Path, decided: Collection[str]
) -> None:
    differences, settings = [], []
    for key in field_names(Recipe):
        then, now = _shown(saved, key), _shown(on_file, key)
        if then != now and key not in decided:
            kept = key in _KEPT
            why = ", and a resumed run keeps it" if kept else ""
            differences.append(f"{key} is {now} in the file and {then} in the checkpoint{why}")
            settings.append(f"--set {shlex.quote(f'{key}={then if kept else now}')}")
    if differences:
        raise RecipeError(
            f"{path} is not the recipe that checkpoint {checkpoint} was saved with:"
            f" {'; '.join(differences)}. To go on by the checkpoint, which holds the recipe, too,"
            f" remove the file; to go on by the file, add {' '.join(settings)}"
        )


def _require_same_samples(recipe: Recipe, saved: Recipe, checkpoint: Path) -> None:
    """What `require_layout` checks later, as far as recipes tell: before data is fetched."""
    from slipstream.train.checkpoint.layout import BATCH, DATASET, SEED, require_same

    require_same(
        checkpoint,
        (
            (DATASET, saved.data.dataset, recipe.data.dataset),
            (SEED, saved.train.seed, recipe.train.seed),
            (BATCH, saved.train.global_batch_size, recipe.train.global_batch_size),
        ),
    )


def _shown(recipe: Recipe, key: str) -> str:
    """The value of the field `table.field`, as it would be written in a recipe."""
    value: object = reduce(getattr, key.split("."), recipe)
    return json.dumps(value, ensure_ascii=False)
