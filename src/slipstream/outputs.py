"""Files that a user asks for by name: one rule for all of them.

A file that exists stays as it is unless its user says `--overwrite`; what is written is complete
under its name or not there at all.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from slipstream.durable import temporary_sibling, write_bytes_atomic
from slipstream.errors import SlipstreamError


def check_output(path: Path, option: str, *, overwrite: bool) -> None:
    """Raises SlipstreamError unless a file can be written to `path`; before the work for it begins.

    option: what the user named it by, as in "--output"; overwrite: a file may be replaced. What is
    no regular file (a folder, a device) never is.
    """
    try:
        _check(path, option, overwrite)
    except OSError as error:
        raise _refused(path, error, option) from error


def same_output(one: Path, other: Path) -> bool:
    """Whether two files to write are one and the same, however the ways to them are spelt.

    A link in the place of a file does not count: it is replaced, not followed.
    """
    return _place(one) == _place(other)


def write_output(path: Path, data: bytes, option: str, *, overwrite: bool) -> None:
    """Writes a file whole, by the same rule. Raises SlipstreamError, with `path` as it was."""
    check_output(path, option, overwrite=overwrite)
    try:
        write_bytes_atomic(path, data, overwrite=overwrite)
    except FileExistsError as error:
        raise _exists(path, option) from error
    except OSError as error:
        raise _refused(path, error, option) from error


def _check(path: Path, option: str, overwrite: bool) -> None:
    """As `check_output`; raises OSError where the system does not let it look."""
    folder = _mode(path.parent)
    if folder is None or not stat.S_ISDIR(folder):
        raise SlipstreamError(
            f"{path.parent}, where {path.name} shall go, is no folder; make it first."
        )
    if not os.access(path.parent, os.W_OK):
        raise SlipstreamError(f"{path.parent} cannot be written to; choose another {option}.")
    there = _mode(path)
    if there is not None and not stat.S_ISREG(there):
        raise SlipstreamError(f"{path} is no regular file; choose another {option}.")
    if not overwrite and os.path.lexists(path):
        raise _exists(path, option)
    _mode(temporary_sibling(path))  # its name is longer, and must not be too long either


def _mode(path: Path) -> int | None:
    """What lies at a path, as stat(2) says it; None where nothing does. Raises OSError.

    Not `Path.is_file` and the like: some versions of Python raise there, others say False.
    """
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def _place(path: Path) -> str:
    return os.path.join(os.path.realpath(path.parent), path.name)


def _refused(path: Path, error: OSError, option: str) -> SlipstreamError:
    return SlipstreamError(
        f"{path} cannot be written ({error.strerror or error}); choose another {option}."
    )


def _exists(path: Path, option: str) -> SlipstreamError:
    return SlipstreamError(
        f"{path} exists and was not overwritten; choose another {option}, or replace it with"
        " --overwrite."
    )
