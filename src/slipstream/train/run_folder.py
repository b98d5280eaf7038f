"""The folder of one run: made once, never over an existing one, owned by one job at a time."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from slipstream.durable import (
    TEMPORARY_PREFIX,
    HeldLock,
    is_dead,
    temporary_sibling,
    write_text_atomic,
)
from slipstream.errors import RunFolderError

__all__ = [
    "claim_run_folder",
    "create_run_folder",
    "holds_checkpoint",
    "is_claimed",
    "refuse_claimed",
    "write_text_atomic",
    "writing",
]

RECIPE_FILE = "recipe.toml"
CHECKPOINTS = "checkpoints"
_OWNER = ".owner.lock"
_ANOTHER = ", or choose another with --run-folder"


def create_run_folder(path: Path) -> Path:
    """Create the folder `path` (and its parents) for a new run and return it, absolute.

    An existing empty folder is used. Raises RunFolderError, with nothing changed, for a folder
    that has content, for a path that is no folder, and where nothing can be written.
    """
    path = Path(os.path.abspath(path))
    _check_text(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        content = sorted(entry.name for entry in path.iterdir() if not _is_leftover(entry.name))
    except (FileExistsError, NotADirectoryError) as error:
        raise RunFolderError(
            f"run folder {path} cannot be made: {error.filename} is not a folder;"
            " choose another with --run-folder."
        ) from error
    except OSError as error:
        raise _unusable(path, error) from error
    with writing(path):
        claimed = is_claimed(path)
    if claimed:
        raise _claimed(path, _ANOTHER)
    if content:
        raise _occupied(path, content)
    _check_writable(path)
    return path


def holds_checkpoint(path: Path) -> bool:
    """Whether a run saved something in the folder `path`; damaged checkpoints count. OSError."""
    return any((path / CHECKPOINTS).glob("step-*"))


def claim_run_folder(path: Path, *, resumed: bool = False) -> HeldLock:
    """Own the run folder `path` until `.release()` or the end of this process.

    resumed: the run goes on in it, so that an error does not offer another folder. Half-written
    files that a killed owner left directly in it are removed. Raises RunFolderError when a living
    job owns it (two jobs would mix their metrics) or when nothing can be written. A job that was
    killed leaves nothing that blocks the next one.
    """
    another = "" if resumed else _ANOTHER
    try:
        lock = HeldLock(path / _OWNER)
        for leftover in path.glob(f"{TEMPORARY_PREFIX}*"):
            leftover.unlink(missing_ok=True)
        return lock
    except BlockingIOError as error:
        raise _claimed(path, another) from error
    except OSError as error:
        raise _unusable(path, error, another) from error


def is_claimed(path: Path) -> bool:
    """Whether a living job owns the run folder `path`."""
    return is_dead(path / _OWNER) is False


def refuse_claimed(path: Path) -> None:
    """Raise RunFolderError when a living job owns `path`, the folder of a run that is to go on."""
    with writing(path, resumed=True):
        claimed = is_claimed(path)
    if claimed:
        raise _claimed(path, "")


@contextlib.contextmanager
def writing(path: Path, *, resumed: bool = False) -> Iterator[None]:
    """What is written to the run folder `path` inside; a disk's refusal becomes RunFolderError.

    resumed: as for `claim_run_folder`.
    """
    try:
        yield
    except OSError as error:
        raise _unusable(path, error, "" if resumed else _ANOTHER) from error


def _is_leftover(name: str) -> bool:
    return name == _OWNER or name.startswith(TEMPORARY_PREFIX)


def _occupied(path: Path, content: list[str]) -> RunFolderError:
    """The error for a folder with something in it; its way out is one that the content allows."""
    with writing(path):
        has_checkpoint = holds_checkpoint(path)
    way = "choose another with --run-folder"
    if has_checkpoint:
        way = f"go on with that run by --resume{_ANOTHER}"
    elif RECIPE_FILE in content:
        way = (
            "that run has saved no checkpoint, so --resume cannot go on with it; remove the folder"
            f" if nothing runs in it{_ANOTHER}"
        )
    shown = ", ".join(content[:3]) + (", ..." if len(content) > 3 else "")
    return RunFolderError(
        f"run folder {path} exists and is not empty ({shown}); nothing was overwritten: {way}."
    )


def _claimed(path: Path, another: str) -> RunFolderError:
    return RunFolderError(
        f"run folder {path} belongs to a job that is still running; stop that job first{another}."
    )


def _check_text(path: Path) -> None:
    # The run's records are UTF-8 and tell where they lie; a name of other bytes has no place there.
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise RunFolderError(
            f"run folder {path} has a name that is not UTF-8; choose another with --run-folder."
        ) from error


def _check_writable(path: Path) -> None:
    # Trying is the only sure test: modes say nothing on read-only, full or network file systems.
    probe = temporary_sibling(path / "probe")
    try:
        probe.write_bytes(b"slipstream")
    except OSError as error:
        raise _unusable(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def _unusable(path: Path, error: OSError, another: str = _ANOTHER) -> RunFolderError:
    reason = error.strerror or str(error)
    return RunFolderError(
        f"run folder {path} cannot be written ({reason}); free space or fix its"
        f" permissions{another}."
    )
