"""Data sets by name: found, fetched when they have to be, checked, and loaded into memory."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from pathlib import Path

from slipstream.data import fashion
from slipstream.data.digits import load_digits
from slipstream.data.fetch import fetch
from slipstream.data.images import ImageSet
from slipstream.errors import DataError

DATASETS = ("fashion", "digits")


def _print_note(line: str) -> None:
    print(f"slipstream: {line}", file=sys.stderr, flush=True)


def load_images(
    dataset: str,
    folder: Path | None = None,
    cache: Path | None = None,
    *,
    note: Callable[[str], None] = _print_note,
) -> tuple[ImageSet, ImageSet]:
    """(train, test) of "fashion" (60,000 and 10,000 images, 28 x 28) or "digits" (8 x 8).

    "fashion" is read from `folder` when the user names one, else from where Debian's package puts
    it, else from the cache folder (`cache`, or $XDG_CACHE_HOME/slipstream, or
    ~/.cache/slipstream), into which it is fetched when it is nowhere; `note` then gets a line for
    the user (default: printed on standard error). "digits" comes with scikit-learn.

    Raises DataError, naming file and way out, for an unknown name, a missing or damaged file, or
    a fetch that fails.
    """
    source = _source_of(dataset, folder, cache, note)
    return load_digits() if source is None else fashion.read(source)


def prepare(
    dataset: str,
    folder: Path | None = None,
    cache: Path | None = None,
    *,
    note: Callable[[str], None] = _print_note,
) -> Path | None:
    """Makes sure that `load_images` with the same arguments will work, and returns the folder.

    For the launcher, before it starts ranks: the set is fetched once, and damage is reported once
    instead of by every rank. None for a set that is not kept in files. Raises as `load_images`.
    """
    source = _source_of(dataset, folder, cache, note)
    if source is None:
        return None
    fashion.read(source)
    return source.folder


def _source_of(
    dataset: str, folder: Path | None, cache: Path | None, note: Callable[[str], None]
) -> fashion.Source | None:
    if dataset not in DATASETS:
        near = difflib.get_close_matches(dataset, DATASETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(DATASETS)}"
        raise DataError(f"there is no data set {dataset!r}: {hint}")
    if dataset == "digits":
        if folder is not None:
            raise DataError(
                f"data.folder names {folder}, but the data set 'digits' comes with scikit-learn "
                "and is read from no folder: leave data.folder empty"
            )
        return None
    if folder is not None:
        return fashion.locate(folder, Path())
    where = fashion.cache_folder(cache)
    return fashion.locate(None, where) or fetch(where, note)
