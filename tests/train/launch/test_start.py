"""From a request to a run: which recipe and folder, and what is refused before anything exists."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from run_folders import saved
from slipstream.cluster import Cluster
from slipstream.errors import (
    CheckpointError,
    DataError,
    LaunchError,
    RankFailure,
    RecipeError,
    RunFolderError,
    SlipstreamError,
)
from slipstream.train.launch.interruption import Interrupted
from slipstream.train.launch.joined import find_job
from slipstream.train.launch.request import Request, read_summary, resolve
from slipstream.train.launch.start import train_here, train_in_job
from slipstream.train.recipe import Recipe, load_recipe
from slipstream.train.run_folder import claim_run_folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Ranks:
    """Stands for the ranks: notes what they were told, and ends as wanted."""

    def __init__(self, error: Exception | None = None, leaves: str = "") -> None:
        self.error = error
        self.leaves = leaves
        self.told: dict[str, Any] = {}

    def __call__(self, recipe: Recipe, *, run_folder: Path, **told: Any) -> dict[str, Any]:
        self.told = {"recipe": recipe, "run_folder": run_folder, **told}
        if self.leaves:
            (run_folder / self.leaves).write_text("{}\n")
        if self.error is not None:
            raise self.error
        summary = {"run_folder": str(run_folder)}
        (run_folder / "summary.json").write_text(json.dumps(summary))
        return summary


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    ranks = Ranks()
    monkeypatch.setattr("slipstream.train.launch.local.launch", ranks)
    return ranks


def a_run(folder: str, *overrides: str) -> Path:
    """A run folder as a run leaves it before it saves anything."""
    path = Path(folder)
    path.mkdir(parents=True)
    (path / "recipe.toml").write_text(load_recipe("digits", overrides).to_toml())
    return path


def a_checkpoint(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of `run`, which is found whatever is looked for."""
    checkpoint = saved(run)
    monkeypatch.setattr("slipstream.train.checkpoint.find_checkpoint", lambda path: checkpoint)
    return checkpoint


def test_the_default_recipe_is_fashion() -> None:
    assert resolve(Request()).recipe == load_recipe("fashion")


def test_a_run_gets_its_folder_recipe_and_cluster(ranks: Ranks) -> None:
    request = Request("digits", ["train.epochs=2"], nodes=2, per_node=2, run_folder=Path("mine"))
    summary = train_here(request)
    assert summary == {"run_folder": os.path.abspath("mine")}
    assert ranks.told["cluster"] == Cluster((2, 2))
    assert ranks.told["resume"] is None
    recipe = ranks.told["recipe"]
    assert (recipe.train.epochs, recipe.cluster.nodes, recipe.run.folder) == (2, 2, "mine")
    assert load_recipe("mine/recipe.toml") == recipe


def test_only_the_given_part_of_the_cluster_changes(ranks: Ranks) -> None:
    train_here(Request("fashion", ["data.dataset=digits"], per_node=1, run_folder=Path("mine")))
    assert ranks.told["cluster"] == Cluster((1, 1))


def test_runs_of_one_second_get_two_folders(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "20300101-000000")
    folders = [Path(train_here(Request("digits"))["run_folder"]) for _ in range(3)]
    names = ["digits-20300101-000000", "digits-20300101-000000-2", "digits-20300101-000000-3"]
    assert [folder.name for folder in folders] == names
    assert {folder.parent.name for folder in folders} == {"runs"}


def test_a_folder_with_content_is_refused_untouched(ranks: Ranks) -> None:
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("years of work")
    with pytest.raises(RunFolderError, match="mine exists and is not empty"):
        train_here(Request("digits", run_folder=Path("mine")))
    assert [path.name for path in Path("mine").iterdir()] == ["thesis.tex"]
    assert ranks.told == {}


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (Request("digits", nodes=3, per_node=1), RecipeError),
        (Request("digits", ["data.dataset=fashion", "data.folder=nowhere"]), DataError),
        (Request("digts"), RecipeError),
        (Request(resume=Path("nowhere")), RunFolderError),
    ],
)
def test_a_mistake_is_found_before_anything_is_written(
    ranks: Ranks, request_: Request, error: type[SlipstreamError]
) -> None:
    with pytest.raises(error):
        train_here(request_)
    assert list(Path().iterdir()) == []
    assert ranks.told == {}


def test_runs_cannot_be_made_where_a_file_is_in_the_way(ranks: Ranks) -> None:
    Path("runs").write_text("a file")
    with pytest.raises(RunFolderError, match="--run-folder"):
        train_here(Request("digits"))


def test_a_run_that_a_mistake_kept_from_starting_leaves_no_folder(ranks: Ranks) -> None:
    ranks.error = RecipeError("rank 0: model.name='x' is unknown")
    with pytest.raises(RecipeError):
        train_here(Request("digits", run_folder=Path("mine")))
    assert not Path("mine").exists()


@pytest.mark.parametrize("error", [RecipeError("late"), RankFailure("rank 1 is gone")])
def test_a_run_that_had_begun_keeps_its_folder(ranks: Ranks, error: Exception) -> None:
    ranks.error = error
    ranks.leaves = "metrics.jsonl"
    with pytest.raises(type(error)):
        train_here(Request("digits", run_folder=Path("mine")))
    assert Path("mine/metrics.jsonl").exists()


def test_a_failure_of_ranks_keeps_the_folder_with_its_logs(ranks: Ranks) -> None:
    ranks.error = LaunchError("rank 1 was ended by SIGSEGV")
    with pytest.raises(LaunchError):
        train_here(Request("digits", run_folder=Path("mine")))
    assert Path("mine/recipe.toml").exists()


def test_an_interrupted_run_says_how_to_go_on(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.error = Interrupted(15, "Training stopped.")
    with pytest.raises(Interrupted, match=r"^Training stopped\. Nothing was saved\.$"):
        train_here(Request("digits", run_folder=Path("mine")))
    a_checkpoint(Path("an other"), monkeypatch)
    with pytest.raises(Interrupted) as caught:
        train_here(Request("digits", run_folder=Path("my own")))
    way_on = f"To go on: slipstream train --resume '{os.path.abspath('my own')}'"
    assert str(caught.value) == f"Training stopped. {way_on}"


def test_a_run_that_lost_a_rank_says_how_to_go_on(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_checkpoint(Path("another"), monkeypatch)
    ranks.error = RankFailure("rank 1 was ended by SIGKILL.")
    with pytest.raises(RankFailure) as caught:
        train_here(Request("digits", run_folder=Path("my own")))
    way_on = f"To go on: slipstream train --resume '{os.path.abspath('my own')}'"
    assert str(caught.value) == f"rank 1 was ended by SIGKILL. {way_on}"


def test_without_a_checkpoint_there_is_no_way_on(ranks: Ranks) -> None:
    ranks.error = RankFailure("rank 1 was ended by SIGKILL.")
    with pytest.raises(RankFailure, match=r"^rank 1 was ended by SIGKILL\.$"):
        train_here(Request("digits", run_folder=Path("mine")))


def test_a_mistake_of_the_user_is_not_to_be_repeated(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_checkpoint(Path("another"), monkeypatch)
    ranks.error = DataError("train.gz is damaged")
    ranks.leaves = "metrics.jsonl"
    with pytest.raises(DataError, match=r"^train\.gz is damaged$"):
        train_here(Request("digits", run_folder=Path("mine")))


def test_a_rank_of_a_job_that_lost_another_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a_checkpoint(Path("another"), monkeypatch)
    ranks = Ranks(RankFailure("rank 1 froze"))
    monkeypatch.setattr("slipstream.train.loop.run_training", ranks)
    job = find_job({"RANK": "0", "WORLD_SIZE": "1"})
    assert job is not None
    with pytest.raises(RankFailure, match=r"^rank 1 froze\. To go on: slipstream train --resume "):
        train_in_job(Request("digits", run_folder=Path("mine")), job)


def test_settings_without_effect_are_noted(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(Request("digits", ["schedule.power=3"]))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("slipstream: note: schedule.power=3.0 has no effect")


@pytest.mark.parametrize("named", ["", "checkpoints", "checkpoints/step-00000007"])
def test_resume_goes_on_in_the_same_folder_with_the_same_recipe(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    run = a_run("runs/a", "train.seed=7")
    checkpoint = a_checkpoint(run, monkeypatch)
    train_here(Request(overrides=["train.epochs=9"], resume=run / named))
    assert ranks.told["run_folder"] == Path(os.path.abspath(run))
    assert ranks.told["resume"] == checkpoint
    recipe = ranks.told["recipe"]
    assert (recipe.train.seed, recipe.train.epochs) == (7, 9)


def test_a_run_that_is_still_running_is_not_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run("runs/a")
    checkpoint = a_checkpoint(run, monkeypatch)
    with (
        claim_run_folder(run),
        pytest.raises(RunFolderError, match="belongs to a job that is still running"),
    ):
        resolve(Request(resume=run))
    assert resolve(Request(resume=run)).checkpoint == checkpoint


def test_more_ranks_than_memory_holds_are_refused_before_one_starts() -> None:
    with pytest.raises(RecipeError, match=r"4,?096 ranks on this machine need .* of memory"):
        train_here(Request("digits", ["train.global_batch_size=4096"], 64, 64, Path("mine")))
    assert list(Path().iterdir()) == []


def test_a_folder_that_text_cannot_name_is_not_made() -> None:
    with pytest.raises(RecipeError, match="folder is not text in UTF-8"):
        train_here(Request("digits", run_folder=Path("caf\udce9")))
    assert list(Path().iterdir()) == []


def test_resume_refuses_what_would_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    a_checkpoint(a_run("runs/a"), monkeypatch)
    with pytest.raises(RecipeError, match="leave out digits"):
        resolve(Request("digits", resume=Path("runs/a")))
    with pytest.raises(RunFolderError, match="leave out --run-folder"):
        resolve(Request(run_folder=Path("b"), resume=Path("runs/a")))
    with pytest.raises(RunFolderError, match="leave out --run-folder"):
        resolve(Request(overrides=["run.folder=b"], resume=Path("runs/a")))


def test_resume_needs_a_run_with_a_checkpoint() -> None:
    a_run("runs/a")
    with pytest.raises(RunFolderError, match=r"b is no run folder.*; the newest is runs/a"):
        resolve(Request(resume=Path("b")))
    with pytest.raises(CheckpointError, match=r"runs/a has no checkpoint .* Begin anew without"):
        resolve(Request(resume=Path("runs/a")))
    with pytest.raises(RunFolderError, match=r"nnn cannot be looked at \(File name too long\)"):
        resolve(Request(resume=Path("n" * 300)))


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_run_without_a_summary_did_not_end_well(content: str | None) -> None:
    if content is not None:
        Path("summary.json").write_text(content)
    with pytest.raises(RunFolderError, match=r"summary\.json"):
        read_summary(Path())


def test_a_single_rank_of_a_job_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    monkeypatch.setattr("slipstream.train.loop.run_training", ranks)
    job = find_job({"RANK": "0", "WORLD_SIZE": "1"})
    assert job is not None
    summary = train_in_job(Request("digits", run_folder=Path("mine")), job)
    assert summary == {"run_folder": os.path.abspath("mine")}
    assert ranks.told["cluster"] == Cluster((1,))
    assert ranks.told["recipe"].cluster.ranks_per_node == 1
    with pytest.raises(LaunchError, match="but the job has 1"):
        train_in_job(Request("digits", nodes=2, run_folder=Path("other")), job)
    assert not Path("other").exists()
