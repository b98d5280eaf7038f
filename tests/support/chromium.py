"""A headless Chromium over its debugging pipe: loads a page and tells all that it complained of."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TIMEOUT_SECONDS = 60.0
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Were a page to ask for something, it would not leave this machine.
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """The program's path, None where it is not installed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


@dataclass
class Visit:
    """What happened while a page was loaded."""

    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)


class Browser:
    """One running Chromium; speaks the DevTools protocol in NUL-separated JSON."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []

    def visit(self, page: Path, *expressions: str, dark: bool = False) -> Visit:
        """Loads `page` in a tab of its own and evaluates `expressions` there afterwards."""
        # Makes a crash of the page an event instead of silence.
        self._call("Target.setDiscoverTargets", discover=True)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable", session)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", session, features=[scheme])
        self._events.clear()
        self._call("Page.navigate", session, url=page.as_uri())
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._read(deadline)
        visit = Visit()
        for expression in expressions:
            answer = self._call(
                "Runtime.evaluate", session, expression=expression, returnByValue=True
            )
            visit.values.append(answer["result"]["value"])
        self._call("Target.closeTarget", targetId=target)
        for event in self._events:
            _note(visit, event["method"], event.get("params", {}))
        return visit

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"Chromium refused {method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self, deadline: float) -> dict[str, Any]:
        """The next message; events are kept, too."""
        while b"\0" not in self._buffer:
            left = max(deadline - time.monotonic(), 0.0)
            if not select.select([self._answers], [], [], left)[0]:
                raise TimeoutError("Chromium does not answer.")
            received = os.read(self._answers, 2**16)
            if not received:
                raise EOFError("Chromium ended.")
            self._buffer += received
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        if message.get("method") in ("Inspector.targetCrashed", "Target.targetCrashed"):
            raise RuntimeError("Chromium's page process crashed.")
        if "method" in message:
            self._events.append(message)
        return message


def _note(visit: Visit, method: str, parameters: dict[str, Any]) -> None:
    if method == "Network.requestWillBeSent":
        visit.requests.append(parameters["request"]["url"])
    elif method == "Log.entryAdded":
        visit.complaints.append(parameters["entry"]["text"])
    elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
        visit.complaints.append(json.dumps(parameters))


@contextlib.contextmanager
def open_browser(program: str, folder: Path) -> Iterator[Browser]:
    """Starts Chromium with a fresh profile in `folder` and ends it, with its children."""
    ends = [_high(end) for pair in (os.pipe(), os.pipe()) for end in pair]
    read_command, commands, answers, write_answer = ends
    # The protocol's pipe is descriptors 3 and 4, whatever numbers the ends have here.
    script = f'exec "$@" 3<&{read_command} 4>&{write_answer}'
    profile = f"--user-data-dir={folder / 'profile'}"
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", program, *_FLAGS, profile],
        pass_fds=(read_command, write_answer),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "HOME": str(folder)},
    )
    try:
        os.close(read_command)
        os.close(write_answer)
        yield Browser(commands, answers)
    finally:
        os.close(commands)
        os.close(answers)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _high(descriptor: int) -> int:
    """`descriptor` moved to a number above 9, out of the way of 3 and 4."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved
