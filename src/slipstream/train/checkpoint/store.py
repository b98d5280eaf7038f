"""The folder of a run's checkpoints: publish, list, find the latest, rotate, clean up.

A checkpoint is written under a hidden name that carries its writer's id, every file is flushed to
the device, and the folder is renamed to `step-00000123` last: that name only ever holds a complete
checkpoint. Nothing is replaced: a second save of one step is called `step-00000123-r1`. A
checkpoint that goes is renamed to a hidden name first and then emptied. Hidden names of a writer
that no longer lives are removed at the next start; a living one is known by the lock it holds.
"""

import contextlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream.durable import HeldLock, fsync_path, is_dead, write_file_durably
from slipstream.errors import CheckpointError
from slipstream.train.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    check_files,
    read_manifest,
)
from slipstream.train.checkpoint.snapshot import Snapshot
from slipstream.train.checkpoint.tensor_file import write_tensors
from slipstream.train.looking import looking_at

_logger = logging.getLogger("slipstream.checkpoint")
_FINAL = re.compile(r"step-\d{8,19}(-r\d{1,6})?")
_HIDDEN = re.compile(r"\.writer-([0-9a-f]{16})(-.*|\.lock)")


@dataclass(frozen=True)
class Found:
    """A complete checkpoint on disk."""

    path: Path
    manifest: Manifest

    @property
    def age_key(self) -> tuple[int, int, str]:
        """Sorts by time of saving: a resumed run may save a smaller step than an abandoned one."""
        return self.manifest.sequence, self.manifest.step, self.path.name


def scan(folder: Path) -> tuple[list[Found], list[CheckpointError]]:
    """The usable checkpoints in `folder`, oldest first, and what is wrong with the others.

    Manifest and file sizes are checked, the tensors' bytes are not (`load` does). A checkpoint
    that another job removes meanwhile is left out.
    """
    found, broken = [], []
    for path in _final_paths(folder):
        try:
            manifest = read_manifest(path)
            check_files(path, manifest)
        except CheckpointError as error:
            if path.exists():
                broken.append(error)
        else:
            found.append(Found(path, manifest))
    return sorted(found, key=lambda item: item.age_key), broken


def latest(folder: Path) -> Path | None:
    """The checkpoint in `folder` that was saved last, None if there is none.

    Damaged ones are passed over with a logged warning; raises CheckpointError if all are.
    """
    found, broken = scan(folder)
    for error in broken:
        _logger.warning("%s", error)
    if broken and not found:
        raise broken[0]
    return found[-1].path if found else None


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the latest in a run or checkpoints folder.

    Raises CheckpointError when there is none, or where the system does not let us look.
    """
    with looking_at(path, CheckpointError):
        if (path / MANIFEST).is_file():
            return path
        for folder in (path / "checkpoints", path):
            newest = latest(folder) if folder.is_dir() else None
            if newest is not None:
                return newest
        why = "has no checkpoint" if path.exists() else "does not exist"
    raise CheckpointError(
        f"{path} {why}: name a checkpoint folder (step-...) or the folder of a run that saved one."
    )


class Store:
    """One writer's hands on a checkpoints folder, for as long as the writer lives."""

    def __init__(self, folder: Path) -> None:
        """Create `folder` if need be, register as a living writer, remove dead ones' leftovers.

        Raises OSError where that cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._sequence = 0
        self._id = secrets.token_hex(8)
        # Before anything else of ours exists: cleaners take names without a lock for dead.
        self._lock = HeldLock(folder / f".writer-{self._id}.lock")
        remove_leftovers(folder)

    def publish(self, snapshot: Snapshot, step: int, metric: float | None) -> Path:
        """Write `snapshot` as the newest checkpoint and return its folder.

        Raises OSError, after which nothing of the attempt is left and all old checkpoints are.
        """
        self._sweep()
        hidden = self._hidden("new")
        hidden.mkdir()
        try:
            self._fill(hidden, snapshot, step, metric)
            path = self._rename(hidden, step)
        except BaseException:
            # Best effort: what stays is hidden, and removed by the next save or start.
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        fsync_path(self.folder)
        return path

    def rotate(self, keep_last: int, keep_best: int) -> None:
        """Remove all but the newest `keep_last` and the `keep_best` with the highest metric.

        Of equal metrics the newer counts as better. Damaged checkpoints are left for the user to
        see. Raises OSError.
        """
        found, _ = scan(self.folder)
        rated = [item for item in found if item.manifest.metric is not None]
        rated.sort(key=lambda item: (item.manifest.metric, *item.age_key))
        kept = {item.path for item in found[-keep_last:]}
        kept |= {item.path for item in rated[len(rated) - min(keep_best, len(rated)) :]}
        for item in found:
            if item.path not in kept:
                hidden = self._hidden("old")
                # Another job may rotate the same folder: then the name is gone already.
                with contextlib.suppress(FileNotFoundError):
                    os.rename(item.path, hidden)
                    shutil.rmtree(hidden)

    def close(self) -> None:
        """Leave the folder; calling it twice is fine."""
        self._lock.release()

    def _sweep(self) -> None:
        """Remove what a failed save or removal of ours left: the disk may have been away."""
        for path in self.folder.glob(f".writer-{self._id}-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _fill(self, folder: Path, snapshot: Snapshot, step: int, metric: float | None) -> None:
        files = {name: write_tensors(folder / name, t) for name, t in snapshot.tensors.items()}
        # Our own count too: another checkpoint may be unreadable for a moment on a network disk.
        found, _ = scan(self.folder)
        newest = max([self._sequence, *(item.manifest.sequence for item in found)])
        self._sequence = newest + 1
        manifest = Manifest(
            sequence=self._sequence,
            step=step,
            position=snapshot.position,
            metric=metric,
            recipe=snapshot.recipe,
            plan=snapshot.plan,
            counters=snapshot.counters,
            files=files,
            model=snapshot.model,
            optimizer=snapshot.optimizer,
        )
        write_file_durably(folder / MANIFEST, manifest.to_text().encode())
        fsync_path(folder)

    def _rename(self, hidden: Path, step: int) -> Path:
        for again in range(10**6):
            path = self.folder / (f"step-{step:08d}" + (f"-r{again}" if again else ""))
            if not os.path.lexists(path):
                try:
                    os.rename(hidden, path)
                except (FileExistsError, NotADirectoryError):
                    continue
                except OSError:
                    # ENOTEMPTY: another job took the name between our look and our rename.
                    if os.path.lexists(path):
                        continue
                    raise
                return path
        raise AssertionError("a million checkpoints of one step")

    def _hidden(self, what: str) -> Path:
        return self.folder / f".writer-{self._id}-{what}-{secrets.token_hex(4)}"


def remove_leftovers(folder: Path) -> None:
    """Remove hidden files and folders of writers that no longer live; raises OSError."""
    leftovers: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if match := _HIDDEN.fullmatch(path.name):
            leftovers.setdefault(match[1], []).append(path)
    for writer, paths in leftovers.items():
        lock = folder / f".writer-{writer}.lock"
        if is_dead(lock):
            # The lock goes last: without it a half-finished cleaning still counts as dead.
            for path in sorted(paths, key=lambda item: item == lock):
                _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        # Two jobs may clean at once: what the other has removed is no failure.
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _final_paths(folder: Path) -> Iterator[Path]:
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return
    for name in names:
        if _FINAL.fullmatch(name):
            yield folder / name
