"""Fashion-MNIST: where it may lie on this machine, and reading it with every check."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from slipstream.data.idx import IdxFile, read_idx
from slipstream.data.images import ImageSet
from slipstream.errors import DataError

# File name -> sha256 of the unpacked content, as published (60,000 and 10,000 samples).
PUBLISHED = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
SYSTEM_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # of Debian's dataset-fashion-mnist
_SIDE = 28  # pixels


@dataclass(frozen=True)
class Source:
    """A folder with the four files, what to do when they are bad, and whose they are.

    `users_own`: the user named it, so that its files may differ from the published ones.
    """

    folder: Path
    remedy: str
    users_own: bool = False


def cache_folder(cache: Path | None) -> Path:
    """`cache`, or else $XDG_CACHE_HOME/slipstream, or else ~/.cache/slipstream."""
    if cache is not None:
        return cache
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    if os.path.isabs(base):
        return Path(base) / "slipstream"
    try:
        return Path.home() / ".cache" / "slipstream"
    except RuntimeError:
        raise DataError(
            "there is no home folder to keep data in: set XDG_CACHE_HOME to a writable folder, or "
            "name the folder of the data set through data.folder"
        ) from None


def cached_source(cache: Path) -> Source:
    """Where fetched files lie in the cache folder `cache`, whether or not they are there yet."""
    folder = cache / "fashion-mnist"
    return Source(folder, f"delete the folder {folder} and it is fetched again")


def locate(folder: Path | None, cache: Path) -> Source | None:
    """The first place that holds files of the set; None when it has to be fetched.

    A `folder` that the user names is the only place looked at, itself or in torchvision's layout.
    Raises DataError when that does not exist or holds none of the files, or when a place cannot be
    looked at.
    """
    try:
        return _system_or_cache(cache) if folder is None else _users_source(folder)
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be looked at for Fashion-MNIST ({error.strerror}): make it "
            "readable, or name another folder through data.folder"
        ) from error


def read(source: Source) -> tuple[ImageSet, ImageSet]:
    """(train, test), uint8 [N, 1, 28, 28]; DataError names the damaged file and the way out.

    Files of a folder that the user named may differ from the published ones; the sets are then
    called "fashion (own files)", so that no record of a run takes them for the real data.
    """
    return _read_split(source, "train"), _read_split(source, "t10k")


def _system_or_cache(cache: Path) -> Source | None:
    system = Source(
        SYSTEM_FOLDER,
        "run `apt-get install --reinstall dataset-fashion-mnist` as root, or name another folder "
        "through data.folder",
    )
    for source in (system, cached_source(cache)):
        if any(_path_of(source.folder, name).exists() for name in PUBLISHED):
            return source
    return None


def _users_source(folder: Path) -> Source:
    remedy = (
        "put an undamaged copy there, or leave data.folder empty to have Fashion-MNIST found or "
        "fetched"
    )
    try:
        folder = folder.expanduser()
    except RuntimeError as error:
        raise DataError(f"data.folder names {folder}, but {error}: {remedy}") from None
    if not folder.is_dir():
        raise DataError(f"data.folder names {folder}, which is not a folder: {remedy}")
    for place in (folder, folder / "FashionMNIST" / "raw", folder / "raw"):
        if any(_path_of(place, name).exists() for name in PUBLISHED):
            return Source(place, remedy, users_own=True)
    raise DataError(
        f"data.folder names {folder}, which holds none of {', '.join(PUBLISHED)} (.gz or plain): "
        f"{remedy}"
    )


def _path_of(folder: Path, name: str) -> Path:
    zipped = folder / f"{name}.gz"
    return zipped if zipped.exists() else folder / name


def _read_split(source: Source, split: str) -> ImageSet:
    images = _read_file(source, f"{split}-images-idx3-ubyte", dimensions=3)
    labels = _read_file(source, f"{split}-labels-idx1-ubyte", dimensions=1)
    images_path = _path_of(source.folder, f"{split}-images-idx3-ubyte")
    labels_path = _path_of(source.folder, f"{split}-labels-idx1-ubyte")
    if images.values.shape[1:] != (_SIDE, _SIDE):
        height, width = images.values.shape[1:]
        raise DataError(
            f"{images_path} holds images of {height} x {width} pixels, but Fashion-MNIST's have "
            f"{_SIDE} x {_SIDE}: {source.remedy}"
        )
    if len(images.values) != len(labels.values):
        raise DataError(
            f"{labels_path} holds {len(labels.values)} labels for the {len(images.values)} images "
            f"of {images_path}: {source.remedy}"
        )
    if int(labels.values.max()) >= len(CLASSES):
        raise DataError(
            f"{labels_path} holds the label {int(labels.values.max())}, but labels lie in "
            f"[0, {len(CLASSES) - 1}]: {source.remedy}"
        )
    published = images.sha256 == PUBLISHED[f"{split}-images-idx3-ubyte"] and (
        labels.sha256 == PUBLISHED[f"{split}-labels-idx1-ubyte"]
    )
    return ImageSet(
        "fashion" if published else "fashion (own files)",
        torch.from_numpy(images.values[:, None]),
        torch.from_numpy(labels.values.astype(np.int64)),
        CLASSES,
    )


def _read_file(source: Source, name: str, *, dimensions: int) -> IdxFile:
    path = _path_of(source.folder, name)
    content = read_idx(path, dimensions=dimensions, remedy=source.remedy)
    if not source.users_own and content.sha256 != PUBLISHED[name]:
        raise DataError(
            f"{path} is an intact file but not the published Fashion-MNIST (its content has the "
            f"sha256 {content.sha256[:12]}..., not {PUBLISHED[name][:12]}...): {source.remedy}"
        )
    return content
