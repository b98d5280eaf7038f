"""The user's side of a lab run: starts the side inside the namespaces, and hands signals on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from slipstream.errors import LabError
from slipstream.lab.folder import lab_place, run_folder
from slipstream.lab.job import plan_starts
from slipstream.lab.result import LabResult
from slipstream.lab.room import refuse_too_many
from slipstream.lab.settings import LabSettings
from slipstream.outputs import check_output

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_END_SECONDS = 15.0
_SBIN = ("/usr/sbin", "/sbin", "/usr/local/sbin")


class LabInterrupted(Exception):
    """A signal stopped the lab before its command had started. Not an error of the lab."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}, before the command")
        self.signal_number = signal_number


def run_lab(
    settings: LabSettings,
    *,
    logs: Path | None = None,
    overwrite: bool = False,
    output_to_stderr: bool = False,
) -> LabResult:
    """Run a command on an emulated cluster, to its end.

    Rank 0 prints where this process prints (with ``output_to_stderr``, all to standard error), the
    other ranks to files in ``logs``, which must be new unless ``overwrite``; without a folder the
    files go with the lab. Interrupt, SIGTERM and SIGHUP are handed to the ranks; to be called from
    the main thread. Nothing of the lab exists any more when this returns or raises, nor once this
    process was killed.

    Raises SlipstreamError for files that are there, LabError when the lab cannot be built, does not
    work or has more ranks than this machine has room for, LabInterrupted when a signal came before
    the command. A command that fails is no error: see ``exit_code`` of the result.
    """
    refuse_too_many(settings)
    tools = {name: _tool(name) for name in ("ip", "tc")}
    if logs is not None:
        logs = _made(logs)
        _check_logs(settings, logs, overwrite)
    with run_folder(lab_place()) as folder:
        orders = {
            "settings": settings.to_json(),
            "tools": tools,
            "logs": str(logs or _made(folder / "logs")),
            "overwrite": overwrite,
        }
        (folder / "orders.json").write_text(json.dumps(orders), encoding="utf-8")
        answer = _run_inside(folder, output_to_stderr)
    if "error" in answer:
        raise LabError(answer["error"])
    if "interrupted" in answer:
        raise LabInterrupted(answer["interrupted"])
    return LabResult.from_dict(answer)


def _tool(name: str) -> str:
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *_SBIN))
    found = shutil.which(name, path=path)
    if found is None:
        raise LabError(
            f"the lab needs the command `{name}` of iproute2: install the package iproute2"
            " (Debian, Ubuntu: apt-get install iproute2; Fedora: dnf install iproute iproute-tc)"
        )
    return found


def _made(logs: Path) -> Path:
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(f"{logs} cannot be the folder of logs: {error.strerror}") from error
    return logs.absolute()


def _check_logs(settings: LabSettings, logs: Path, overwrite: bool) -> None:
    """Refuse what the run would write over. Raises SlipstreamError, LabError."""
    for start in plan_starts(settings, os.environ):
        if start.log_name is not None:
            check_output(logs / start.log_name, "--logs", overwrite=overwrite)


def _run_inside(folder: Path, output_to_stderr: bool) -> dict[str, Any]:
    """Run the other side to its end, hand signals to it, and read its answer."""
    control_read, control_write = os.pipe()
    report_read, report_write = os.pipe()
    try:
        with _handed_on(control_write), os.fdopen(report_read, encoding="utf-8") as report:
            try:
                inside = subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-m", "slipstream.lab.inside"),
                        *(str(folder), str(os.getpid()), str(control_read), str(report_write)),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr if output_to_stderr else None,
                    pass_fds=(control_read, report_write),
                    start_new_session=True,
                )
            finally:
                os.close(control_read)
                os.close(report_write)
            with inside:
                try:
                    text = report.read()
                    code = _end(inside)
                finally:
                    inside.kill()
    finally:
        os.close(control_write)
    if not text:
        raise LabError(f"the lab itself broke down (exit code {code}); its last words are above")
    answer: dict[str, Any] = json.loads(text)
    return answer


def _end(inside: subprocess.Popen[bytes]) -> int:
    """Wait until nothing of the run is left."""
    try:
        return inside.wait(_END_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise LabError(
            f"processes of the command are still there {_END_SECONDS:.0f} s after they were killed"
        ) from error


@contextmanager
def _handed_on(control: int) -> Iterator[None]:
    """Write the number of each signal that arrives to a pipe, in place of dying by it."""

    def hand_on(number: int, frame: FrameType | None) -> None:
        # The other side may have come to its end just now.
        with suppress(BrokenPipeError):
            os.write(control, bytes([number]))

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        # What the user has told to be ignored, as nohup does, stays so.
        if handler is not signal.SIG_IGN:
            signal.signal(number, hand_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
