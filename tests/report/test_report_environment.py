"""What is written about the machine."""

from __future__ import annotations

import getpass
import json
import platform
from pathlib import Path

import pytest

from slipstream import __version__
from slipstream.report import environment
from slipstream.report.environment import _cpu_model, _gpu_models


def test_the_environment_is_json_and_knows_the_basics() -> None:
    known = environment()
    assert json.loads(json.dumps(known)) == known
    assert platform.python_version() in known["python"]
    assert known["memory_bytes"] > 2**28
    assert 1 <= known["usable_cores"] <= known["cores"]
    assert known["packages"]["torch"] is not None
    assert known["packages"]["slipstream"] == __version__


def test_neither_user_nor_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SECRET_TOKEN", "do-not-tell")
    known = environment()
    assert known["variables"]["OMP_NUM_THREADS"] == "3"
    told = json.dumps(known)
    assert "do-not-tell" not in told
    assert platform.node() not in told.split('"')
    assert getpass.getuser() not in told.split('"')


def test_processor_and_graphics_cards_come_from_the_kernel(tmp_path: Path) -> None:
    source = tmp_path / "cpuinfo"
    source.write_text("processor\t: 0\nmodel name\t: Fast One @ 3 GHz: new\n")
    assert _cpu_model(source) == "Fast One @ 3 GHz: new"
    for index in range(2):
        folder = tmp_path / "gpus" / str(index)
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t Card\nIRQ: 1\n")
    assert _gpu_models(tmp_path / "gpus") == ["Card", "Card"]
    assert _gpu_models(tmp_path / "absent") == []
