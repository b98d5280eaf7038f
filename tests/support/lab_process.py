"""`slipstream lab` as a process, and what is left of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RunLab = Callable[..., "LabRun"]
QUICK = ("--no-check", "--rate", "100mbit")
"""A lab that starts at once, for tests of everything but the links."""


@dataclass(frozen=True)
class LabRun:
    """A finished `slipstream lab`."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def result(self) -> dict[str, Any]:
        """What --json printed, which must be all of standard output."""
        document: dict[str, Any] = json.loads(self.stdout)
        return document


def lab_command(*arguments: str) -> list[str]:
    """The command line of a lab."""
    return [sys.executable, "-m", "slipstream", "lab", *arguments]


def run_lab_process(
    *arguments: str, prefix: tuple[str, ...] = (), limit_seconds: float = 90.0, **environment: str
) -> LabRun:
    """Runs a lab to its end, behind the command `prefix`, with changes to the environment."""
    done = subprocess.run(
        [*prefix, *lab_command(*arguments)],
        capture_output=True,
        text=True,
        timeout=limit_seconds,
        env={**os.environ, **environment},
    )
    return LabRun(done.returncode, done.stdout, done.stderr)


def python(script: str, *arguments: object) -> tuple[str, ...]:
    """The end of a command line: a script, run by the environment's own Python."""
    return ("--", "python", "-c", script, *map(str, arguments))


def processes_with(mark: str) -> list[int]:
    """Processes whose command line contains `mark`; ended ones that nobody has reaped do not."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # It has just ended.
    return found


def wait_until(happened: Callable[[], object], limit_seconds: float = 30.0) -> None:
    """Waits for something to become true; fails when it does not in time."""
    deadline = time.monotonic() + limit_seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
