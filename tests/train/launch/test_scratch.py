"""A folder for temporary files that is full: it is named, and so is the way to another."""

import errno
import os
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

from slipstream.cluster import Cluster
from slipstream.errors import LaunchError
from slipstream.train.launch.joined import find_job
from slipstream.train.launch.local import launch
from slipstream.train.launch.measure import PROBE, Measurement, measure_here, measure_in_job
from slipstream.train.recipe import load_recipe

RECIPE = load_recipe("digits")
NAMED = r"folder for temporary files, .*, cannot be written \(No space left on device\): .* TMPDIR"


def refuse(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for temporary files."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def measurement() -> Measurement:
    return Measurement(PROBE, RECIPE, {"seconds": 1.0}, lambda: None)


@pytest.mark.parametrize(
    ("owner", "name"), [(tempfile, "mkdtemp"), (Path, "write_text")], ids=["folder", "file"]
)
def test_a_measurement_names_it_and_leaves_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    monkeypatch.setattr(owner, name, refuse)
    with pytest.raises(LaunchError, match=NAMED) as caught:
        measure_here(measurement())
    assert str(place) in str(caught.value)
    assert list(place.iterdir()) == []


def test_a_rank_of_a_job_that_measures_names_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "write_text", refuse)
    job = find_job({"RANK": "0", "WORLD_SIZE": "1"})
    assert job is not None
    with pytest.raises(LaunchError, match=NAMED):
        measure_in_job(measurement(), job, nodes=None, per_node=None)
    assert list(place.iterdir()) == []


def test_a_launch_names_it(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_text", refuse)
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(LaunchError, match=NAMED):
        launch(RECIPE, run_folder=run, cluster=Cluster((2,)))
    assert list(place.iterdir()) == []


def test_logs_that_cannot_be_made_are_named(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(LaunchError, match=r"run/logs, .*, cannot be made \(Not a directory\)"):
        launch(RECIPE, run_folder=tmp_path / "run", cluster=Cluster((2,)))
