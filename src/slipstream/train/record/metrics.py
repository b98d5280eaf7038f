"""Writing `metrics.jsonl`, the record of a run that its report is drawn from.

Kinds and fields (seconds are seconds, accuracies are fractions of 1):

    step        step, epoch, loss, accuracy, learning_rate, images_per_second,
                communication_hidden_seconds, communication_exposed_seconds, gradient_norm,
                input_wait_seconds
    evaluation  step, epoch, test_loss, test_accuracy
    epoch       step, epoch, train_loss, train_accuracy, seconds, images_per_second
    skip        step, ranks, parameter
    resume      step
    timeline    step, spans: [{row, name, start_seconds, end_seconds, bytes?}, ...], seconds from
                the start of the step; row is input, forward, backward, communication, wait, update
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from slipstream.durable import write_text_atomic
from slipstream.errors import RunFolderError
from slipstream.report.records import KINDS, Record, format_line, parse_line, read_metrics
from slipstream.train.record.outstanding import Outstanding

__all__ = ["KINDS", "MetricsWriter", "Record", "read_metrics", "truncate_after"]


_logger = logging.getLogger("slipstream.metrics")


class MetricsWriter:
    """Appends records to `path`, one flushed line each, so that a killed run loses at most one.

    A line that an earlier writer left torn is removed first. Lines that the disk refuses are kept
    in memory and written with the next; note: called with one sentence when that begins. Raises
    RunFolderError when the file cannot be opened.
    """

    def __init__(self, path: Path, note: Callable[[str], None] = _logger.warning) -> None:
        self.path = path
        self._outstanding = Outstanding(note)
        self._unwritten = bytearray()
        try:
            _mend_tail(path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise RunFolderError(
                f"{path} cannot be written: {error.strerror or error}; free space or fix its"
                " permissions."
            ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends `record`, which needs a known `kind` and a `step`; non-finite floats are kept.

        Raises ValueError for a malformed record.
        """
        self._unwritten += format_line(record).encode()
        self.flush()

    def flush(self) -> str | None:
        """Writes what is left; None, or a sentence about what the disk still refuses."""
        try:
            while self._unwritten:
                # A line may be written in part: what is left of it goes first the next time.
                del self._unwritten[: self._file.write(self._unwritten)]
        except OSError as error:
            self._outstanding.failed(self.path, error)
        else:
            self._outstanding.succeeded()
        return self._outstanding.failure

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def truncate_after(path: Path, step: int) -> int:
    """Drops from `path` every record of a later step than `step`; returns how many were dropped.

    For resuming: steps done after the checkpoint are done again, so their old records go. The file
    is replaced atomically; a missing file counts as empty. Raises RunFolderError for a damaged one.
    """
    if not path.exists():
        return 0
    records = read_metrics(path)
    num_later: int = sum(record["step"] > step for record in records)
    if not num_later:
        return 0
    kept = []
    with path.open("rb") as file:
        for line in file:
            record = parse_line(line)
            if record is not None and record["step"] <= step:
                kept.append(line.decode().rstrip("\n") + "\n")
    write_text_atomic(path, "".join(kept))
    return num_later


def _mend_tail(path: Path) -> None:
    """Ends an unfinished last line of `path` when it is whole, removes it when it is torn."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        content = file.read()
        if not content or content.endswith(b"\n"):
            return
        start = content.rfind(b"\n") + 1
        if parse_line(content[start:]) is None:
            file.truncate(start)
        else:
            file.write(b"\n")
