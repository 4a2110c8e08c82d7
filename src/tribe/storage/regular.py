"""Open a file that somebody else made: a regular file of a bounded size, or an error. It never waits.

A name may lead to a pipe, which waits for a writer, or to a device, which never ends. Both are refused unread.
"""

import errno
import os
import stat
from os import PathLike
from typing import IO

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class NotRegular(OSError):
    """A file that is not read, because it is not a regular file or is too large."""


def open_regular(path: str | PathLike[str], largest: int | None = None) -> IO[bytes]:
    """Open a regular file for reading; symbolic links are followed.

    Args:
        path: the file.
        largest: how many bytes it may have; None: any number.

    Raises:
        NotRegular: it is a folder, a pipe, a socket or a device, or it has more bytes.
        OSError: it cannot be opened.
    """
    regular_size(path, largest)  # before it is opened: opening a device may have an effect
    descriptor = os.open(path, FLAGS)
    try:
        _check(os.fstat(descriptor), path, largest)  # it may have been replaced in the meantime
    except NotRegular:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def regular_size(path: str | PathLike[str], largest: int | None = None) -> int:
    """How many bytes a regular file has; the errors are those of `open_regular`, but the file is not opened."""
    status = os.stat(path)
    _check(status, path, largest)
    return status.st_size


def read_regular(path: str | PathLike[str], largest: int) -> bytes:
    """The bytes of a regular file that has at most ``largest``; a file that grows is read to its old end."""
    with open_regular(path, largest) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def _check(status: os.stat_result, path: str | PathLike[str], largest: int | None) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        raise _refusal(path, f"it is {KINDS.get(kind, 'not a file')}; expected a regular file")
    if largest is not None and status.st_size > largest:
        raise _refusal(path, f"it has {status.st_size:,} bytes; expected {largest:,} at most")


def _refusal(path: str | PathLike[str], reason: str) -> NotRegular:
    return NotRegular(errno.EINVAL, reason, os.fspath(path))
