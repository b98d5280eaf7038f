"""A stream that never fails its writer: what is shown must not end what is trained."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO


class UnfailingStream:
    """`stream` in all things but one: text that it does not take is lost, silently.

    A terminal goes away with its connection, a pipe with its reader, and a log's disk fills up.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes `text`, or does nothing."""
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Flushes, or does nothing."""
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @staticmethod
    def _try(act: Callable[..., object], *arguments: str) -> None:
        with suppress(OSError, ValueError):  # ValueError: it was closed
            act(*arguments)
