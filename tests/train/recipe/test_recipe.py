"""Recipes: what is shipped loads, what is wrong is refused by name, what is written reloads."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import RecipeError
from slipstream.train.recipe import Recipe, load_recipe, parse_recipe, recipe_names
from slipstream.train.recipe.text import field_names
from slipstream.wires import DENSE_WIRES

MINIMAL = 'name = "mine"\n[data]\ndataset = "digits"\n'


def refusal(text: str = MINIMAL, overrides: tuple[str, ...] = (), where: str = "mine.toml") -> str:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, where, overrides)
    return str(caught.value)


def test_the_shipped_recipes_load_and_fit_their_own_cluster() -> None:
    assert recipe_names() == ("digits", "fashion")
    for name in recipe_names():
        recipe = load_recipe(name)
        assert recipe.name == name
        assert recipe.ignored() == []
        recipe.validate_for(recipe.world_size)


def test_fashion_trains_on_two_nodes_of_two_ranks() -> None:
    recipe = load_recipe("fashion")
    assert (recipe.cluster.nodes, recipe.cluster.ranks_per_node) == (2, 2)
    assert recipe.data.dataset == "fashion"
    assert recipe.optimizer.nesterov


def test_overrides_change_only_their_field() -> None:
    plain = load_recipe("fashion")
    changed = load_recipe("fashion", ["train.epochs=3", "model.name=resnet18", "run.folder=7"])
    assert changed.train.epochs == 3
    assert changed.model.name == "resnet18"
    assert changed.run.folder == "7"
    assert changed.optimizer == plain.optimizer
    assert plain == load_recipe("fashion")


def test_a_whole_number_is_good_for_a_real_field() -> None:
    assert load_recipe("digits", ["optimizer.learning_rate=1"]).optimizer.learning_rate == 1.0


def test_a_later_override_of_a_field_wins() -> None:
    assert load_recipe("digits", ["train.seed=1", "train.seed=2"]).train.seed == 2


def test_overrides_are_judged_together() -> None:
    overrides = ["optimizer.momentum=0", "optimizer.nesterov=false"]
    assert load_recipe("digits", overrides).optimizer.momentum == 0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.epoch=3", ["train.epoch", "did you mean train.epochs?"]),
        ("epochs=3", ["did you mean train.epochs?"]),
        ("optimiser.momentum=0.5", ["did you mean optimizer.momentum?"]),
        ("train=3", ["train is a table of train.epochs, "]),
        ("zzz.q=1", ["the tables are data, augment, model"]),
        ("train.zzzzzz=1", ["there are train.epochs, train.global_batch_size"]),
        ("train.epochs=three", ['"three" must be a whole number, at least 1', "train.epochs=5"]),
        ("train.epochs=0", ["at least 1; try train.epochs=1"]),
        ("train.epochs=2.7", ["try train.epochs=3"]),
        ("train.epochs=true", ["a whole number"]),
        ("train.epochs=1\nx = 3", ["a whole number"]),
        ("checkpoint.grace_seconds=9999", ["at most 3600; try checkpoint.grace_seconds=3600"]),
        ("optimizer.learning_rate=nan", ["above 0; try optimizer.learning_rate=0.1"]),
        ("optimizer.learning_rate=inf", ["try optimizer.learning_rate=0.1"]),
        ("augment.horizontal_flip=yes", ["true or false; try augment.horizontal_flip=true"]),
        (
            "sync.collectives=tours",
            ['holds "tours" and takes all or native', "did you mean torus?"],
        ),
        ("sync.collectives=native,rings", ['holds "rings"', "did you mean ring?"]),
        ("sync.collectives=[]", ["sync.collectives is empty", "such as native"]),
        ("sync.collectives=3", ['sync.collectives holds "3"']),
        ("sync.collectives=ring,ring", ["holds ring 2 times"]),
        ("sync.collective=ring", ["did you mean sync.collectives?"]),
        ("sync.allow=bfloat", ["takes float32 or bfloat16", "did you mean bfloat16?"]),
        ("sync.allow=", ['sync.allow holds ""']),
        ("sync.allow=bfloat16", ["native can send float32 only: allow float32, or take", "direct"]),
        ("sync.planner=wfpb", ["or ddp or wfbp or single or fixed; did you mean wfbp?"]),
        ("data.dataset=fashon", ["did you mean fashion?"]),
        ("name=../up", ["name=", "letters, digits"]),
        ("optimizer.momentum=0", ["optimizer.nesterov=false"]),
        ("schedule.warmup_epochs=99", ["longer than train.epochs=5", "schedule.warmup_epochs=5"]),
        ("train.epochs", ["--set train.epochs is not of the form table.field=value"]),
        ("=3", ["is not of the form"]),
    ],
)
def test_a_wrong_override_is_refused_with_the_nearest_right_one(
    override: str, words: list[str]
) -> None:
    message = refusal(overrides=("train.seed=1", override))
    assert message.startswith(("--set " + override, "--set train.seed=1 --set " + override))
    for word in words:
        assert word in message


def test_only_the_override_at_fault_is_named() -> None:
    message = refusal(overrides=("train.seed=1", "train.epochs=0"))
    assert message.startswith("--set train.epochs=0: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('name = "mine"', ["data is missing"]),
        (MINIMAL + "foldr = 1", ["there is no field data.foldr; did you mean data.folder?"]),
        (MINIMAL + "[trian]\nepochs = 1", ["there is no field trian", "there are"]),
        ('name = "mine"\ndata = 3', ["data must be a table, not 3"]),
        (MINIMAL + "[train]\nepochs = 0\nseed = -1", ["train.epochs=0", "(1 more to put right)"]),
        (MINIMAL + "[train]\nepochs = 2024-01-01", ["train.epochs=", "a whole number"]),
        ("x =", ["is not valid TOML"]),
        (MINIMAL + "[sync]\ncollectives = 3", ["must be a list of all or native", '["native"]']),
        (
            MINIMAL + '[sync]\ncollectives = "tours"',
            ["a list of", 'try sync.collectives=["torus"]'],
        ),
        (MINIMAL + "[sync]\ncollectives = [3]", ["sync.collectives holds 3 and takes all or"]),
        (
            MINIMAL + '[sync]\nplanner = "four_minutes"\nallow = ["float16"]',
            ["hierarchical, ring can send float32 or bfloat16 only"],
        ),
        (MINIMAL + '[sync]\nplan_file = "p"\nplanner = "wfbp"', ["exclude each other"]),
    ],
)
def test_a_wrong_file_is_refused_with_file_and_field(text: str, words: list[str]) -> None:
    message = refusal(text)
    assert message.startswith("mine.toml")
    for word in words:
        assert word in message or (word == "there are" and "the tables are" in message)


def test_unknown_recipes_are_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no recipe or file fasion; did you mean fashion\?"):
        load_recipe("fasion")
    with pytest.raises(RecipeError, match="there are digits and fashion"):
        load_recipe("qqq")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="not a text in UTF-8"):
        load_recipe(binary)


def test_a_file_is_loaded_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(MINIMAL)
    assert load_recipe(path) == load_recipe(str(path)) == parse_recipe(MINIMAL, "x")


def test_the_written_recipe_reloads_equal_and_explains_every_field() -> None:
    recipe = load_recipe("fashion", ["train.epochs=3"])
    text = recipe.to_toml()
    assert parse_recipe(text, "x") == recipe
    for key in field_names(Recipe):
        assert f"{key.rpartition('.')[2]} = " in text
    assert text.count("  # ") == len(field_names(Recipe))


@given(
    folder=st.text(st.characters(exclude_categories=["Cs"])),
    rate=st.floats(min_value=1e-300, max_value=1e300),
    seed=st.integers(0, 2**63 - 1),
    flip=st.booleans(),
    collectives=st.lists(st.sampled_from(["all", *DENSE_WIRES]), min_size=1, unique=True),
)
def test_any_value_survives_writing(
    folder: str, rate: float, seed: int, flip: bool, collectives: list[str]
) -> None:
    recipe = load_recipe("digits").replace(
        {
            "data.folder": folder,
            "optimizer.learning_rate": rate,
            "train.seed": seed,
            "augment.horizontal_flip": flip,
            "sync.collectives": collectives,
        }
    )
    assert recipe.sync.collectives == tuple(collectives)
    assert parse_recipe(recipe.to_toml(), "x") == recipe


def test_replace_checks_like_loading() -> None:
    recipe = load_recipe("digits")
    assert recipe.replace({"cluster.nodes": 3, "name": "other"}).cluster.nodes == 3
    with pytest.raises(RecipeError, match=r"cluster\.nodes=0"):
        recipe.replace({"cluster.nodes": 0})


def test_a_recipe_cannot_be_changed_in_place() -> None:
    recipe = load_recipe("digits")
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.epochs = 1


@pytest.mark.parametrize(("world_size", "closest"), [(3, 255), (7, 259), (512, 512), (300, 300)])
def test_a_batch_that_ranks_cannot_share_is_refused(world_size: int, closest: int) -> None:
    recipe = load_recipe("fashion", ["train.global_batch_size=256"])
    with pytest.raises(RecipeError, match=f"set train.global_batch_size={closest} "):
        recipe.validate_for(world_size)
    recipe.validate_for(4)


def test_accumulation_counts_in_the_share() -> None:
    recipe = load_recipe("fashion", ["train.global_batch_size=256", "train.accumulation_steps=3"])
    with pytest.raises(RecipeError, match="4 ranks x 3 accumulation steps = 12"):
        recipe.validate_for(4)


def test_settings_without_effect_are_told() -> None:
    overrides = ["model.name=resnet18", "model.width=3", "sync.cap_bytes=5", "schedule.power=1"]
    notes = load_recipe("digits", overrides).ignored()
    assert [note.split("=")[0] for note in notes] == [
        "model.width",
        "schedule.power",
        "sync.cap_bytes",
    ]


def test_a_list_is_written_as_in_toml_or_with_commas() -> None:
    for written in ('["native", "direct"]', "native,direct", "native, direct"):
        recipe = load_recipe("digits", [f"sync.collectives={written}"])
        assert recipe.sync.collectives == ("native", "direct")
    assert load_recipe("digits", ["sync.collectives=all"]).sync.named_collectives == (*DENSE_WIRES,)
    plain = load_recipe("digits").sync
    assert (plain.collectives, plain.allow) == (("native",), ("float32",))


def test_every_dense_collective_can_be_named_in_a_recipe() -> None:
    for name, wires in DENSE_WIRES.items():
        for wire in wires:
            both = [f"sync.collectives={name}", f"sync.allow={wire}"]
            sync = load_recipe("digits", both).sync
            assert (sync.named_collectives, sync.allow) == ((name,), (wire,))


@pytest.mark.parametrize(
    ("overrides", "notes"),
    [
        (["sync.collectives=all", "sync.allow=float16"], []),
        (["sync.allow=float32,bfloat16"], ["sync: bfloat16 is allowed and never travels: native"]),
        (
            ["sync.collectives=native,ring", "sync.allow=bfloat16"],
            ["sync: native carries nothing: it sends float32 only"],
        ),
        (
            ["sync.planner=ddp", "sync.collectives=ring"],
            ['sync.collectives=["ring"] has no effect'],
        ),
        (["sync.planner=pipelined", "sync.allow=bfloat16"], ["sync.allow="]),
        (["sync.planner=four_minutes", "sync.collectives=torus"], ["sync.collectives="]),
        (["sync.planner=four_minutes", "sync.allow=bfloat16"], []),
        (["sync.plan_file=plan.json", "sync.allow=bfloat16"], ["sync.allow="]),
    ],
)
def test_what_is_allowed_without_effect_is_told(overrides: list[str], notes: list[str]) -> None:
    told = load_recipe("digits", overrides).ignored()
    assert len(told) == len(notes)
    for sentence, start in zip(told, notes, strict=True):
        assert sentence.startswith(start)


def test_a_warm_up_that_is_cut_is_told() -> None:
    [note] = load_recipe("digits", ["train.epochs=1"]).ignored()
    assert note.startswith("schedule.warmup_epochs=1 is cut to 0.5")
    assert load_recipe("digits", ["train.epochs=2"]).ignored() == []
