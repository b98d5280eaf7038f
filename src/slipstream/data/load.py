"""Data sets by name."""

from __future__ import annotations

from pathlib import Path

from slipstream.data.digits import load_digits
from slipstream.data.images import ImageSet
from slipstream.errors import DataError

DATASETS = ("fashion", "digits")


def load_images(
    dataset: str, folder: Path | None = None, cache: Path | None = None
) -> tuple[ImageSet, ImageSet]:
    """(train, test) of the data set with this name, in memory."""
    if dataset == "digits":
        return load_digits()
    raise DataError(f"there is no data set {dataset!r}: choose one of {', '.join(DATASETS)}")
