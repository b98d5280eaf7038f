"""IDX, the file format of MNIST and its successors: a header of big-endian counts, then bytes.

Files are read as hostile input: nothing is believed before it is checked, and no more is read
than the header's counts allow for.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import DataError

_GZIP_MAGIC = b"\x1f\x8b"
_UNSIGNED_BYTE = 0x08
_MAX_BYTES = 2**31  # of one file's content; a larger count is a damaged or malicious header
_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class IdxFile:
    """Content of one IDX file: `values` uint8 of the declared shape, and the sha256 of it all."""

    values: NDArray[np.uint8]
    sha256: str


def read_idx(path: Path, *, dimensions: int, remedy: str) -> IdxFile:
    """Reads an IDX file of unsigned bytes with that many dimensions, gzipped or plain.

    Raises DataError, which names the file, what is wrong, and `remedy` (how the user gets out of
    it; completes a sentence), when the file is missing, no regular file, unreadable, not of this
    kind, or shorter or longer than its own header says.
    """
    try:
        if not path.exists():
            raise _Damage("is missing")
        # Opening a pipe or a device could wait for ever.
        if not path.is_file():
            raise _Damage("is not a regular file")
        with path.open("rb") as raw:
            gzipped = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            if not gzipped:
                return _parse(raw, dimensions)
            with gzip.GzipFile(fileobj=raw) as content:
                return _parse(content, dimensions)
    except _Damage as damage:
        raise DataError(f"{path} {damage}: {remedy}") from None
    except EOFError:
        raise DataError(f"{path} is truncated: its gzip stream has no end: {remedy}") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged ({error}): {remedy}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"{path} cannot be read ({reason}): {remedy}") from None


class _Damage(Exception):
    """What is wrong with the file, as the rest of a sentence that starts with its name."""


def _parse(content: BufferedIOBase, dimensions: int) -> IdxFile:
    header = content.read(4 + 4 * dimensions)
    expected = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    if header[:4] != expected:
        raise _Damage(
            f"is not an IDX file of bytes in {dimensions} dimensions (it starts with "
            f"{header[:4].hex(' ') or 'nothing'}, not {expected.hex(' ')})"
        )
    if len(header) < 4 + 4 * dimensions:
        raise _Damage(f"is truncated: it ends inside its header, after {len(header)} bytes")
    shape = tuple(int(count) for count in np.frombuffer(header, dtype=">u4", offset=4))
    size = math.prod(shape)
    if not 0 < size <= _MAX_BYTES:
        raise _Damage(f"declares the shape {list(shape)}, which is no size for a data set")
    values = np.empty(size, dtype=np.uint8)
    filled = 0
    digest = hashlib.sha256(header)
    while filled < size:
        chunk = content.read(min(_CHUNK_BYTES, size - filled))
        if not chunk:
            raise _Damage(f"is truncated: {filled} of {size} bytes of the shape {list(shape)}")
        values[filled : filled + len(chunk)] = np.frombuffer(chunk, dtype=np.uint8)
        digest.update(chunk)
        filled += len(chunk)
    # Reading up to the end also makes gzip compare its checksum.
    if content.read(1):
        raise _Damage(f"goes on after the {size} bytes of the shape {list(shape)} that it declares")
    return IdxFile(values.reshape(shape), digest.hexdigest())
