"""IDX files, whole and damaged: each damage is named with its file and the way out."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from slipstream.data.idx import read_idx
from slipstream.errors import DataError

Idx = Callable[[NDArray[np.uint8]], bytes]
VALUES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("zipped", [False, True])
def test_a_file_comes_back_with_its_digest(tmp_path: Path, idx: Idx, zipped: bool) -> None:
    import hashlib

    content = idx(VALUES)
    path = tmp_path / "values"
    path.write_bytes(gzip.compress(content) if zipped else content)
    file = read_idx(path, dimensions=3, remedy="none needed")
    assert np.array_equal(file.values, VALUES) and file.values.dtype == np.uint8
    assert file.sha256 == hashlib.sha256(content).hexdigest()


def damaged(idx: Idx) -> dict[str, tuple[bytes, str]]:
    content = idx(VALUES)
    zipped = gzip.compress(content)
    wrong_sum = bytearray(zipped)
    wrong_sum[-8] ^= 1
    wrong_body = bytearray(zipped)
    wrong_body[12] ^= 0xFF
    huge = content[:4] + b"\xff" * 12 + content[16:]
    none = content[:4] + bytes(4) + content[8:16]
    return {
        "empty": (b"", "it starts with nothing"),
        "html": (b"<html>not found</html>", "is not an IDX file of bytes in 3 dimensions"),
        "labels instead": (idx(VALUES.reshape(-1)), "not 00 00 08 03"),
        "floats": (content[:2] + b"\x0d" + content[3:], "is not an IDX file"),
        "header cut": (content[:9], "ends inside its header, after 9 bytes"),
        "body cut": (content[:-5], r"is truncated: 19 of 24 bytes of the shape \[2, 3, 4\]"),
        "too long": (content + b"x", "goes on after the 24 bytes"),
        "too long, zipped": (gzip.compress(content + b"x"), "goes on after the 24 bytes"),
        "huge count": (huge, "which is no size for a data set"),
        "no samples": (none, r"declares the shape \[0, 3, 4\]"),
        "gzip cut": (zipped[:-9], "is truncated"),
        "gzip trailer cut": (zipped[:-3], "is truncated"),
        "gzip checksum": (bytes(wrong_sum), "is damaged"),
        "gzip body": (bytes(wrong_body), r"is (damaged|truncated|not an IDX)"),
        "only gzip magic": (b"\x1f\x8b", "is truncated"),
    }


@pytest.mark.parametrize("kind", damaged(lambda values: bytes([0, 0, 8, values.ndim]) + bytes(40)))
def test_damage_is_named(tmp_path: Path, idx: Idx, kind: str) -> None:
    content, message = damaged(idx)[kind]
    path = tmp_path / "values-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(path, dimensions=3, remedy="fetch it again")
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).endswith(": fetch it again")


@given(position=st.integers(0, 10**6), byte=st.integers(0, 255), length=st.integers(0, 10**6))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_change_of_a_byte_and_no_cut_gets_past_unnoticed(
    tmp_path: Path, idx: Idx, position: int, byte: int, length: int
) -> None:
    original = idx(VALUES)
    content = bytearray(gzip.compress(original, mtime=0))
    content[position % len(content)] = byte
    del content[1 + length % len(content) :]
    path = tmp_path / "values"
    path.write_bytes(content)
    try:
        file = read_idx(path, dimensions=3, remedy="fetch it again")
    except DataError as error:
        assert str(path) in str(error)
    else:
        # What was changed is the gzip header, which says nothing about the content.
        assert np.array_equal(file.values, VALUES)


def test_a_small_file_that_unpacks_to_much_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    header = bytes([0, 0, 8, 1]) + (10).to_bytes(4, "big")
    path.write_bytes(gzip.compress(header + bytes(50_000_000)))
    with pytest.raises(DataError, match="goes on after the 10 bytes"):
        read_idx(path, dimensions=1, remedy="fetch it again")


def test_missing_files_folders_and_pipes_are_named(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, message in [
        (tmp_path / "none", "is missing"),
        (tmp_path, "is not a regular file"),
        (pipe, "is not a regular file"),
        (tmp_path / ("x" * 300), "cannot be read"),
    ]:
        with pytest.raises(DataError, match=message):
            read_idx(path, dimensions=3, remedy="fetch it again")
