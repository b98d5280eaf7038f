"""Looking at paths that a user named: a system's refusal to look becomes a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.errors import RunFolderError, SlipstreamError


@contextmanager
def looking_at(path: Path, kind: type[SlipstreamError] = RunFolderError) -> Iterator[None]:
    """What is asked about `path` inside; an OSError becomes a `kind` that names the path.

    `Path.is_dir` and its like answer False for what does not exist, and raise for the rest: a
    folder that may not be entered, a name that is too long.
    """
    try:
        yield
    except OSError as error:
        raise kind(
            f"{path} cannot be looked at ({error.strerror or error}): fix its permissions, or name"
            " another path."
        ) from error
