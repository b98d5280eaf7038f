"""What the user's side of the lab tells the side inside the namespaces: which signals arrived.

One pipe; each signal is a byte with its number. Its end means that the user's side is dead.
"""

from __future__ import annotations

import os
import select


class Control:
    """The reading end of the pipe."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe
        self.signals: list[int] = []
        self.owner_gone = False

    def read(self) -> list[int]:
        """The signals that came since the last call, which are kept in ``signals`` as well."""
        fresh: list[int] = []
        while not self.owner_gone and select.select([self.pipe], [], [], 0)[0]:
            told = os.read(self.pipe, 64)
            self.owner_gone = not told
            fresh += told
        self.signals += fresh
        return fresh

    def stop_wanted(self) -> bool:
        """Has any signal come, or is the user's side gone?"""
        self.read()
        return bool(self.signals) or self.owner_gone
