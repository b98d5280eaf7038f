"""Standard output of a command: for machines the document alone, for people a few lines."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn, TextIO

from slipstream.words import count, duration

_CLOSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP}
_FULL = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def open_streams() -> None:
    """Make the three standard streams usable, whatever this process was started with.

    One that is closed becomes /dev/null: its number would go to the next file that is opened, and
    what is printed into that file. Characters that standard output lacks are written as escapes.
    """
    modes = {"stdin": "r", "stdout": "w", "stderr": "w"}
    for number, (name, mode) in enumerate(modes.items()):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def end_by_refusal(error: OSError) -> NoReturn:
    """End the command that the system refuses a path, or whose standard output takes no more.

    Says so, unless the reader of standard output has left. Raises `error` again where it is about
    anything else.
    """
    if error.filename is not None and error.errno in _CLOSED:
        print(
            f"slipstream: {error.filename} cannot be used ({error.strerror}); name another path, or"
            " give this user the right to it",
            file=sys.stderr,
        )
        sys.exit(1)
    if error.filename is not None or error.errno not in _FULL:
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in buffers has a place to go
    if error.errno != errno.EPIPE:
        print(f"slipstream: the output cannot be written: {error.strerror}", file=sys.stderr)
    sys.exit(1)


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
            os.fdopen(os.dup(kept), "w", encoding="utf-8", errors="backslashreplace") as stream,
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
        "training time": duration(summary["train_seconds"]),
        "images/s": f"{summary['images_per_second']:,.0f}",
        "ranks": str(summary["world_size"]),
        "run folder": folder,
    }
    if skipped := summary["skipped_steps"]:
        of_all = f"{count(skipped)} of {count(summary['steps'])}"
        rows["skipped steps"] = f"{of_all}: gradients were infinite or NaN"
    report = Path(folder) / "report.html"
    if report.is_file():
        rows["report"] = str(report)
    for name, value in rows.items():
        print(f"{name:<14} {value}", file=stream, flush=True)
