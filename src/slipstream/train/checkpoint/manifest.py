"""The manifest of a checkpoint: what is in it, checked field by field before anything is used.

A checkpoint is a folder `step-00000123/` of four files:

    manifest.json           this record
    model.safetensors       parameters and persistent buffers by name
    optimizer.safetensors   tensors of the optimizer's state, by parameter name
    state.safetensors       named tensors of the loop: random streams, "rank0/..." per rank

Checkpoints are untrusted input. The manifest is read up to a size limit; its file names are a
closed set, so none leads out of the folder; each file's size and SHA-256 stand in it.
"""

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from slipstream.errors import CheckpointError

FORMAT: Final = "slipstream-checkpoint/1"
MANIFEST: Final = "manifest.json"
MODEL: Final = "model.safetensors"
OPTIMIZER: Final = "optimizer.safetensors"
STATE: Final = "state.safetensors"
MAX_MANIFEST_BYTES = 64 * 2**20

FileName = Literal["model.safetensors", "optimizer.safetensors", "state.safetensors"]
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Name = Annotated[str, Field(min_length=1, max_length=4096)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Position(_Record):
    """Where in the run a checkpoint was taken, and for which layout of the job.

    epoch: number of finished epochs. step_in_epoch: optimizer steps done in the epoch under way
    (0 = at its start). The others fix which samples those steps used; num_samples: of the training
    set. None where nobody said.
    """

    epoch: Count
    step_in_epoch: Count
    world_size: Annotated[int, Field(ge=1, le=2**31)]
    global_batch_size: Annotated[int, Field(ge=1, le=2**31)]
    seed: int = 0
    dataset: Name | None = None
    num_samples: Count | None = None


class FileRecord(_Record):
    """Size and SHA-256 (64 hexadecimal digits) of one file."""

    bytes: Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class ModelRecord(_Record):
    """tied: name of a shared tensor -> the name that holds it; extra: modules' extra state."""

    kind: str
    tied: dict[Name, Name] = {}
    extra: dict[Name, JsonValue] = {}


class GroupRecord(_Record):
    """One parameter group: its parameters by name, and its options (an encoded dict)."""

    parameters: tuple[Name, ...]
    options: dict[str, JsonValue]


class OptimizerRecord(_Record):
    """State by parameter name (encoded); dim_orders: of tensors that were not contiguous."""

    kind: str
    state: dict[Name, dict[str, JsonValue]]
    groups: tuple[GroupRecord, ...]
    dim_orders: dict[Name, tuple[Count, ...]] = {}


class Manifest(_Record):
    """All of a checkpoint that is not a tensor. `sequence` counts the saves of a run folder."""

    format: Literal["slipstream-checkpoint/1"] = FORMAT
    sequence: Count
    step: Count
    position: Position
    metric: float | None
    recipe: str | None
    plan: str | None
    counters: dict[str, JsonValue]
    files: dict[FileName, FileRecord]
    model: ModelRecord
    optimizer: OptimizerRecord

    def to_text(self) -> str:
        """The JSON text, with its own SHA-256 as the last field."""
        return sealed(self.model_dump(mode="json"))


def read_manifest(folder: Path) -> Manifest:
    """The validated manifest of the checkpoint in `folder`.

    Raises CheckpointError naming file and field when it is missing, too large, damaged, of another
    format, or lists other files than it must.
    """
    path = folder / MANIFEST
    text = read_small_file(path)
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        stated = content.pop("manifest_sha256", None)
        if content.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} has format {str(content.get('format'))[:80]!r}, this version reads"
                f" {FORMAT!r}: load it with the version of Slipstream that wrote it."
            )
        manifest = Manifest.model_validate_json(json.dumps(content))
        if stated != _digest(content):
            raise ValueError("manifest_sha256 does not match the content")
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise damaged(path, f"field {field}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from error
    missing = {MODEL, OPTIMIZER, STATE} - set(manifest.files)
    if missing:
        raise damaged(path, f"field files: {min(missing)} is missing")
    return manifest


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raise CheckpointError unless each file is a regular one of the manifest's size."""
    for name, record in manifest.files.items():
        path = folder / name
        size = regular_file_bytes(path)
        if size != record.bytes:
            raise damaged(path, f"it has {size} bytes, the manifest says {record.bytes}")


def regular_file_bytes(path: Path) -> int:
    """Size of `path`; raises CheckpointError if it is missing or anything but a regular file."""
    try:
        status = os.lstat(path)
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from error
    if not stat.S_ISREG(status.st_mode):
        raise damaged(path, "it is not a regular file")
    return status.st_size


def read_small_file(path: Path) -> str:
    """Text of a regular file of at most MAX_MANIFEST_BYTES; raises CheckpointError."""
    if regular_file_bytes(path) > MAX_MANIFEST_BYTES:
        raise damaged(path, f"it has more than {MAX_MANIFEST_BYTES} bytes")
    try:
        with open(path, "rb") as file:
            return file.read(MAX_MANIFEST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(path, str(error)) from error


def damaged(path: Path, why: str) -> CheckpointError:
    """The error for a file that cannot be trusted."""
    return CheckpointError(f"{path} cannot be used: {why}; use another checkpoint of the run.")


def sealed(content: dict[str, JsonValue]) -> str:
    """The JSON text of `content` with the field `manifest_sha256` added."""
    text = json.dumps({**content, "manifest_sha256": _digest(content)}, indent=1, allow_nan=False)
    return text + "\n"


def _digest(content: dict[str, JsonValue]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
