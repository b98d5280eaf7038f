"""The end of a run on rank 0: the summary and the report, and nothing of its record lost unsaid."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slipstream.durable import write_text_atomic
from slipstream.errors import RunFolderError
from slipstream.report import build_report

SUMMARY_FILE = "summary.json"


def finish_folder(run_folder: Path, summary: dict[str, Any], refused: Sequence[str]) -> None:
    """Leaves summary and report in the folder of a run whose last checkpoint is saved.

    refused: a sentence for each file of its record that the disk has not taken. The summary marks
    a run as finished, so it comes after what a resumed run can write again. Raises RunFolderError
    that names the file and how to come by it.
    """
    resume = f"slipstream train --resume {shlex.quote(str(run_folder))}"
    if refused:
        raise _unfinished(" and ".join(refused), resume)
    path = run_folder / SUMMARY_FILE
    try:
        write_text_atomic(path, json.dumps(summary, indent=1) + "\n")
    except OSError as error:
        raise _unfinished(
            f"{path} cannot be written ({error.strerror or error})", resume
        ) from error
    try:
        build_report(run_folder)
    except RunFolderError as error:
        again = f"slipstream report {shlex.quote(str(run_folder))}"
        raise _unfinished(str(error).rstrip("."), again) from error


def report_early_end(run_folder: Path, note: Callable[[str], None]) -> None:
    """Builds the report of a run that ends before its last epoch; a failure is only noted."""
    try:
        build_report(run_folder)
    except RunFolderError as error:
        note(str(error))


def _unfinished(failure: str, command: str) -> RunFolderError:
    return RunFolderError(
        f"Training has reached its last epoch and its weights are saved, but {failure}. Free space"
        f" there, then finish by: {command}"
    )
