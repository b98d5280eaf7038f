"""metrics.jsonl: what is written comes back, torn ends do no harm, resuming cuts."""

from __future__ import annotations

import json
import math
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import RunFolderError
from slipstream.report.records import format_line, parse_line
from slipstream.train.record.metrics import MetricsWriter, read_metrics, truncate_after


def step(number: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, **fields}


def test_records_come_back_and_are_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(step(1, loss=2.5, epoch=1))
        assert read_metrics(path) == [step(1, loss=2.5, epoch=1)]
        writer.write({"kind": "skip", "step": 2, "ranks": [0, 3], "parameter": "NaN"})
    writer.close()
    assert read_metrics(path)[1] == {
        "kind": "skip",
        "step": 2,
        "ranks": [0, 3],
        "parameter": "NaN",
    }


def test_values_that_json_lacks_are_strict_json_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(step(1, loss=math.nan, accuracy=-math.inf, gradient_norm=math.inf))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (record,) = read_metrics(path)
    assert math.isnan(record["loss"])
    assert (record["accuracy"], record["gradient_norm"]) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"kind": "stp", "step": 1},
        {"kind": "step"},
        {"kind": "step", "step": -1},
        {"kind": "step", "step": True},
        {"kind": "step", "step": 1.0},
    ],
)
def test_a_malformed_record_is_refused_and_not_written(
    tmp_path: Path, record: dict[str, Any]
) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer, pytest.raises(ValueError, match="metrics record"):
        writer.write(record)
    assert path.read_text() == ""


@given(cut=st.integers(min_value=1))
def test_a_torn_end_is_ignored_and_mended(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    whole = format_line(step(1, loss=1.0))
    last = format_line(step(2, loss=2.0))
    kept = last[: cut % (len(last) + 1)]
    path.write_text(whole + kept)
    expected = [step(1, loss=1.0)] + ([step(2, loss=2.0)] if len(kept) >= len(last) - 1 else [])
    assert read_metrics(path) == expected
    with MetricsWriter(path) as writer:
        writer.write(step(3))
    assert read_metrics(path) == [*expected, step(3)]


def test_damage_before_the_end_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(format_line(step(1)) + "\n{]\n" + format_line(step(2)))
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl: line 3 is not a metrics record"):
        read_metrics(path)
    with pytest.raises(RunFolderError, match="line 3"):
        truncate_after(path, 1)
    with pytest.raises(RunFolderError, match="cannot be read"):
        read_metrics(tmp_path / "absent.jsonl")


@given(st.binary(max_size=60))
def test_any_line_is_a_record_or_none(line: bytes) -> None:
    record = parse_line(line)
    assert record is None or record["step"] >= 0


def test_deep_nesting_and_huge_steps_are_no_records() -> None:
    assert parse_line(b'{"kind":' + b"[" * 100_000) is None
    assert parse_line(b'{"kind":"step","step":1' + b"0" * 30 + b"}") is None
    assert parse_line(b'{"kind":"step","step":1' + b"0" * 5000 + b"}") is None


def test_truncating_drops_later_steps_and_keeps_the_rest_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert truncate_after(path, 3) == 0
    foreign = '{"kind": "later-version", "step": 2, "x": 1.50}\n'
    kept = format_line(step(1, loss=math.nan)) + foreign + format_line(step(3))
    path.write_text(kept + format_line(step(4)) + format_line(step(5)) + '{"kind":"st')
    path.chmod(0o640)
    assert truncate_after(path, 3) == 2
    assert path.read_text() == kept
    assert truncate_after(path, 3) == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]
    with MetricsWriter(path) as writer:
        writer.write({"kind": "resume", "step": 3})
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 3]


def test_a_file_that_cannot_be_opened_is_named_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl cannot be written.*free space"):
        MetricsWriter(tmp_path / "absent" / "metrics.jsonl")


def test_a_full_disk_is_said_once_and_ends_nothing() -> None:
    said: list[str] = []
    failure = "/dev/full cannot be written (No space left on device)"
    with MetricsWriter(Path("/dev/full"), note=said.append) as writer:
        for number in range(1, 4):
            writer.write(step(number))
        assert writer.flush() == failure
    assert said == [f"{failure}; training goes on, and it is tried again: free space there"]


def test_what_a_full_disk_refused_is_written_when_there_is_space_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    said: list[str] = []
    with MetricsWriter(path, note=said.append) as writer:
        writer.write(step(1))
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            # Half of the next line finds room.
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, hard))
            writer.write(step(2))
            writer.write(step(3))
            assert path.read_bytes().count(b"\n") == 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, before)
        assert len(said) == 1 and "metrics.jsonl cannot be written (File too large)" in said[0]
        assert writer.flush() is None
    assert read_metrics(path) == [step(1), step(2), step(3)]
