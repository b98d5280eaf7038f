"""Small IDX files and image sets, made on the spot."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from slipstream.data import ImageSet, fashion

WriteFashion = Callable[..., dict[str, str]]


def idx_bytes(values: NDArray[np.uint8]) -> bytes:
    """`values` as an IDX file of unsigned bytes."""
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, dtype=">u4").tobytes()
    return header + values.tobytes()


@pytest.fixture
def write_fashion() -> WriteFashion:
    """Writes the four files with random content; returns file name -> sha256 of the content."""

    def write(
        folder: Path, *, num_train: int = 12, num_test: int = 5, zipped: bool = True
    ) -> dict[str, str]:
        folder.mkdir(parents=True, exist_ok=True)
        generator = np.random.default_rng(3)
        digests = {}
        for split, count in (("train", num_train), ("t10k", num_test)):
            images = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
            labels = generator.integers(0, 10, count, dtype=np.uint8)
            for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
                name, content = f"{split}-{kind}-ubyte", idx_bytes(values)
                digests[name] = hashlib.sha256(content).hexdigest()
                if zipped:
                    (folder / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
                else:
                    (folder / name).write_bytes(content)
        return digests

    return write


@pytest.fixture
def idx() -> Callable[[NDArray[np.uint8]], bytes]:
    return idx_bytes


@pytest.fixture
def no_system_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Points the Debian package's folder to one that does not exist (yet)."""
    folder = tmp_path / "system"
    monkeypatch.setattr(fashion, "SYSTEM_FOLDER", folder)
    return folder


@pytest.fixture
def image_set() -> ImageSet:
    """24 coloured images of 6 x 5 pixels; image i holds its index in its first pixel."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (24, 3, 6, 5), dtype=torch.uint8, generator=generator)
    images[:, 0, 0, 0] = torch.arange(24, dtype=torch.uint8)
    return ImageSet("coloured", images, torch.arange(24) % 4, ("a", "b", "c", "d"))
