"""Writing a result so that a reader finds the old file or the new one, never a part."""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.errors import SlipstreamError


def write_whole(path: Path, content: bytes) -> None:
    """Writes the file whole, over an old one. Raises SlipstreamError naming it where that fails."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise SlipstreamError(f"{path} cannot be written: {error.strerror or error}.") from error
