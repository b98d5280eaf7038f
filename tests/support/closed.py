"""A folder that its user may not search, for root as well, whom no permission stops."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest


def close_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """From now on stat(2) refuses every path below `folder`, as without the right to search it."""
    stat, lstat, below = os.stat, os.lstat, f"{folder}{os.sep}"

    def refuse(path: Any) -> None:
        if not isinstance(path, int) and os.fsdecode(path).startswith(below):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fsdecode(path))

    def closed_stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        refuse(path)
        return stat(path, *arguments, **options)

    def closed_lstat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        refuse(path)
        return lstat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", closed_stat)
    monkeypatch.setattr(os, "lstat", closed_lstat)
