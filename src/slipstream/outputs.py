"""Files that a user asks for by name: one rule for all of them.

A file that exists stays as it is unless its user says `--overwrite`; what is written is complete
under its name or not there at all.
"""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.durable import write_bytes_atomic
from slipstream.errors import SlipstreamError


def check_output(path: Path, option: str, *, overwrite: bool) -> None:
    """Raises SlipstreamError unless a file can be written to `path`; before the work for it begins.

    option: what the user named it by, as in "--output"; overwrite: a file may be replaced. What is
    no regular file (a folder, a device) never is.
    """
    if not path.parent.is_dir():
        raise SlipstreamError(
            f"{path.parent}, where {path.name} shall go, is no folder; make it first."
        )
    if not os.access(path.parent, os.W_OK):
        raise SlipstreamError(f"{path.parent} cannot be written to; choose another {option}.")
    if path.exists() and not path.is_file():
        raise SlipstreamError(f"{path} is no regular file; choose another {option}.")
    if not overwrite and os.path.lexists(path):
        raise _exists(path, option)


def write_output(path: Path, data: bytes, option: str, *, overwrite: bool) -> None:
    """Writes a file whole, by the same rule. Raises SlipstreamError, with `path` as it was."""
    check_output(path, option, overwrite=overwrite)
    try:
        write_bytes_atomic(path, data, overwrite=overwrite)
    except FileExistsError as error:
        raise _exists(path, option) from error
    except OSError as error:
        raise SlipstreamError(
            f"{path} cannot be written ({error.strerror or error}); choose another {option}."
        ) from error


def _exists(path: Path, option: str) -> SlipstreamError:
    return SlipstreamError(
        f"{path} exists and was not overwritten; choose another {option}, or replace it with"
        " --overwrite."
    )
