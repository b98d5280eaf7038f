"""Compiles the CPU kernels when they are imported, once for a machine and not by all ranks at once.

The machine code is kept where numba keeps it: in the folder `NUMBA_CACHE_DIR` if that is set, else
beside the source, else (a read-only installation) in the user's own cache folder. Whoever compiles
holds a lock there; the others wait, and then load what it has written. Files appear there by
renaming and the kernel drops a dead process's lock, so a kill at any moment leaves nothing that
harms. Where nothing can be kept every process compiles for itself, and says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numba

LOCK_NAME = "slipstream-compile.lock"
WAIT_SECONDS = 120.0
"""Far longer than compiling takes; then a process that waits compiles for itself."""
_PAUSE_SECONDS = 0.05

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def compiled(signature: str, *, reassociate: bool = False) -> Callable[[Kernel], Kernel]:
    """Compiles a function for one signature, in numba's words; other types are a TypeError.

    It runs without the GIL, in the calling thread alone. reassociate: sums of floats may be formed
    in any order, which processors with vectors need for speed.
    """
    flags = {"reassoc"} if reassociate else False
    settings: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": flags}

    def decorate(function: Kernel) -> Kernel:
        try:
            kernel = numba.njit(cache=True, **settings)(function)
            with only_one_in(Path(kernel.stats.cache_path)):
                kernel.compile(signature)
        except Exception as error:
            # A damaged or full cache fails in any of pickle's and the system's ways; a kernel that
            # cannot be compiled fails again below, where nothing is caught.
            kernel = numba.njit(**settings)(function)
            kernel.compile(signature)
            warnings.warn(
                f"The compiled kernel {function.__name__!r} cannot be kept ({error}): every "
                "process compiles it; set NUMBA_CACHE_DIR to an empty folder that can be written.",
                RuntimeWarning,
                stacklevel=2,
            )
        kernel.disable_compile()
        return kernel  # type: ignore[no-any-return]

    return decorate


@contextlib.contextmanager
def only_one_in(folder: Path, wait_seconds: float = WAIT_SECONDS) -> Iterator[None]:
    """Holds the lock of a cache folder, for which it waits at most so long.

    Goes on without it after that, and where the folder's file system has no locks: it saves work,
    and nothing depends on it. The file stays, as removing it would let two hold the lock.
    """
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        latest = time.monotonic() + wait_seconds
        while not _held(descriptor) and time.monotonic() < latest:
            time.sleep(_PAUSE_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _held(descriptor: int) -> bool:
    """Whether there is nothing (more) to wait for."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
