"""Standard output of a command: for machines the document alone, for people a few lines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TextIO


@contextmanager
def reserved_stdout() -> Iterator[TextIO]:
    """The real standard output; whatever else is written there meanwhile goes to standard error.

    Holds for libraries in C and for child processes, too.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with (
            os.fdopen(os.dup(kept), "w", encoding="utf-8") as stream,
            redirect_stdout(sys.stderr),
        ):
            yield stream
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def print_document(document: Mapping[str, Any], stream: TextIO) -> None:
    """One JSON object on one line."""
    print(json.dumps(document), file=stream, flush=True)


def print_summary(summary: Mapping[str, Any], stream: TextIO) -> None:
    """The end of a training run in the words of its summary."""
    folder = str(summary["run_folder"])
    rows = {
        "test accuracy": f"{summary['test_accuracy']:.2%}",
        "training time": _duration(summary["train_seconds"]),
        "images/s": f"{summary['images_per_second']:,.0f}",
        "ranks": str(summary["world_size"]),
        "run folder": folder,
    }
    report = Path(folder) / "report.html"
    if report.is_file():
        rows["report"] = str(report)
    for name, value in rows.items():
        print(f"{name:<14} {value}", file=stream, flush=True)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{minutes:.0f} min {rest:.0f} s" if minutes else f"{rest:.1f} s"
