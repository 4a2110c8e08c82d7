"""Files that are written whole or not at all.

Bytes go to a temporary file beside the target, which then replaces it. A process that is killed at any point leaves the
old file or the new one, and at most a temporary file, which a later process removes. A writer holds a lock on its
temporary file, so that no other process removes it, however long the writing takes and whatever the clocks say.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import IO

from tribe.storage.lock import is_locked, lock

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
