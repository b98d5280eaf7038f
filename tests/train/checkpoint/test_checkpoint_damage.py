"""Checkpoints are untrusted: damage and malice end in a sentence that names file and field."""

import hashlib
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing import Two, save
from slipstream.errors import CheckpointError
from slipstream.train.checkpoint import latest, load
from slipstream.train.checkpoint.manifest import read_manifest, sealed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return save(tmp_path, model, optimizer).path


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and give it a right checksum again, as an attacker would."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    del content["manifest_sha256"]
    path.write_text(sealed(content))


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        load(folder)
    return str(error.value)


def rehash(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)
    record = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite(folder, lambda content: content["files"].__setitem__(name, record))


@pytest.mark.parametrize("name", ["model", "optimizer", "state"])
def test_one_flipped_bit_is_found(folder: Path, name: str) -> None:
    path = folder / f"{name}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert f"{path} cannot be used: its SHA-256" in refused(folder)


def test_a_flipped_digit_in_the_manifest_is_found(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"seed": 7', '"seed": 8'))
    assert "manifest_sha256 does not match" in refused(folder)


@pytest.mark.parametrize("keep", [0, 1, 100])
@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_truncation_is_found_and_latest_passes_over(folder: Path, name: str, keep: int) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[:keep])
    assert str(path) in refused(folder)
    with pytest.raises(CheckpointError, match=name):
        latest(folder.parent)


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "state.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert f"{folder / name} cannot be used: No such file" in refused(folder)


@pytest.mark.parametrize(
    "file", ["../../secret", "/etc/passwd", "model.safetensors/../x", "other.safetensors"]
)
def test_no_file_name_leads_out_of_the_folder(folder: Path, file: str) -> None:
    record = {"bytes": 1, "sha256": "0" * 64}
    rewrite(folder, lambda content: content["files"].__setitem__(file, record))
    assert "manifest.json cannot be used: field files" in refused(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", -1),
        ("step", "3"),
        ("step", 2**70),
        ("metric", "0.9"),
        ("counters", []),
        ("unheard_of", 1),
        ("position", {"epoch": 0, "step_in_epoch": 0, "world_size": 0, "global_batch_size": 1}),
        ("position", {"epoch": 0, "step_in_epoch": 0}),
        ("files", {}),
    ],
)
def test_wrong_fields_are_named(folder: Path, field: str, value: Any) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    del content["manifest_sha256"]
    path.write_text(sealed({**content, field: value}))
    assert f"{path} cannot be used: field {field}" in refused(folder)


@pytest.mark.parametrize(
    "text",
    ["[]", "{", "[" * 100_000, "nan", "\x00", '{"format": 1' + "0" * 5000 + "}", '"\\ud800"'],
)
def test_text_that_is_no_manifest(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    assert "manifest.json" in refused(folder)


def test_another_format_says_so(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace("checkpoint/1", "checkpoint/2"))
    assert "has format 'slipstream-checkpoint/2', this version reads" in refused(folder)


def test_a_huge_manifest_is_not_read(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 2**40)  # sparse: takes no space
    assert "more than 67108864 bytes" in refused(folder)


def test_a_huge_file_is_not_read(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 2**40)
    assert "it has 1099511627776 bytes, the manifest says" in refused(folder)


@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_only_regular_files_are_opened(folder: Path, what: str, tmp_path: Path) -> None:
    path = folder / "model.safetensors"
    path.rename(tmp_path / "elsewhere")
    if what == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif what == "pipe":
        os.mkfifo(path)  # opening it would wait for ever
    else:
        path.mkdir()
    assert f"{path} cannot be used: it is not a regular file" in refused(folder)


def safetensors_file(header: object, payload: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 2**63) + b"{}",
        safetensors_file({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
        safetensors_file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}, b"1" * 8),
        safetensors_file({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1" * 4),
        safetensors_file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"1" * 8),
        b"",
        pickle.dumps({"a": 1}),
    ],
    ids=["endless-header", "huge", "too-long", "negative", "gap", "empty", "pickle"],
)
def test_hostile_tensor_files_are_refused_before_allocation(folder: Path, data: bytes) -> None:
    rehash(folder, "model.safetensors", data)
    assert f"{folder / 'model.safetensors'} cannot be used" in refused(folder)


@pytest.mark.parametrize(
    "value",
    [
        {"$tensor": "absent"},
        {"$tensor": ["a"]},
        {"$float": "7"},
        {"$float": []},
        {"$tuple": 1},
        {"$items": [[1]]},
        {"$items": [[[], 1]]},
        {"$tuple": [], "more": 1},
    ],
)
def test_damaged_marks_are_refused(folder: Path, value: object) -> None:
    rewrite(folder, lambda content: content["counters"].__setitem__("x", value))
    assert "counters/x holds a damaged" in refused(folder)


def test_a_layout_that_is_no_permutation_is_refused(folder: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["optimizer"]["dim_orders"] = {"first.weight/momentum_buffer": [0, 0]}

    rewrite(folder, change)
    # There is no such tensor before the first step: named all the same.
    assert "layout of first.weight/momentum_buffer is damaged" in refused(folder)


def test_a_tie_to_nothing_is_refused(folder: Path) -> None:
    rewrite(folder, lambda content: content["model"].__setitem__("tied", {"a": "b"}))
    assert "a shares the tensor of b, which is not in it" in refused(folder)


def test_the_manifest_reads_back_equal(folder: Path) -> None:
    manifest = read_manifest(folder)
    (folder / "manifest.json").write_text(manifest.to_text())
    assert read_manifest(folder) == manifest
