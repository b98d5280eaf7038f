"""Traces as values and as files: what is incomplete, out of order or empty is refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from slipstream.errors import TraceError
from slipstream.trace import Trace, TraceGradient, parameters_sha256

GRADIENTS = (
    TraceGradient(name="head.bias", numel=10, ready_seconds=0.01, needed_seconds=0.04),
    TraceGradient(name="head.weight", numel=640, ready_seconds=0.01, needed_seconds=0.04),
    TraceGradient(name="stem", numel=100, dtype="bfloat16", ready_seconds=0.09, needed_seconds=0.0),
)
TRACE = Trace(
    model="small",
    parameters_sha256=parameters_sha256(GRADIENTS),
    batch_size=32,
    input_seconds=0.001,
    forward_seconds=0.05,
    update_seconds=0.002,
    note="written by hand",
    gradients=GRADIENTS,
)
EXAMPLE = """{"format": "slipstream-trace/1", "model": "resnet50", "parameters_sha256": null,
 "batch_size": 32, "input_seconds": 0.0, "forward_seconds": 0.1, "update_seconds": 0.0,
 "gradients": [{"name": "fc.weight", "numel": 2048000, "dtype": "float32",
                "ready_seconds": 0.001, "needed_seconds": 0.099}]}"""


def changed(**fields: Any) -> str:
    """TRACE as text with top-level fields replaced."""
    return json.dumps({**json.loads(TRACE.to_json()), **fields})


def with_gradient(index: int, **fields: Any) -> str:
    """TRACE as text with fields of one gradient replaced, or removed where the value is `...`."""
    gradients = json.loads(TRACE.to_json())["gradients"]
    gradients[index] |= fields
    gradients[index] = {key: value for key, value in gradients[index].items() if value is not ...}
    return changed(gradients=gradients, parameters_sha256=None)


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    TRACE.save(path)
    assert Trace.load(path) == TRACE
    assert sorted(tmp_path.iterdir()) == [path], "nothing is left beside it"


def test_the_documented_example_is_read() -> None:
    trace = Trace.from_json(EXAMPLE)
    assert trace.bytes == 8_192_000
    assert trace.gradients[0].ready_spread_seconds is None


def test_what_follows_from_the_numbers() -> None:
    assert TRACE.backward_seconds == 0.09
    assert TRACE.compute_seconds == pytest.approx(0.001 + 0.05 + 0.09 + 0.002)
    assert TRACE.bytes == 40 + 2560 + 200
    assert TRACE.warnings() == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (changed(input_seconds=-0.1), "input_seconds: Input should be greater than or equal to 0"),
        (changed(forward_seconds=float("nan")), "forward_seconds: .* finite"),
        (changed(update_seconds=float("inf")), "update_seconds: .* finite"),
        (changed(update_seconds="2 ms"), "update_seconds: .* number"),
        (changed(batch_size=0), "batch_size"),
        (changed(format="slipstream-trace/2"), "format"),
        (changed(format="slipstream-plan/1"), "format"),
        (changed(gradients=[]), "gradients"),
        (changed(foward_seconds=1.0), "foward_seconds: Extra inputs"),
        (changed(parameters_sha256="abc"), "parameters_sha256"),
        (changed(parameters_sha256="0" * 64), "they were changed since the trace was recorded"),
        (with_gradient(1, name="head.bias"), "'head.bias' stands twice"),
        (with_gradient(0, name=""), "gradients.0.name"),
        (with_gradient(0, numel=-1), "gradients.0.numel"),
        (with_gradient(0, numel=2**60), "gradients.0.numel"),
        (with_gradient(0, numel=1.5), "gradients.0.numel"),
        (with_gradient(2, dtype="int8"), "gradients.2.dtype"),
        (with_gradient(1, ready_seconds=...), "gradients.1.ready_seconds: Field required"),
        (with_gradient(1, ready_seconds=-1e-3), "gradients.1.ready_seconds"),
        (with_gradient(1, ready_seconds=0.001), "'head.weight' is ready at 0.001 s, before"),
        (with_gradient(0, needed_seconds=0.06), "'head.bias' is first needed at 0.06 s, after"),
        ("", "the document"),
        (TRACE.to_json()[:-20], "the document"),
        ("[]", "the document"),
    ],
)
def test_a_damaged_trace_is_refused_with_file_and_field(
    text: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TraceError, match=rf"trace\.json is not a trace .*{words}"):
        Trace.load(path)


def test_a_trace_in_which_nothing_was_measured_is_refused() -> None:
    """All durations 0: an error, and never a step of 0 ms."""
    gradients = json.loads(TRACE.to_json())["gradients"]
    for gradient in gradients:
        gradient |= {"ready_seconds": 0.0, "needed_seconds": None}
    text = changed(gradients=gradients, forward_seconds=0.0, input_seconds=0.0, update_seconds=0.0)
    with pytest.raises(TraceError, match="the backward takes no time at all"):
        Trace.from_json(text)


def test_doubtful_traces_warn() -> None:
    unrecorded = [gradient.model_copy(update={"needed_seconds": None}) for gradient in GRADIENTS]
    without_forward = TRACE.model_copy(update={"forward_seconds": 0.0, "gradients": unrecorded})
    assert "forward takes no time" in without_forward.warnings()[0]
    at_the_end = [gradient.model_copy(update={"ready_seconds": 0.09}) for gradient in GRADIENTS]
    compiled = TRACE.model_copy(update={"gradients": tuple(at_the_end)})
    assert "compiled whole" in compiled.warnings()[0]


def test_unreadable_and_oversized_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere\.json cannot be read"):
        Trace.load(tmp_path / "nowhere.json")
    (tmp_path / "noise.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match=r"noise\.json cannot be read"):
        Trace.load(tmp_path / "noise.json")
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(TraceError, match=r"huge\.json is larger than any trace"):
        Trace.load(tmp_path / "huge.json")
    with pytest.raises(TraceError, match="cannot be written"):
        TRACE.save(tmp_path / "no folder" / "trace.json")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    TRACE.save(path)

    def full(source: Path, target: Path) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(TraceError, match="No space left"):
        TRACE.model_copy(update={"note": "new"}).save(path)
    assert Trace.load(path) == TRACE
    assert sorted(tmp_path.iterdir()) == [path]


def test_traces_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        TRACE.batch_size = 64


@given(st.permutations(GRADIENTS))
def test_the_digest_does_not_depend_on_the_order(order: list[TraceGradient]) -> None:
    assert parameters_sha256(order) == TRACE.parameters_sha256
    assert parameters_sha256(order[1:]) != TRACE.parameters_sha256
