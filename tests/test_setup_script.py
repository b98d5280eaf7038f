"""`scripts/setup` with interpreters that only pretend: what it makes, keeps and refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Understands what the script asks of a Python; notes in $CALLS what it was asked to make.
PRETENDED_PYTHON = """#!/usr/bin/env bash
case "$*" in
    -V) echo "Python $PRETENDED_VERSION" ;;
    *version_info*) [ "$PRETENDED_VERSION" != 3.10.0 ] ;;
    *ensurepip*) [ -z "${WITHOUT_ENSUREPIP:-}" ] ;;
    "-c import venv, pip") [ -z "${WITHOUT_PIP:-}" ] ;;
    "-m venv "*) echo "venv" >>"$CALLS"; mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
    "-m pip "*) echo "pip ${*:3}" >>"$CALLS"; [ -z "${KILLED:-}" ] || kill -9 $PPID ;;
esac
"""


class Checkout:
    """A copy of what the script reads, and a way to run it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout"
        self.calls = folder / "calls"
        self.python = folder / "python"
        (self.folder / "scripts").mkdir(parents=True)
        for name in ("scripts/setup", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.folder / name)
        self.python.write_text(PRETENDED_PYTHON)
        self.python.chmod(0o755)

    def setup(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        self.calls.write_text("")
        defaults = {
            "CALLS": str(self.calls),
            "PYTHON": str(self.python),
            "PRETENDED_VERSION": "3.11.2",
        }
        return subprocess.run(
            [str(self.folder / "scripts" / "setup"), *arguments],
            env={"PATH": os.environ["PATH"], **defaults, **environment},
            capture_output=True,
            text=True,
            timeout=30,
        )

    def called(self) -> list[str]:
        return [line.split()[0] for line in self.calls.read_text().splitlines()]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_makes_the_environment_once_and_then_does_nothing(checkout: Checkout) -> None:
    assert checkout.setup().returncode == 0
    assert checkout.called() == ["venv", "pip", "pip"]
    assert "--group test --group dev" in checkout.calls.read_text()
    again = checkout.setup()
    assert (again.returncode, again.stdout, again.stderr, checkout.called()) == (0, "", "", [])


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_bring_the_environment_up_to_date(
    checkout: Checkout, name: str
) -> None:
    checkout.setup()
    with (checkout.folder / name).open("a") as file:
        file.write("\n")
    assert checkout.setup().returncode == 0
    assert checkout.called() == ["pip", "pip"]


def test_killed_while_installing_it_starts_anew(checkout: Checkout) -> None:
    assert checkout.setup(KILLED="yes").returncode != 0
    leftover = checkout.folder / ".venv" / "half-made"
    leftover.write_text("")
    assert checkout.setup().returncode == 0
    assert checkout.called() == ["venv", "pip", "pip"]
    assert not leftover.exists()


def test_moved_checkout_gets_a_new_environment(checkout: Checkout) -> None:
    checkout.setup()
    checkout.folder = checkout.folder.rename(checkout.folder.with_name("elsewhere"))
    assert checkout.setup().returncode == 0
    assert checkout.called() == ["venv", "pip", "pip"]


def test_environment_of_another_is_used_but_never_cleared(
    checkout: Checkout, tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign"
    (foreign / "bin").mkdir(parents=True)
    shutil.copy(checkout.python, foreign / "bin" / "python")
    assert checkout.setup(str(foreign), KILLED="yes").returncode != 0
    (foreign / "theirs").write_text("")
    assert checkout.setup(str(foreign)).returncode == 0
    assert checkout.called() == ["pip", "pip"]
    assert (foreign / "theirs").exists()


def test_folder_that_is_no_environment_is_refused_untouched(checkout: Checkout) -> None:
    folder = checkout.folder / ".venv"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    run = checkout.setup()
    assert run.returncode == 1
    assert ".venv exists, but is no environment" in run.stderr
    assert "VENV=" in run.stderr
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


def test_python_that_is_too_old_is_named(checkout: Checkout) -> None:
    run = checkout.setup(PRETENDED_VERSION="3.10.0")
    assert run.returncode == 1
    assert f"{checkout.python} is Python 3.10.0, but Python 3.11 or newer is needed" in run.stderr
    assert not (checkout.folder / ".venv").exists()


def test_no_python_at_all(checkout: Checkout) -> None:
    run = checkout.setup(PYTHON="python-that-is-not-there")
    assert run.returncode == 1
    assert "no Python found; install Python 3.11 or newer" in run.stderr


def test_debian_python_without_venv_package(checkout: Checkout) -> None:
    run = checkout.setup(WITHOUT_ENSUREPIP="yes", WITHOUT_PIP="yes")
    assert run.returncode == 1
    assert "apt-get install python3-venv" in run.stderr
    assert checkout.setup(WITHOUT_ENSUREPIP="yes").returncode == 0
    assert checkout.called() == ["venv", "pip", "pip", "pip"]
    assert checkout.calls.read_text().splitlines()[1].startswith("pip --python .venv/bin/python")
