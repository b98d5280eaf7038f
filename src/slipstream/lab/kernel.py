"""The few system calls of namespaces that Python's standard library lacks before 3.12.

Each raises OSError with the kernel's own reason.
"""

from __future__ import annotations

import ctypes
import os
import signal

NEW_MOUNTS = 0x00020000
NEW_HOSTNAME = 0x04000000
NEW_USER = 0x10000000
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000

_BIND = 0x1000
_RECURSIVE = 0x4000
_PRIVATE = 0x40000
_NO_SUID_DEVICES_EXEC = 0x2 | 0x4 | 0x8
_SET_PARENT_DEATH_SIGNAL = 1

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Move this process to new namespaces (a new PID namespace: only its children)."""
    _check(_libc.unshare(ctypes.c_int(flags)))


def join_namespace(descriptor: int, flags: int) -> None:
    """Move this process to the namespace that an open file of ``/proc/PID/ns`` stands for."""
    _check(_libc.setns(ctypes.c_int(descriptor), ctypes.c_int(flags)))


def make_mounts_private() -> None:
    """Mounts from now on are seen in this mount namespace alone."""
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)


def mount_proc() -> None:
    """Show this PID namespace, and nothing else, in ``/proc``."""
    _mount("proc", "/proc", "proc", _NO_SUID_DEVICES_EXEC)


def bind_mount(source: str, target: str) -> None:
    """Show the file ``source`` in the place of ``target``."""
    _mount(source, target, None, _BIND)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, however it dies.

    A parent that died before this call goes unnoticed: check for that afterwards.
    """
    _check(_libc.prctl(_SET_PARENT_DEATH_SIGNAL, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0))


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    encoded = None if kind is None else kind.encode()
    _check(
        _libc.mount(os.fsencode(source), os.fsencode(target), encoded, ctypes.c_ulong(flags), None),
        target,
    )


def _check(result: int, path: str | None = None) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
