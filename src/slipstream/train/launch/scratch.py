"""Files that live as long as one command does, in this machine's folder for temporary files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.errors import LaunchError


@contextmanager
def temporary_files() -> Iterator[None]:
    """What is written to the folder for temporary files inside.

    An OSError becomes a LaunchError that names the folder and TMPDIR, by which it is chosen.
    """
    try:
        yield
    except OSError as error:
        raise LaunchError(
            f"the folder for temporary files, {_place()}, cannot be written"
            f" ({error.strerror or error}): free space there, or set the environment variable"
            " TMPDIR to another folder"
        ) from error


def _place() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:  # none can be written: then the wanted one is the one to name
        return os.environ.get("TMPDIR", "/tmp")
