"""Files that survive a kill, a full disk and a second job: atomic writes, fsync, held locks.

The policy, the same for everything that is written:

1. New bytes go under a temporary name in the same folder, never under the final one.
2. The file is flushed to the device (`fsync`), then renamed, then the folder is flushed.
   A final name therefore only ever holds complete bytes, after a kill and after a power cut.
3. A writer that fails removes its temporary file; a killed one leaves it, under a name that
   no reader looks at.

Pure: no torch here.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import time
from pathlib import Path
from types import TracebackType
from typing import Self

TEMPORARY_PREFIX = ".partial-"
_LOCK_ATTEMPTS = 5
_LOCK_PAUSE_SECONDS = 0.02
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


def fsync_path(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to the device; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_sibling(path: Path) -> Path:
    """A fresh name beside `path` that readers ignore; nothing is created."""
    return path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}-{path.name}")


def write_text_atomic(path: Path, text: str) -> None:
    """Write `text` (UTF-8) to `path`: readers see the old bytes or all the new ones, never a part.

    An existing file is replaced. Raises OSError, after which `path` is as it was and the
    temporary file is gone.
    """
    write_bytes_atomic(path, text.encode(), overwrite=True)


def write_bytes_atomic(path: Path, data: bytes, *, overwrite: bool) -> None:
    """Write `data` to `path` as a whole, over an existing file only where that is wanted.

    Raises FileExistsError where `path` exists and shall stay, and OSError; `path` is then as it was
    and the temporary file is gone.
    """
    temporary = temporary_sibling(path)
    try:
        write_file_durably(temporary, data)
        publish(temporary, path, overwrite=overwrite)
    finally:
        temporary.unlink(missing_ok=True)


def publish(temporary: Path, path: Path, *, overwrite: bool) -> None:
    """Give a complete `temporary` its final name, in place of another file if that is wanted."""
    if not overwrite:
        publish_new_file(temporary, path)
        return
    os.replace(temporary, path)
    fsync_path(path.parent)


def write_file_durably(path: Path, data: bytes) -> None:
    """Create `path` (it must not exist), write `data`, flush it to the device; raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def publish_new_file(temporary: Path, path: Path) -> None:
    """Give a complete `temporary` its final name; raises FileExistsError if `path` exists.

    A hard link refuses an existing name atomically, where a rename would replace it. On a file
    system without hard links the name is checked first and then renamed: a second job that
    creates the same name between the two loses its file.
    """
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        os.rename(temporary, path)
    else:
        os.unlink(temporary)
    fsync_path(path.parent)


class HeldLock:
    """A file whose lock says that its owner lives; the kernel drops the lock when the owner dies.

    No clock and no process id is looked at, so a dead owner never blocks anyone, on another host
    neither. A forked child shares the lock until it ends or replaces its program.
    """

    def __init__(self, path: Path) -> None:
        """Create `path` and hold its lock.

        Raises BlockingIOError when another owner holds it. On a file system that has no locks,
        `supported` is False: the file then only marks a name, and `is_dead` answers None there.
        """
        self.path = path
        while True:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self.supported = _lock(self._descriptor)
            except OSError:
                os.close(self._descriptor)
                raise
            # A cleaner may have removed the name between our open and our lock: then try again.
            if _same_file(self._descriptor, path):
                return
            os.close(self._descriptor)

    def release(self) -> None:
        """Remove the file and drop the lock; calling it twice is fine."""
        if self._descriptor >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def is_dead(path: Path) -> bool | None:
    """Whether the owner of the lock file `path` is gone; None where no lock can tell.

    True also when the file does not exist: an owner creates it before anything else.
    """
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            raise
        finally:
            os.close(descriptor)
    return True


def _lock(descriptor: int) -> bool:
    """Take the lock; False where the file system has none. Raises BlockingIOError if it is held."""
    for attempts_left in reversed(range(_LOCK_ATTEMPTS)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            # `is_dead` of another process holds it for microseconds: that is not an owner.
            if not attempts_left:
                raise
            time.sleep(_LOCK_PAUSE_SECONDS)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
    raise AssertionError("the last attempt returns or raises")


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    held = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)
