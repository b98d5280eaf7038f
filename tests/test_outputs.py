"""Files that a user names: what is refused, what is replaced, what is left by a failure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slipstream import durable
from slipstream.errors import SlipstreamError
from slipstream.outputs import check_output, write_output


def test_a_new_file_is_written_whole_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    write_output(path, b"bytes", "--output", overwrite=False)
    assert path.read_bytes() == b"bytes" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("dangling", [False, True])
def test_what_exists_stays_unless_its_user_says_otherwise(tmp_path: Path, dangling: bool) -> None:
    path = tmp_path / "there.json"
    path.symlink_to("nowhere") if dangling else path.write_text("old")
    refused = r"there\.json exists and was not overwritten; choose another --plot, or .*--overwrite"
    with pytest.raises(SlipstreamError, match=refused):
        check_output(path, "--plot", overwrite=False)
    with pytest.raises(SlipstreamError, match=refused):
        write_output(path, b"new", "--plot", overwrite=False)
    write_output(path, b"new", "--plot", overwrite=True)
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_a_file_that_appears_while_the_work_is_done_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "late.json", durable.write_file_durably

    def overtaken(temporary: Path, data: bytes) -> None:
        write(temporary, data)
        path.write_text("of another")

    monkeypatch.setattr(durable, "write_file_durably", overtaken)
    with pytest.raises(SlipstreamError, match="exists and was not overwritten"):
        write_output(path, b"new", "--output", overwrite=False)
    assert path.read_text() == "of another" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    path = tmp_path / "plan.json"
    if overwrite:
        path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SlipstreamError, match=r"plan\.json cannot be written \(No space left"):
        write_output(path, b"new", "--output", overwrite=overwrite)
    left = [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()]
    assert left == ([("plan.json", "old")] if overwrite else [])


@pytest.mark.parametrize("overwrite", [False, True])
def test_folders_and_devices_are_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (tmp_path, pipe, Path(os.devnull)):
        with pytest.raises(SlipstreamError, match="is no regular file"):
            check_output(path, "--output", overwrite=overwrite)
    with pytest.raises(SlipstreamError, match=r"nowhere, where t\.json shall go, is no folder"):
        check_output(tmp_path / "nowhere" / "t.json", "--output", overwrite=overwrite)
