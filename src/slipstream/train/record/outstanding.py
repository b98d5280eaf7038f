"""A file of a run that could not be written, yet: said once, tried again, told at the end.

A full disk or a quota passes, and training does not depend on such a file; so it goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


class Outstanding:
    """What of one writer is not on the disk: None, or a sentence about it.

    note: called with one line when writing begins to fail, not when it goes on failing.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self.failure: str | None = None
        """Which file cannot be written and why; without a way out and a full stop."""

    def failed(self, path: Path, error: OSError) -> None:
        """Notes that `path` could not be written."""
        is_new = self.failure is None
        self.failure = f"{path} cannot be written ({error.strerror or error})"
        if is_new:
            self._note(f"{self.failure}; training goes on, and it is tried again: free space there")

    def succeeded(self) -> None:
        """Notes that all is written."""
        self.failure = None
