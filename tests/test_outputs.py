"""Files that a user names: what is refused, what is replaced, what is left by a failure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from closed import close_folder
from slipstream import durable
from slipstream.errors import SlipstreamError
from slipstream.outputs import check_output, same_output, write_output


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


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("length", [300, 250])
def test_names_that_are_too_long_are_refused_before_the_work(
    tmp_path: Path, overwrite: bool, length: int
) -> None:
    # 250 letters are a name, but with that of its temporary file they are too many.
    path = tmp_path / ("n" * length)
    said = r"nnn cannot be written \(File name too long\); choose another --plot\."
    for place in (path, path / "plot.svg") if length == 300 else (path,):
        with pytest.raises(SlipstreamError, match=said if place is path else "plot.svg cannot be"):
            check_output(place, "--plot", overwrite=overwrite)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_may_not_be_searched_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    close_folder(monkeypatch, tmp_path)
    for path in (tmp_path / "plan.json", tmp_path / "below" / "plan.json"):
        with pytest.raises(SlipstreamError, match=r"plan\.json cannot be written \(Permission den"):
            check_output(path, "--output", overwrite=overwrite)


def test_one_file_is_known_by_all_its_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "w"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    for way in ("p", "./p", "../w/p", "../link/p", str(folder / "p")):
        assert same_output(Path("p"), Path(way))
    assert not same_output(Path("p"), Path("q")) and not same_output(Path("p"), Path("../p"))
    # Links in the place of the files are replaced, each by a file of its own.
    for name in ("one", "other"):
        Path(name).symlink_to("target")
    assert not same_output(Path("one"), Path("other"))
