"""Which recipe a run goes on with: its folder's and its checkpoint's agree, or the user decides."""

import os
import re
import shlex
from pathlib import Path

import pytest

from run_folders import saved
from slipstream.errors import CheckpointError, RecipeError
from slipstream.train.launch.request import Request, resolve
from slipstream.train.recipe import Recipe, load_recipe

SETTINGS = ["optimizer.learning_rate=0.05", "train.label_smoothing=0.2", "train.epochs=4"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of digits that has saved step 7."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.toml").write_text(load_recipe("digits", SETTINGS).to_toml())
    saved(folder)
    return folder


def resumed(run: Path, *overrides: str, joined: bool = False, **ranks: int) -> Recipe:
    request = Request(overrides=overrides, resume=run, **ranks)  # type: ignore[arg-type]
    return resolve(request, joined=joined).recipe


def edit(run: Path, old: str, new: str) -> None:
    text = (run / "recipe.toml").read_text()
    assert text.count(old) == 1
    (run / "recipe.toml").write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.dataset=fashion", r"data\.dataset=digits and this job has fashion"),
        ("train.seed=5", r"train\.seed=0 and this job has 5"),
        ("train.global_batch_size=128", r"saved with 64 samples a batch .* and this job has 128"),
    ],
)
def test_what_fixes_the_place_in_the_data_cannot_be_changed(
    run: Path, override: str, words: str
) -> None:
    before = (run / "recipe.toml").read_text()
    with pytest.raises(CheckpointError, match=words + ".* without --resume"):
        resumed(run, override, "train.epochs=6")
    assert (run / "recipe.toml").read_text() == before


def test_other_settings_can_be_changed(run: Path) -> None:
    recipe = resumed(run, "train.epochs=6", "train.seed=0")
    assert recipe == load_recipe(run / "recipe.toml", ["train.epochs=6"])


def test_a_recipe_that_ends_early_is_refused_with_its_fields(run: Path) -> None:
    text = (run / "recipe.toml").read_text()
    cut = text.index("\n", text.index("global_batch_size"))
    (run / "recipe.toml").write_text(text[:cut])
    with pytest.raises(RecipeError) as caught:
        resumed(run)
    said = str(caught.value)
    assert str(run / "recipe.toml") in said and "step-00000007" in said
    assert "optimizer.learning_rate is 0.1 in the file and 0.05 in the checkpoint" in said
    assert "train.label_smoothing is 0.0 in the file and 0.2 in the checkpoint" in said
    with pytest.raises(RecipeError, match=r"train\.label_smoothing is"):
        resumed(run, "optimizer.learning_rate=0.05")


def test_both_ways_out_of_an_edited_recipe_work(run: Path) -> None:
    edit(run, "\nepochs = 4", "\nepochs = 9")
    with pytest.raises(RecipeError, match=r"train\.epochs is 9 in the file and 4 in") as caught:
        resumed(run)
    settings = re.findall(r"--set (\S+)", str(caught.value))
    assert [shlex.split(setting) for setting in settings] == [["train.epochs=9"]]
    assert resumed(run, *settings).train.epochs == 9
    assert resumed(run, "train.epochs=5").train.epochs == 5
    (run / "recipe.toml").unlink()
    assert resumed(run).train.epochs == 4
    assert resumed(run / "checkpoints").train.epochs == 4


def test_an_edited_seed_is_refused_although_it_is_set(run: Path) -> None:
    edit(run, "seed = 0", "seed = 5")
    with pytest.raises(
        RecipeError, match=r"5 in the file and 0 .* keeps it\. .* --set train\.seed=0"
    ):
        resumed(run)
    with pytest.raises(CheckpointError, match=r"train\.seed=0 and this job has 5"):
        resumed(run, "train.seed=5")
    assert resumed(run, "train.seed=0").train.seed == 0


def test_a_recipe_that_cannot_be_read_can_be_removed(run: Path) -> None:
    text = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(text[: text.index("label_smoothing") + 3])
    with pytest.raises(RecipeError, match=r"recipe\.toml is not valid TOML.*remove it"):
        resumed(run)
    os.unlink(run / "recipe.toml")
    assert resumed(run) == load_recipe("digits", SETTINGS)


def test_a_mistake_in_set_is_not_blamed_on_the_file(run: Path) -> None:
    with pytest.raises(RecipeError, match=r"there is no field train\.epoch") as caught:
        resumed(run, "train.epoch=9")
    assert "damaged" not in str(caught.value)


def test_who_names_the_cluster_decides_about_it(run: Path) -> None:
    edit(run, "ranks_per_node = 2", "ranks_per_node = 4")
    with pytest.raises(RecipeError, match=r"cluster\.ranks_per_node is 4"):
        resumed(run)
    assert resumed(run, per_node=2)
    assert resumed(run, joined=True)
