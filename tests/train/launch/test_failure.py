"""Which of several failing ranks is told to the user, and in what words."""

import json
import signal
from pathlib import Path

import pytest

from slipstream.errors import DataError, LaunchError, RankFailure, SlipstreamError
from slipstream.train.launch.failure import (
    ErrorRecord,
    RankEnd,
    as_error,
    read_error,
    root_cause,
    write_error,
)

GONE = ErrorRecord("RankFailure", "rank 2 did not come to step 7 within 10 s", 10.0)
DAMAGED = ErrorRecord("DataError", "train.gz is damaged", 10.4)
DEFECT = ErrorRecord("KeyError", "'x'", 10.2, "Traceback ...")


def test_a_record_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    write_error(DataError("train.gz is damaged"), path)
    record = read_error(path)
    assert record is not None
    assert (record.kind, record.text, record.traceback) == ("DataError", "train.gz is damaged", "")
    elastic = json.loads(path.read_text())["message"]
    assert elastic["message"] == "DataError: train.gz is damaged"
    assert int(elastic["extraInfo"]["timestamp"]) == int(record.time_seconds)
    assert [entry.name for entry in tmp_path.iterdir()] == ["error.json"]


def test_a_defect_keeps_its_traceback(tmp_path: Path) -> None:
    try:
        raise KeyError("x")
    except KeyError as error:
        write_error(error, tmp_path / "error.json")
    record = read_error(tmp_path / "error.json")
    assert record is not None
    assert "test_a_defect_keeps_its_traceback" in record.traceback


def test_the_starter_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    write_error(DataError("damaged"))
    assert (tmp_path / "error.json").is_file()


def test_without_a_starter_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    write_error(DataError("damaged"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"message": "elsewhere"}'])
def test_a_file_without_a_record_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "error.json").write_text(content)
    assert read_error(tmp_path / "error.json") is None
    assert read_error(tmp_path / "missing.json") is None


@pytest.mark.parametrize(
    ("ends", "rank"),
    [
        ([RankEnd(3, 1, DAMAGED)], 3),
        # A peer that is gone is the effect; the other's own error is the cause, though later.
        ([RankEnd(0, 1, GONE), RankEnd(2, 1, DAMAGED)], 2),
        ([RankEnd(0, 1, DAMAGED), RankEnd(2, 1, DEFECT)], 2),
        # Killed from outside, and the launcher saw that first.
        ([RankEnd(2, -signal.SIGKILL, None), RankEnd(0, 1, GONE)], 2),
        ([RankEnd(2, 7, None), RankEnd(0, -signal.SIGTERM, None)], 2),
        # A frozen rank: the others tell, and the launcher kills it at last.
        ([RankEnd(0, 1, GONE), RankEnd(1, 1, GONE), RankEnd(2, -signal.SIGKILL, None)], 0),
        ([RankEnd(2, -signal.SIGTERM, None), RankEnd(0, 1, GONE)], 0),
        ([RankEnd(2, -signal.SIGTERM, None)], 2),
    ],
)
def test_the_first_cause_is_found(ends: list[RankEnd], rank: int) -> None:
    assert root_cause(ends).rank == rank


def test_the_error_is_of_the_class_that_the_rank_raised() -> None:
    error = as_error([RankEnd(2, 1, DAMAGED), RankEnd(0, 1, GONE)])
    assert type(error) is DataError
    assert str(error) == "rank 2: train.gz is damaged"


def test_a_killed_rank_is_named_with_its_signal_and_what_others_said() -> None:
    error = as_error([RankEnd(2, -signal.SIGKILL, None), RankEnd(0, 1, GONE)])
    assert type(error) is LaunchError
    assert str(error) == (
        "rank 2 was ended by SIGKILL; the system ends processes so when memory runs out."
        " rank 0: rank 2 did not come to step 7 within 10 s"
    )


def test_a_frozen_rank_is_named_by_the_others_and_by_its_end() -> None:
    error = as_error([RankEnd(0, 1, GONE), RankEnd(2, -signal.SIGKILL, None)])
    assert type(error) is RankFailure
    assert str(error).startswith("rank 0: rank 2 did not come to step 7")
    assert str(error).endswith(" Rank 2 did not end when asked; killed it.")


def test_a_rank_that_names_itself_is_not_named_twice() -> None:
    record = ErrorRecord("RankFailure", "Rank 0 lost its peers", 1.0)
    assert str(as_error([RankEnd(0, 1, record)])) == "Rank 0 lost its peers"
    assert str(as_error([RankEnd(1, 1, record)])) == "rank 1: Rank 0 lost its peers"


def test_other_endings_have_words() -> None:
    assert "ended with exit code 7" in str(as_error([RankEnd(1, 7, None)]))
    assert "was ended by SIGSEGV." in str(as_error([RankEnd(1, -signal.SIGSEGV, None)]))


@pytest.mark.parametrize("kind", ["KeyError", "SystemExit", "annotations", "Exception"])
def test_what_nobody_raised_on_purpose_is_a_launch_error(kind: str) -> None:
    error = as_error([RankEnd(1, 1, ErrorRecord(kind, "text", 1.0, "Traceback"))])
    assert type(error) is LaunchError
    assert str(error) == f"rank 1 failed with {kind}: text"


def test_every_class_of_ours_comes_back_as_itself() -> None:
    for kind in SlipstreamError.__subclasses__():
        error = as_error([RankEnd(1, 1, ErrorRecord(kind.__name__, "text", 1.0))])
        assert type(error) is kind
