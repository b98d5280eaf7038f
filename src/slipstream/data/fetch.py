"""Fetching Fashion-MNIST into the cache folder: atomically, once per machine, without root.

Two ways are tried: the Debian package, downloaded by apt and unpacked without installing it, then
torchvision's own download. Whatever comes is checked against the published sha256 sums before it
gets its final name, so neither way has to be trusted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from slipstream.data import fashion
from slipstream.data.fetch_ways import WayFailed, from_debian, from_torchvision
from slipstream.errors import DataError

_LOCK_SECONDS = 1800.0  # longer than both ways may take together
_WORK_PREFIX = ".fetching-"


def fetch(cache: Path, note: Callable[[str], None]) -> fashion.Source:
    """Makes sure that the checked files lie in the cache folder `cache`, and says where.

    Jobs on one machine take turns, and the later ones find the files of the first. `note` gets
    one line before something that takes long. Raises DataError, naming both failures and the ways
    out, when neither way works or the cache folder cannot be written.
    """
    source = fashion.cached_source(cache)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _one_job_at_a_time(cache, note) as alone:
            # Another job may have fetched it while this one waited for its turn.
            found = fashion.locate(None, cache)
            if found is not None:
                return found
            if alone:
                _remove_leftovers(cache)
            note(f"fetching Fashion-MNIST (31 MB, once) into {source.folder}")
            with tempfile.TemporaryDirectory(dir=cache, prefix=_WORK_PREFIX) as work:
                _fill(Path(work), source)
            return source
    except OSError as error:
        raise DataError(
            f"the cache folder {cache} cannot be used ({error.strerror or error}): set "
            "XDG_CACHE_HOME to a writable folder with 100 MB to spare, or name a folder that holds "
            "Fashion-MNIST through data.folder"
        ) from error


def _fill(work: Path, target: fashion.Source) -> None:
    """Fetches into `work` and renames the result to the target folder."""
    failures: list[str] = []
    for way in (from_debian, from_torchvision):
        try:
            ready = _stage(way(work), work / "ready")
        except (WayFailed, DataError) as failure:
            failures.append(str(failure))
            continue
        try:
            ready.rename(target.folder)
        except OSError as error:
            # Where the lock has no effect another job may have come first: its files are as good.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        return
    raise DataError(
        f"Fashion-MNIST is not on this machine and could not be fetched ({'; '.join(failures)}). "
        "Install Debian's package (apt-get install dataset-fashion-mnist), or name a folder that "
        "holds its four files with --set data.folder=FOLDER"
    )


def _stage(fetched: Path, ready: Path) -> Path:
    """Copies the four files into the new folder `ready`, on disk, and checks them there."""
    shutil.rmtree(ready, ignore_errors=True)
    ready.mkdir()
    for name in fashion.PUBLISHED:
        origin = fetched / f"{name}.gz"
        if origin.is_symlink() or not origin.is_file():
            raise WayFailed(f"what was fetched lacks the file {origin.name}")
        with origin.open("rb") as content, (ready / origin.name).open("wb") as copy:
            shutil.copyfileobj(content, copy)
            copy.flush()
            os.fsync(copy.fileno())
    fashion.read(fashion.Source(ready, "it was refused"))
    return ready


@contextmanager
def _one_job_at_a_time(cache: Path, note: Callable[[str], None]) -> Iterator[bool]:
    """Holds the cache's lock; yields False where the file system has no locks.

    The lock only saves work: correctness comes from the rename. It ends with its process, so a
    job that died leaves nothing to clean up.
    """
    with (cache / ".fetching.lock").open("w") as handle:
        yield _lock(handle, cache, note)


def _lock(handle: IO[str], cache: Path, note: Callable[[str], None]) -> bool:
    deadline = time.monotonic() + _LOCK_SECONDS
    waiting = False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not waiting:
                note(f"waiting for another job that is fetching Fashion-MNIST into {cache}")
            waiting = True
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                return False
            raise
        if time.monotonic() > deadline:
            raise DataError(
                f"another job has been fetching Fashion-MNIST into {cache} for {_LOCK_SECONDS:.0f} "
                "seconds: stop it, or name a folder that holds the data through data.folder"
            )
        time.sleep(0.1)


def _remove_leftovers(cache: Path) -> None:
    """Removes what killed jobs left: whoever holds the lock knows that nobody is fetching."""
    for leftover in cache.glob(f"{_WORK_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
