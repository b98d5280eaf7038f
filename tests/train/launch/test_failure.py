"""Which of several failing ranks is told to the user, and in what words."""

import errno
import json
import os
import signal
from pathlib import Path

import pytest

from slipstream.errors import (
    DataError,
    LaunchError,
    RankFailure,
    RunFolderError,
    SlipstreamError,
)
from slipstream.train.launch.failure import (
    ErrorRecord,
    RankEnd,
    as_error,
    attributed,
    read_error,
    root_cause,
    write_error,
)

GONE = ErrorRecord("RankFailure", "rank 2 did not come to step 7 within 10 s", 10.0)
DAMAGED = ErrorRecord("DataError", "train.gz is damaged", 10.4)
DEFECT = ErrorRecord("KeyError", "'x'", 10.2, "Traceback ...")


def error_of(ends: list[RankEnd], num_ranks: int = 4) -> SlipstreamError:
    return as_error(ends, num_ranks=num_ranks)


def said(*texts: str, kind: str = "DataError") -> list[RankEnd]:
    """Ranks from 0 on that failed one after the other, each with its own words."""
    return [
        RankEnd(rank, 1, ErrorRecord(kind, text, 10.0 - rank)) for rank, text in enumerate(texts)
    ]


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


def test_an_error_that_finds_no_space_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", refuse)
    write_error(DataError("train.gz is damaged"), tmp_path / "error.json")
    said = capsys.readouterr().err
    assert said.startswith("train.gz is damaged\n") and "No space left on device" in said


def test_a_rank_is_named_once() -> None:
    assert attributed(1, "train.gz is damaged") == "rank 1: train.gz is damaged"
    for text in ("rank 1 cannot reach rank 0", "Rank 1 froze", "rank 1: train.gz is damaged"):
        assert attributed(1, text) == text
    assert attributed(1, "rank 10 froze") == "rank 1: rank 10 froze"
    assert attributed(0, "rank 1 froze") == "rank 0: rank 1 froze"
    assert attributed(1, "rank 0: train.gz is damaged") == "rank 0: train.gz is damaged"


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
    error = error_of([RankEnd(2, 1, DAMAGED), RankEnd(0, 1, GONE)])
    assert type(error) is DataError
    assert str(error) == "rank 2: train.gz is damaged"


def test_a_killed_rank_is_named_with_its_signal_and_what_others_said() -> None:
    error = error_of([RankEnd(2, -signal.SIGKILL, None), RankEnd(0, 1, GONE)])
    assert type(error) is RankFailure
    assert str(error) == (
        "rank 2 was ended by SIGKILL; the system ends processes so when memory runs out."
        " rank 0: rank 2 did not come to step 7 within 10 s"
    )


def test_a_frozen_rank_is_named_by_the_others_and_by_its_end() -> None:
    error = error_of([RankEnd(0, 1, GONE), RankEnd(2, -signal.SIGKILL, None)])
    assert type(error) is RankFailure
    assert str(error).startswith("rank 0: rank 2 did not come to step 7")
    assert str(error).endswith(" s. Rank 2 did not end when asked; killed it.")


def test_a_rank_that_names_itself_is_not_named_twice() -> None:
    record = ErrorRecord("RankFailure", "Rank 0 lost its peers", 1.0)
    assert str(error_of([RankEnd(0, 1, record)])) == "Rank 0 lost its peers"
    assert str(error_of([RankEnd(1, 1, record)])) == "rank 1: Rank 0 lost its peers"


def test_other_endings_have_words() -> None:
    assert "ended with exit code 7" in str(error_of([RankEnd(1, 7, None)]))
    assert "was ended by SIGSEGV." in str(error_of([RankEnd(1, -signal.SIGSEGV, None)]))


@pytest.mark.parametrize("kind", ["KeyError", "SystemExit", "annotations", "Exception"])
def test_what_nobody_raised_on_purpose_is_a_launch_error(kind: str) -> None:
    error = error_of([RankEnd(1, 1, ErrorRecord(kind, "text", 1.0, "Traceback"))])
    assert type(error) is LaunchError
    assert str(error) == f"rank 1 failed with {kind}: text"


def test_every_class_of_ours_comes_back_as_itself() -> None:
    for kind in SlipstreamError.__subclasses__():
        error = error_of([RankEnd(1, 1, ErrorRecord(kind.__name__, "text", 1.0))])
        assert type(error) is kind


def test_what_all_ranks_say_is_no_ranks_own() -> None:
    error = error_of(said("no file x", "no file x", "no file x"), num_ranks=3)
    assert type(error) is DataError
    assert str(error) == "no file x"


def test_a_rank_that_the_launcher_ended_before_it_could_say_the_same_changes_nothing() -> None:
    ends = [*said("no file x", "no file x"), RankEnd(2, -signal.SIGTERM, None)]
    assert str(error_of(ends, num_ranks=3)) == "no file x"


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        (said("no file x"), "rank 0: no file x"),
        (said("no file x", "no file y"), "rank 1: no file y"),
        ([*said("no file x", "no file x"), RankEnd(3, 1, GONE)], "rank 1: no file x"),
    ],
)
def test_a_rank_with_words_of_its_own_is_named(ends: list[RankEnd], text: str) -> None:
    assert str(error_of(ends)) == text


def test_the_only_rank_needs_no_number() -> None:
    assert str(error_of(said("no file x"), num_ranks=1)) == "no file x"


def test_what_rank_0_did_for_all_keeps_its_class() -> None:
    others = said("the folder is full", "the folder is full", kind="SlipstreamError")
    ends = [*others, RankEnd(2, 1, ErrorRecord("RunFolderError", "the folder is full", 20.0))]
    assert type(error_of(ends)) is RunFolderError


def test_a_defect_of_every_rank_is_no_ranks_own() -> None:
    defects = said("'x'", "'x'", kind="KeyError")
    assert str(error_of(defects, num_ranks=2)) == "every rank failed with KeyError: 'x'"
    assert str(error_of(defects, num_ranks=3)) == "rank 1 failed with KeyError: 'x'"
