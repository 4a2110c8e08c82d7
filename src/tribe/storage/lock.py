"""An exclusive lock on a file: one process holds it at a time."""

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from os import PathLike


class Busy(OSError):
    """Another process holds the lock."""


@contextlib.contextmanager
def exclusive(path: str | PathLike[str], *, wait: bool = False, busy: str | None = None) -> Iterator[bool]:
    """Hold an exclusive lock on a file, which is made if it is missing; the OS releases it if the process dies.

    The file keeps its content, and a symbolic link is not followed. The block gets False where the platform or the
    file system has no locks: then nothing keeps others out.

    Args:
        path: the file to lock.
        wait: until another process releases it; else `Busy` is raised.
        busy: the message of `Busy`.
    """
    # A pipe must not block the opening; for a file O_NONBLOCK changes nothing.
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    file = os.open(path, flags, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{path} is not a regular file, so it cannot be a lock")
        yield lock(file, busy or f"another process holds the lock {os.fspath(path)}", wait=wait)
    finally:
        os.close(file)  # releases the lock


def is_locked(path: str | PathLike[str]) -> bool:
    """Whether a file is locked, or cannot be opened to find out; False where there are no locks."""
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return True
    try:
        lock(file, "")
    except Busy:
        return True
    finally:
        os.close(file)
    return False


def lock(file: int, busy: str, *, wait: bool = False) -> bool:
    """Lock an open file until it is closed; False where there are no locks. `Busy` is raised with a message."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        raise Busy(busy) from error
    except OSError:
        return False
    return True
