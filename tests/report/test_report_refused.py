"""Run folders that the system does not let us read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from closed import close_folder
from sample_run import write_run
from slipstream.errors import RunFolderError
from slipstream.report import build_report
from slipstream.report.run import load_run


def test_folders_that_may_not_be_searched_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run", num_steps=2)
    close_folder(monkeypatch, folder)
    said = r"run cannot be read \(Permission denied\); name the folder that training printed, or"
    for path in (folder, folder / "below"):
        with pytest.raises(RunFolderError, match=said.replace("run ", f"{path.name} ", 1)):
            build_report(path)


def test_a_name_that_is_too_long_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"nnn cannot be read \(File name too long\)"):
        load_run(tmp_path / ("n" * 300))


def test_checkpoints_that_may_not_be_searched_are_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run", num_steps=2)
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True, exist_ok=True)
    close_folder(monkeypatch, folder / "checkpoints")
    run = load_run(folder)
    assert run.checkpoints == () and run.recipe is not None
    assert "checkpoints cannot be read (Permission denied): none are listed." in run.notices


def test_a_file_system_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run", num_steps=2)

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(RunFolderError, match=r"report\.html cannot be written: Read-only file sys"):
        build_report(folder)
