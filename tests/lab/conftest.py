"""Whether this machine lets anybody make namespaces, and a lab that leaves no trace elsewhere."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from lab_process import RunLab, run_lab_process

_NAMESPACES = ["--net", "--mount", "--pid", "--uts", "--fork"]


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip where neither this user nor a user namespace may make the lab's namespaces."""
    said = []
    for options in (_NAMESPACES, ["--user", "--map-root-user", *_NAMESPACES]):
        done = subprocess.run(["unshare", *options, "true"], capture_output=True, text=True)
        if done.returncode == 0:
            return
        said.append(done.stderr.strip())
    pytest.skip(f"this machine allows no network namespaces: {'; '.join(said)}")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which this test's labs have their temporary folders, and no other lab has."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / f"slipstream-lab-{os.geteuid()}"


@pytest.fixture
def lab(namespaces: None, place: Path) -> RunLab:
    """Runs `slipstream lab` with the arguments given, to its end."""
    return run_lab_process
