"""How a rank ended, and which of many failures is the one to tell.

A failing rank writes its error to the file that the elastic launcher named to it, in the
launcher's own JSON form plus a ``slipstream`` part. When one rank fails, others follow because
their peer is gone; `root_cause` finds the first cause among them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import slipstream.errors
from slipstream.errors import LaunchError, RankFailure, SlipstreamError

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"


@dataclass(frozen=True)
class ErrorRecord:
    """An exception that ended a rank: class name, its text, when, and the traceback.

    ``traceback`` is empty for the errors that Slipstream raises on purpose.
    """

    kind: str
    text: str
    time_seconds: float
    traceback: str = ""


@dataclass(frozen=True)
class RankEnd:
    """A rank that ended with an exit code other than 0 (negative: by that signal)."""

    rank: int
    exit_code: int
    record: ErrorRecord | None

    @property
    def ending(self) -> str:
        """The exit code in words."""
        if self.exit_code >= 0:
            return f"ended with exit code {self.exit_code}"
        name = signal.Signals(-self.exit_code).name
        hint = "; the system ends processes so when memory runs out" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"


def write_error(error: BaseException, path: Path | None = None) -> None:
    """Record ``error`` in the file of this rank (by default the one its launcher named, if any)."""
    named = os.environ.get(ERROR_FILE_VARIABLE, "")
    target = path or (Path(named) if named else None)
    if target is None:
        return
    trace = "".join(traceback.format_exception(error))
    now = time.time()
    record = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {"py_callstack": trace, "timestamp": str(int(now))},
        },
        "slipstream": {
            "kind": type(error).__name__,
            "text": str(error),
            "time_seconds": now,
            "traceback": "" if isinstance(error, SlipstreamError) else trace,
        },
    }
    # The launcher may look at any moment, and a half-written record would end it.
    partial = target.with_name(f"{target.name}.partial")
    try:
        partial.write_text(json.dumps(record), encoding="utf-8")
        partial.replace(target)
    except FileNotFoundError:
        pass  # a launcher that was killed reads nothing any more
    except OSError as trouble:
        with suppress(OSError):
            # The launcher tells where this rank printed.
            print(f"{error}\n{target} cannot be written: {trouble}", file=sys.stderr, flush=True)


def read_error(path: Path) -> ErrorRecord | None:
    """The record that a rank left, or None where it left none or died while writing it."""
    try:
        part = json.loads(path.read_text(encoding="utf-8"))["slipstream"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return ErrorRecord(
        str(part["kind"]), str(part["text"]), float(part["time_seconds"]), str(part["traceback"])
    )


def root_cause(ends: Sequence[RankEnd]) -> RankEnd:
    """The rank whose end made the others end; ``ends`` in the order in which they were seen.

    A rank that was seen first and left no word was ended from outside. Otherwise the earliest
    error that is not about another rank counts, and only then the earliest that is.
    """
    first = ends[0]
    if first.record is None and first.exit_code not in (-signal.SIGTERM, -signal.SIGINT):
        return first
    told = [end for end in ends if end.record is not None]
    own = [end for end in told if end.record and end.record.kind != RankFailure.__name__]
    return min(own or told or [first], key=lambda end: end.record.time_seconds if end.record else 0)


def as_error(ends: Sequence[RankEnd], *, num_ranks: int) -> SlipstreamError:
    """The one error to raise for ranks that failed, of the class that the failing rank raised.

    It names the rank, unless all that failed said the same and so none of them is the culprit.
    num_ranks: of the job, those that did not fail among them.
    """
    cause = root_cause(ends)
    record = cause.record
    told = [end.record for end in ends if end.record]
    if record is None:
        words = [attributed(end.rank, end.record.text) for end in ends if end.record]
        return RankFailure(" ".join([f"rank {cause.rank} {cause.ending}.", *words[:1]]))
    agree = len({other.text for other in told}) == 1 and (len(told) > 1 or num_ranks == 1)
    # What one rank did in the name of all carries its class there alone.
    kinds = [other.kind for other in told if other.kind != SlipstreamError.__name__]
    name = kinds[0] if agree and kinds else record.kind
    kind = getattr(slipstream.errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, SlipstreamError)):
        every = agree and len(told) == num_ranks > 1
        who = "every rank" if every else f"rank {cause.rank}"
        return LaunchError(f"{who} failed with {record.kind}: {record.text}")
    text = record.text or record.kind
    if not agree:
        text = attributed(cause.rank, text)
    frozen = [end for end in ends if end.record is None and end.exit_code == -signal.SIGKILL]
    if kind is RankFailure and frozen:
        killed = [f"Rank {end.rank} did not end when asked; killed it." for end in frozen]
        text = " ".join([f"{text.rstrip('.')}.", *killed])
    return kind(text)


def attributed(rank: int, text: str) -> str:
    """``text`` with the rank that said it, unless it names that, or whose error it passes on."""
    named = re.match(rf"rank ({rank} |\d+:)", text.lower())
    return text if named else f"rank {rank}: {text}"
