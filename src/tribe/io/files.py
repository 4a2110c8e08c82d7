"""Files: reading regular files, exclusive locks, atomic writes.

A file is written to a temporary file beside the target, which then replaces it. A process that is killed at any point
leaves the old file or the new one, and at most a temporary file, which a later process removes.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
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


# The age at which a temporary file without a lock belongs to no running writer: a file system may have no locks.
STALE_SECONDS = 3600
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")

SYNCING = 16  # files that are synced at the same time
PROBE = b"0" * 4096  # bytes of a probe: a full disk has no room for a block

_swept: set[Path] = set()  # folders in which this process has looked for stale files


class CannotWrite(OSError):
    """What could not be written, why, and how much room it needs."""

    @classmethod
    def because(cls, error: OSError, path: str | PathLike[str], needed: int = 0, advice: str = "") -> "CannotWrite":
        """The message of an error of the operating system, for a path and the bytes to be written there."""
        room = f". {room_for(needed, Path(path).parent)}" if needed else ""
        return cls(f"{path} could not be written: {error.strerror or error}{room}{advice}")


def write_atomically(path: str | PathLike[str], data: bytes) -> None:
    """Write a file so that the path holds the old bytes or the new ones at every moment.

    A pipe or a device, such as /dev/null, is written to directly.
    """
    try:
        if _is_special(Path(path)):
            with open(path, "wb") as device:
                device.write(data)
            return
        with open_atomically(path) as file:
            file.write(data)
    except OSError as error:
        if error.errno is None:  # it has a message of its own
            raise
        raise CannotWrite.because(error, path, len(data)) from error


@contextlib.contextmanager
def open_atomically(path: str | PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces ``path`` when the block ends, and is removed if the block raises."""
    target = _target(path)
    temporary = _temporary(target)
    try:
        with temporary.open("xb") as file:  # a new file, with the permissions that the umask gives
            lock(file.fileno(), f"{temporary} is locked")
            _remove_stale(target.parent, os.fstat(file.fileno()).st_mtime)
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


def check_file(path: str | PathLike[str]) -> None:
    """Raise OSError if a file cannot be written: call it before the work that the file is for.

    It writes a temporary file beside the path and removes it, so that a full disk and a read-only one are found.
    """
    if not _is_special(Path(path)):
        _probe(_target(path).parent)


def check_folder(folder: str | PathLike[str]) -> None:
    """Raise OSError if files cannot be written to a folder, or if a missing one cannot be made. It is not made."""
    path = Path(os.path.abspath(folder))
    nearest = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not nearest.is_dir():
        raise NotADirectoryError(f"{folder} cannot be a folder: {nearest} is not one")
    _probe(nearest)


def _probe(folder: Path) -> None:
    temporary = _temporary(folder / "probe")
    try:
        try:
            with temporary.open("xb") as file:
                file.write(PROBE)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise CannotWrite.because(error, f"a file in {folder}") from error


def _target(path: str | PathLike[str]) -> Path:
    """The file that a path names, through symbolic links: a link stays, and the file behind it is replaced."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected the path of a file")
    if not target.parent.is_dir():
        folder = target.parent if os.path.islink(path) else Path(path).parent
        raise FileNotFoundError(f"there is no folder {folder} to write {target.name} into")
    return target


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")


def _is_special(path: Path) -> bool:
    """Whether this is a pipe or a device."""
    return path.exists() and not path.is_file() and not path.is_dir()


def room_for(needed: int, folder: Path) -> str:
    """How many bytes a file needs, and how many are free."""
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


def write_new(files: Mapping[Path, bytes]) -> None:
    """Write new files and sync them, several at a time, which for many files is faster than one after the other.

    A process that is killed meanwhile leaves torn files: use names that nobody reads before this returns.
    """
    for path, data in files.items():
        try:
            with path.open("xb") as file:
                file.write(data)
        except OSError as error:
            raise CannotWrite.because(error, path, len(data)) from error
    # Linux can sync the whole file system at once, but that waits for what all other processes have written, too.
    with ThreadPoolExecutor(SYNCING) as threads:
        for _ in threads.map(_sync_file, files):
            pass  # an error of one is raised here
        for _ in threads.map(sync_folder, {path.parent for path in files}):
            pass


def _sync_file(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # what was removed again need not be synced
        os.fsync(file.fileno())


def _remove_stale(folder: Path, now: float) -> None:
    """Remove the temporary files that killed writers left, once per folder and process: a folder may be large.

    ``now`` is the time of a new file in this folder: on a network the clock of the file system may differ from ours.
    """
    if folder in _swept:
        return
    _swept.add(folder)
    with os.scandir(folder) as entries:
        for entry in entries:
            if TEMPORARY.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    age = now - entry.stat(follow_symlinks=False).st_mtime
                    if age > STALE_SECONDS and not is_locked(entry):
                        os.unlink(entry)
