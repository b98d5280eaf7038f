"""`slipstream report`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sample_run import write_run
from slipstream.cli.main import main


def invoke(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["slipstream", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_report_is_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", num_steps=5)
    assert invoke(monkeypatch, "report", str(folder)) == 0
    assert str(folder / "report.html") in capsys.readouterr().out
    assert (folder / "report.html").is_file()
    assert invoke(monkeypatch, "report", str(folder), "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(folder / "report.html")}


def test_a_folder_without_a_run_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(monkeypatch, "report", str(tmp_path)) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "holds nothing of a run" in captured.err
