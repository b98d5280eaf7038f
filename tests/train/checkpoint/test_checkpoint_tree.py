"""Nested values survive the way through JSON text with every bit."""

import json
import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from checkpointing import POSITION
from slipstream.errors import CheckpointError
from slipstream.train.checkpoint.manifest import Manifest
from slipstream.train.checkpoint.model_state import plain_name
from slipstream.train.checkpoint.tree import decode, encode

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.just("$tensor")
KEYS = TEXT | st.integers() | st.sampled_from(["$tuple", "$items", "$tensor", "$float"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


def bits(value: Any) -> Any:
    """`value` with floats as their 64 bits and with types, so that == means identical."""
    if isinstance(value, float):
        return "float", "nan" if math.isnan(value) else struct.pack("<d", value)
    if isinstance(value, dict):
        return "dict", [(bits(k), bits(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [bits(v) for v in value]
    return type(value).__name__, value


@settings(deadline=None)
@given(value=VALUES)
def test_values_come_back_identical_through_a_manifest(value: Any) -> None:
    tensors: dict[str, Tensor] = {}
    manifest = {
        "sequence": 1,
        "step": 1,
        "position": POSITION.model_dump(),
        "metric": None,
        "recipe": None,
        "plan": None,
        "counters": {"value": encode(value, "value", tensors)},
        "files": {},
        "model": {"kind": "M"},
        "optimizer": {"kind": "O", "state": {}, "groups": []},
    }
    text = Manifest.model_validate_json(json.dumps(manifest)).to_text()
    stored = json.loads(text)
    del stored["manifest_sha256"]
    again = Manifest.model_validate_json(json.dumps(stored)).counters["value"]
    assert bits(decode(again, tensors, "value")) == bits(value)


def test_tensors_are_found_at_any_depth() -> None:
    tensors: dict[str, Tensor] = {}
    value = {"a": [torch.arange(3), ({7: torch.ones(())},)]}
    coded = encode(value, "s", tensors)
    assert sorted(tensors) == ["s/a/0", "s/a/1/0/7"]
    back = decode(coded, tensors, "s")
    assert back["a"][0] is tensors["s/a/0"]
    assert back["a"][1][0][7].item() == 1.0


def test_values_without_json_form_are_named() -> None:
    for value, what in (
        (b"x", "bytes"),
        ({1, 2}, "set"),
        (torch.float32, "dtype"),
        (1j, "complex"),
    ):
        with pytest.raises(CheckpointError, match=rf"s/0 is a .*{what}, which a checkpoint"):
            encode([value], "s", {})
    with pytest.raises(CheckpointError, match="s is a meta tensor"):
        encode(torch.empty(2, device="meta"), "s", {})
    sparse = torch.eye(2).to_sparse()
    with pytest.raises(CheckpointError, match=r"s is a torch.sparse_coo tensor"):
        encode(sparse, "s", {})


def test_one_name_for_two_tensors_is_refused() -> None:
    value = {1: torch.zeros(1), "1": torch.ones(1)}
    with pytest.raises(CheckpointError, match="two values of the state have the name 's/1'"):
        encode(value, "s", {})


def test_names_without_the_compiler_level() -> None:
    assert plain_name("_orig_mod.layer._orig_mod.weight") == "layer.weight"
    assert plain_name("my_orig_mod.weight") == "my_orig_mod.weight"
