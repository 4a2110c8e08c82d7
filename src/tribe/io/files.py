"""Files: reading regular files, exclusive locks, atomic writes.

A file is written to a temporary file beside the target, which then replaces it. A process that is killed leaves the old
file or the new one, and at most a hidden file that ends in ``.tmp``.
"""

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

SYNCING = 16  # files that are synced at the same time


class NotRegular(OSError):
    """A file that is not read, because it is not a regular file or is too large."""


class Busy(OSError):
    """Another process holds the lock."""


class CannotWrite(OSError):
    """A file that cannot be written: why, and how much room it needs."""


def regular_size(path: str | PathLike[str], largest: int | None = None) -> int:
    """Return the size of a regular file, through links; raise `NotRegular` if it has more than ``largest`` bytes."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
        raise NotRegular(errno.EINVAL, f"it is {kind}; expected a regular file", os.fspath(path))
    if largest is not None and status.st_size > largest:
        reason = f"it has {status.st_size:,} bytes; expected {largest:,} at most"
        raise NotRegular(errno.EINVAL, reason, os.fspath(path))
    return status.st_size


def open_regular(path: str | PathLike[str], largest: int | None = None) -> IO[bytes]:
    """Open a regular file for reading; the errors are those of `regular_size`."""
    regular_size(path, largest)
    return open(path, "rb")


def read_regular(path: str | PathLike[str], largest: int) -> bytes:
    """Return the bytes of a regular file that has at most ``largest``."""
    with open_regular(path, largest) as file:
        return file.read(largest)


@contextlib.contextmanager
def exclusive(path: str | PathLike[str], *, wait: bool = False, busy: str | None = None) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is made if it is missing; the OS releases it if the process dies.

    If another process holds it, wait, or raise `Busy` with the message ``busy``.
    """
    lock = FileLock(path, timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except Timeout as error:
        raise Busy(busy or f"another process holds the lock {os.fspath(path)}") from error
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def explain_failure(path: str | PathLike[str], needed: int = 0, advice: str = "") -> Iterator[None]:
    """Turn an error of the operating system into a `CannotWrite` with the path, the bytes that it needs, and advice."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # its message is complete
            raise
        room = f". {room_for(needed, Path(path).parent)}" if needed else ""
        raise CannotWrite(f"{path} could not be written: {error.strerror}{room}{advice}") from error


def write_atomically(path: str | PathLike[str], data: bytes) -> None:
    """Write a file so that the path holds the old bytes or the new ones at every moment.

    A pipe or a device, such as /dev/null, is written to directly.
    """
    with writing_atomically(path, len(data)) as file:
        file.write(data)


@contextlib.contextmanager
def writing_atomically(path: str | PathLike[str], needed: int = 0) -> Iterator[IO[bytes]]:
    """Return a context with a file to write, of ``needed`` bytes; at its end it replaces the path, unless it raises."""
    with explain_failure(path, needed):
        refuse_foreign_link(path)
        if _is_special(Path(path)):
            with Path(path).open("wb") as file:
                yield file
            return
        target = _target(path)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        try:
            with temporary.open("xb") as file:  # a new file, with the permissions that the umask gives
                with contextlib.suppress(OSError):  # no target yet, or the platform has no permissions
                    shutil.copymode(target, temporary)
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(target.parent)


def write_new(files: Mapping[Path, bytes]) -> None:
    """Write new files and sync them, several at a time.

    A process that is killed meanwhile leaves torn files: use names that no process reads before this returns.
    """
    for path, data in files.items():
        with explain_failure(path, len(data)), path.open("xb") as file:
            file.write(data)
    with ThreadPoolExecutor(SYNCING) as threads:
        list(threads.map(_sync_file, files))  # raises the error of any
        list(threads.map(sync_folder, {path.parent for path in files}))


def check_file(path: str | PathLike[str]) -> None:
    """Raise OSError if a file cannot be written: call it before the work that the file is for."""
    refuse_foreign_link(path)
    if not _is_special(Path(path)):
        check_folder(_target(path).parent)


def check_folder(folder: str | PathLike[str]) -> None:
    """Raise OSError if files cannot be written to a folder, or if a missing one cannot be made. It is not made."""
    path = Path(os.path.abspath(folder))
    nearest = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not nearest.is_dir():
        raise NotADirectoryError(f"{folder} cannot be a folder: {nearest} is not a folder")
    probe = nearest / f".probe.{secrets.token_hex(8)}.tmp"
    with explain_failure(f"a file in {nearest}"):
        try:
            with probe.open("xb") as file:
                file.write(bytes(4096))  # a full disk has no room for a block
        finally:
            probe.unlink(missing_ok=True)


def room_for(needed: int, folder: Path) -> str:
    """Return the sentence that says how many bytes a file needs, and how many are free."""
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    return f"It needs {needed / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free"


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to the disk, so that a rename in it survives a power failure."""
    with contextlib.suppress(OSError):  # the platform or the file system cannot sync a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _sync_file(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # a file that was removed again
        os.fsync(file.fileno())


def refuse_foreign_link(path: str | PathLike[str]) -> None:
    """Raise `CannotWrite` for a symbolic link that another user may have made: it could lead to any file."""
    if os.path.islink(path) and hasattr(os, "geteuid"):
        shared = os.stat(os.path.dirname(os.path.abspath(path))).st_mode & stat.S_IWOTH
        if shared or os.lstat(path).st_uid not in (0, os.geteuid()):
            raise CannotWrite(f"{path} is a symbolic link that another user may have made: name the file behind it")


def open_plain(path: str | PathLike[str], flags: int) -> int:
    """Open a file, and refuse a symbolic link; an ``opener`` of `open`."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _target(path: str | PathLike[str]) -> Path:
    """Return the file that a path names, through a symbolic link: the link stays, and the file behind it is replaced.

    A path that names a file is replaced itself, also if it becomes one meanwhile.
    """
    parent, name = os.path.split(os.path.abspath(path))
    target = Path(os.path.realpath(path)) if os.path.islink(path) else Path(os.path.realpath(parent), name)
    if target.is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected the path of a file")
    if not target.parent.is_dir():
        folder = target.parent if os.path.islink(path) else Path(path).parent
        raise FileNotFoundError(f"no folder {folder} to write {target.name} into")
    return target


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()
