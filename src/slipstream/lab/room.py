"""Whether this machine has room for a lab's processes, looked at before any of them starts.

Otherwise they would start until the system has no more, and other people's would fail with them.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from slipstream.errors import LabError
from slipstream.lab.settings import LabSettings
from slipstream.words import size

LEAST_RANK_BYTES = 10 * 2**20
"""What a rank holds at the least: a Python that has loaded nothing."""

_OWN_PROCESSES = 4
_OWN_FILES = 32
_FILES_OF_NODE = 2  # its network and its host name


@dataclass(frozen=True)
class Limit:
    """So many processes of a lab there may be, and why not more."""

    processes: int
    because: str


def refuse_too_many(settings: LabSettings, limits: Iterable[Limit] | None = None) -> None:
    """Raise LabError for more ranks, with torchrun's agents, than this machine has room for.

    limits: this machine's own, by default; the smallest holds.
    """
    ranks = settings.nodes * settings.ranks_per_node
    processes = ranks + (settings.nodes if settings.agents else 0)
    found = machine_limits(settings.nodes) if limits is None else limits
    least = min(found, key=lambda limit: limit.processes)
    if processes > least.processes:
        raise LabError(
            f"--nodes {settings.nodes} with --per-node {settings.ranks_per_node} takes"
            f" {processes:,} processes, and this machine has room for {max(0, least.processes):,}"
            f" ({least.because}): use fewer nodes or ranks"
        )


def machine_limits(nodes: int) -> list[Limit]:
    """What the memory that is free and the kernel's limits allow a lab of so many nodes."""
    free = psutil.virtual_memory().available
    least = size(LEAST_RANK_BYTES)
    found = [Limit(free // LEAST_RANK_BYTES, f"{size(free)} of memory are free, {least} a rank")]
    for name, most in (
        ("`sysctl kernel.pid_max`", _number(Path("/proc/sys/kernel/pid_max"))),
        ("`sysctl kernel.threads-max`", _number(Path("/proc/sys/kernel/threads-max"))),
        ("the control group's pids.max", _number(_control_group() / "pids.max")),
        ("`ulimit -u`", _soft_limit(resource.RLIMIT_NPROC)),
    ):
        if most is not None:
            found.append(Limit(most - _OWN_PROCESSES, f"{name} is {most:,}"))
    # The lab holds a file of each process, to learn of its end.
    if (files := _soft_limit(resource.RLIMIT_NOFILE)) is not None:
        held = _OWN_FILES + _FILES_OF_NODE * nodes
        found.append(Limit(files - held, f"`ulimit -n` is {files:,}"))
    return found


def _soft_limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _number(path: Path) -> int | None:
    """What a file of the kernel says; None where there is none, or no number in it."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _control_group() -> Path:
    """The folder of this process's control group that counts processes."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return root  # a kernel without control groups
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers in ("", "pids"):
            folder = root / controllers / name.lstrip("/")
            if (folder / "pids.max").is_file():
                return folder
    return root
