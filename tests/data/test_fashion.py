"""Finding Fashion-MNIST and refusing what is not it."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.data import fashion, load_images, prepare
from slipstream.data.fashion import PUBLISHED, cache_folder
from slipstream.errors import DataError


@pytest.fixture
def no_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nothing may be fetched here")

    monkeypatch.setattr("slipstream.data.load.fetch", refuse)


@pytest.fixture
def small_is_published(
    tmp_path: Path, write_fashion: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Makes the small random files that `write_fashion` writes pass for the published ones."""
    for name, digest in write_fashion(tmp_path / "published").items():
        monkeypatch.setitem(PUBLISHED, name, digest)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("inside", [".", "raw", "FashionMNIST/raw"])
@pytest.mark.usefixtures("no_fetch")
def test_a_named_folder_is_read_in_every_usual_layout(
    tmp_path: Path, write_fashion: Callable[..., dict[str, str]], inside: str, zipped: bool
) -> None:
    write_fashion(tmp_path / inside, zipped=zipped)
    train, test = load_images("fashion", tmp_path)
    assert train.images.shape == (12, 1, 28, 28) and test.images.shape == (5, 1, 28, 28)
    assert train.images.dtype == torch.uint8 and train.labels.dtype == torch.int64
    assert train.name == test.name == "fashion (own files)"
    assert prepare("fashion", tmp_path) == tmp_path / inside


@pytest.mark.usefixtures("no_fetch", "small_is_published")
def test_places_are_tried_in_order(
    tmp_path: Path, write_fashion: Callable[..., dict[str, str]], no_system_folder: Path
) -> None:
    cache, own = tmp_path / "cache", tmp_path / "own"
    write_fashion(cache / "fashion-mnist")
    assert prepare("fashion", cache=cache) == cache / "fashion-mnist"
    write_fashion(no_system_folder)
    assert prepare("fashion", cache=cache) == no_system_folder
    write_fashion(own)
    assert prepare("fashion", own, cache) == own
    train, _ = load_images("fashion", own, cache)
    assert train.name == "fashion"


@pytest.mark.parametrize("place", ["own", "system", "cache"])
@pytest.mark.usefixtures("no_fetch", "small_is_published")
def test_damage_is_reported_and_no_other_place_is_tried(
    tmp_path: Path,
    write_fashion: Callable[..., dict[str, str]],
    no_system_folder: Path,
    place: str,
) -> None:
    cache = tmp_path / "cache"
    folders = {
        "own": tmp_path / "own",
        "system": no_system_folder,
        "cache": cache / "fashion-mnist",
    }
    ways_out = {
        "own": "leave data.folder empty",
        "system": "apt-get install --reinstall dataset-fashion-mnist",
        "cache": f"delete the folder {cache / 'fashion-mnist'} and it is fetched again",
    }
    for name in list(folders)[list(folders).index(place) :]:
        write_fashion(folders[name])
    victim = folders[place] / "t10k-labels-idx1-ubyte.gz"
    folder = folders["own"] if place == "own" else None
    for content, message in [
        (victim.read_bytes()[:-4], "is truncated"),
        (None, "t10k-labels-idx1-ubyte is missing"),
    ]:
        victim.unlink()
        if content is not None:
            victim.write_bytes(content)
        for function in (load_images, prepare):
            with pytest.raises(DataError, match=message) as caught:
                function("fashion", folder, cache)
            assert ways_out[place] in str(caught.value)


@pytest.mark.parametrize("change", ["labels", "extra labels", "value", "size", "swapped"])
def test_a_named_folders_wrong_content_is_named(
    tmp_path: Path,
    write_fashion: Callable[..., dict[str, str]],
    idx: Callable[..., bytes],
    change: str,
) -> None:
    write_fashion(tmp_path)
    labels, images = (
        tmp_path / "train-labels-idx1-ubyte.gz",
        tmp_path / "train-images-idx3-ubyte.gz",
    )
    path, content, message = {
        "labels": (labels, idx(np.zeros(11, np.uint8)), "11 labels for the 12 images"),
        "extra labels": (labels, idx(np.zeros(13, np.uint8)), "13 labels for the 12 images"),
        "value": (labels, idx(np.full(12, 10, np.uint8)), r"the label 10, but .* \[0, 9\]"),
        "size": (images, idx(np.zeros((12, 32, 28), np.uint8)), "images of 32 x 28 pixels"),
        "swapped": (labels, gzip.decompress(images.read_bytes()), "is not an IDX file"),
    }[change]
    path.write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=message) as caught:
        load_images("fashion", tmp_path)
    assert str(path) in str(caught.value) and "data.folder" in str(caught.value)


@pytest.mark.usefixtures("no_system_folder", "no_fetch")
def test_intact_files_in_the_cache_that_are_not_the_published_ones_are_refused(
    tmp_path: Path, write_fashion: Callable[..., dict[str, str]]
) -> None:
    write_fashion(tmp_path / "fashion-mnist")
    with pytest.raises(DataError, match=r"not the published Fashion-MNIST.*delete the folder"):
        load_images("fashion", cache=tmp_path)


def test_a_named_folder_without_the_data_is_an_error_and_not_a_fetch(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds none of train-images-idx3-ubyte"):
        prepare("fashion", tmp_path)
    with pytest.raises(DataError, match="which is not a folder"):
        prepare("fashion", tmp_path / "none")


def test_a_place_that_cannot_be_looked_at_is_named(
    tmp_path: Path, no_system_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_long = tmp_path / ("x" * 300)
    for arguments in ((too_long, None), (None, too_long)):
        with pytest.raises(DataError, match=r"x{300}.* cannot be looked at .*data\.folder"):
            prepare("fashion", *arguments)
    with pytest.raises(DataError, match=r"data\.folder names ~no-such-user/data, but"):
        prepare("fashion", Path("~no-such-user/data"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(DataError, match=r"there is no home folder .* set XDG_CACHE_HOME"):
        cache_folder(None)


def test_the_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(tmp_path / "given") == tmp_path / "given"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(None) == tmp_path / "xdg" / "slipstream"
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder(None) == tmp_path / ".cache" / "slipstream"


def test_unknown_names_and_a_folder_for_digits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data set 'fashoin': did you mean 'fashion'"):
        load_images("fashoin")
    with pytest.raises(DataError, match="no data set 'imagenet': choose one of fashion, digits"):
        prepare("imagenet")
    with pytest.raises(DataError, match="comes with scikit-learn"):
        load_images("digits", tmp_path)
    assert prepare("digits") is None


def test_the_published_set_has_ten_classes() -> None:
    assert len(fashion.CLASSES) == 10 and len(set(fashion.CLASSES)) == 10
    assert all(len(digest) == 64 for digest in PUBLISHED.values())
