"""The lab's temporary folder: one a run, locked while the run lives, removed by it or by the next.

It is the only thing of a run that a killed lab leaves behind; the kernel takes the rest.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slipstream.errors import LabError

_TRIES = 100


def lab_place() -> Path:
    """Where this user's runs have their folders. Raises LabError when it is someone else's."""
    place = Path(tempfile.gettempdir()) / f"slipstream-lab-{os.geteuid()}"
    with suppress(FileExistsError):  # whatever it is: what follows looks at it
        place.mkdir(mode=0o700)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise LabError(
            f"{place} is not a folder of this user alone: remove it, or set TMPDIR to another place"
        )
    return place


@contextmanager
def run_folder(place: Path) -> Iterator[Path]:
    """A fresh folder in ``place``, locked until the block ends or this process does.

    Folders of dead runs are removed first. The kernel drops the lock of a process that dies.
    """
    remove_leftovers(place)
    folder, descriptor = _locked_name(place)
    try:
        folder.mkdir()
        yield folder
    finally:
        _remove(folder)
        os.close(descriptor)


def remove_leftovers(place: Path) -> list[Path]:
    """Remove the folders of runs whose lock nobody holds; those that were removed."""
    removed = []
    for lock in sorted(place.glob("run-*.lock")):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # Its run has just ended.
        try:
            if _is_mine(descriptor, lock):
                folder = lock.with_suffix("")
                _remove(folder)
                removed.append(folder)
        finally:
            os.close(descriptor)
    return removed


def _locked_name(place: Path) -> tuple[Path, int]:
    """The name of a folder to make, and the open file that locks it."""
    for _ in range(_TRIES):
        folder = place / f"run-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        lock = _lock_of(folder)
        descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        if _is_mine(descriptor, lock):
            return folder, descriptor
        # Another lab looked for leftovers between these two lines, and took it for one.
        os.close(descriptor)
    raise LabError(f"no folder in {place} can be locked")


def _is_mine(descriptor: int, lock: Path) -> bool:
    """Take the lock; False when another process holds it, or has removed the file meanwhile."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), lock.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".lock")


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    _lock_of(folder).unlink()
