"""One safetensors file: written and flushed with its SHA-256, read only when all of it is right."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.train.checkpoint.manifest import FileRecord, damaged, regular_file_bytes

_CHUNK_BYTES = 4 * 2**20
_FORMAT = {"format": "pt"}


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write contiguous CPU `tensors` to `path`, flush to the device, return size and SHA-256.

    The file's bytes are read back for the digest, so it describes the file and not our memory.
    Raises OSError, also for what the safetensors library reports in its own way.
    """
    try:
        save_file(dict(tensors), path, metadata={**(metadata or {}), **_FORMAT})
    except safetensors.SafetensorError as error:
        raise OSError(f"{path.name} cannot be written: {error}") from error
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        return _digest(descriptor)
    finally:
        os.close(descriptor)


def read_tensors(path: Path, record: FileRecord) -> dict[str, Tensor]:
    """All tensors of `path`, copied to CPU memory.

    Size and digest are compared with `record` before a tensor is made, and the library accepts
    only headers whose tensors fill the file exactly: nothing larger than the file is allocated.
    Raises CheckpointError naming the file.
    """
    if regular_file_bytes(path) != record.bytes:
        raise damaged(path, f"it has not the {record.bytes} bytes that the manifest says")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = _digest(descriptor)
        finally:
            os.close(descriptor)
        if found != record:
            raise damaged(path, "its SHA-256 is not the one in the manifest")
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            # The library maps the file: without a copy a later change of it would reach us.
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise damaged(path, str(error)) from error


def check_storable(name: str, tensor: Tensor) -> None:
    """Raise CheckpointError for a dtype that the file format lacks (complex128)."""
    if tensor.dtype is torch.complex128:
        raise CheckpointError(
            f"{name} has dtype complex128, which safetensors cannot hold:"
            " keep its real and imaginary parts as two tensors."
        )


def _digest(descriptor: int) -> FileRecord:
    digest, size = hashlib.sha256(), 0
    while chunk := os.read(descriptor, _CHUNK_BYTES):
        digest.update(chunk)
        size += len(chunk)
    return FileRecord(bytes=size, sha256=digest.hexdigest())
