"""The two ways to get Fashion-MNIST's files; each returns a folder with the four .gz files."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from slipstream.data.fashion import SYSTEM_FOLDER

_PACKAGE = "dataset-fashion-mnist"
_CONNECT_SECONDS = 15
_UPDATE_SECONDS = 300.0
_DOWNLOAD_SECONDS = 600.0  # 31 MB need 250 s at 1 Mbit/s
_UNPACK_SECONDS = 120.0


class WayFailed(Exception):
    """One way did not work; the text says why in a few words."""


def from_debian(work: Path) -> Path:
    """Downloads the package into `work` and unpacks it there; needs neither root nor installing.

    Where apt has no package lists (a fresh container) or stale ones, they are fetched into `work`
    as well, so the system's own lists stay as they are. Raises WayFailed.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise WayFailed(f"Debian package: there is no {tool} on this machine")
    try:
        _apt(work, ["download", _PACKAGE], _DOWNLOAD_SECONDS)
    except WayFailed:
        private = _private_lists(work)
        _apt(work, [*private, "update"], _UPDATE_SECONDS)
        _apt(work, [*private, "download", _PACKAGE], _DOWNLOAD_SECONDS)
    packages = sorted(work.glob(f"{_PACKAGE}_*.deb"))
    if not packages:
        raise WayFailed(f"Debian package: apt-get downloaded no {_PACKAGE}_*.deb")
    unpacked = work / "unpacked"
    _run(["dpkg-deb", "-x", str(packages[-1]), str(unpacked)], work, _UNPACK_SECONDS)
    return unpacked / SYSTEM_FOLDER.relative_to("/")


def from_torchvision(work: Path) -> Path:
    """Downloads from torchvision's source into `work`. Raises WayFailed."""
    from torchvision.datasets import FashionMNIST

    before = socket.getdefaulttimeout()
    # torchvision passes no time limit of its own, and a silent firewall would hold it for minutes.
    socket.setdefaulttimeout(_CONNECT_SECONDS)
    try:
        # Standard output belongs to `--json`.
        with contextlib.redirect_stdout(sys.stderr):
            FashionMNIST(str(work), download=True)
    except (OSError, RuntimeError, EOFError, http.client.HTTPException) as error:
        raise WayFailed(f"torchvision's download: {_one_line(str(error))}") from error
    finally:
        socket.setdefaulttimeout(before)
    return work / "FashionMNIST" / "raw"


def _private_lists(work: Path) -> list[str]:
    """Options that make apt keep lists and archives under `work`, where any user may write."""
    lists, archives = work / "apt-lists", work / "apt-cache"
    for folder in (lists, archives / "archives"):
        (folder / "partial").mkdir(parents=True, exist_ok=True)
    return [
        *("-o", f"Dir::State::Lists={lists}"),
        *("-o", f"Dir::Cache={archives}"),
        *("-o", "Acquire::Languages=none"),
    ]


def _apt(work: Path, arguments: list[str], limit_seconds: float) -> None:
    limits = [
        *("-o", f"Acquire::http::Timeout={_CONNECT_SECONDS}"),
        *("-o", f"Acquire::https::Timeout={_CONNECT_SECONDS}"),
        *("-o", "Acquire::Retries=1"),
    ]
    _run(["apt-get", "-q", "-y", *limits, *arguments], work, limit_seconds)


def _run(command: list[str], work: Path, limit_seconds: float) -> None:
    log = work / "command.log"
    # A file, not a pipe: after a time-out a pipe would still wait for the command's own children.
    with log.open("w+", encoding="utf-8", errors="replace") as output:
        try:
            done = subprocess.run(
                command,
                cwd=work,
                env={**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=limit_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise WayFailed(
                f"Debian package: {command[0]} did not end within {limit_seconds:.0f} seconds"
            ) from None
    if done.returncode:
        said = log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in said if line.startswith(("E:", "dpkg-deb: error"))] or said[-1:]
        reason = _one_line(errors[-1]) if errors else "it said nothing"
        raise WayFailed(f"Debian package: {command[0]} failed ({reason})")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
