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
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import IO

from tribe.storage.lock import is_locked, lock

# The age at which a temporary file without a lock belongs to no running writer: a file system may have no locks.
STALE_SECONDS = 3600
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")

_swept: set[Path] = set()  # folders in which this process has looked for stale files


def write_atomically(path: str | PathLike[str], data: bytes) -> None:
    """Write a file so that the path holds the old bytes or the new ones at every moment.

    A pipe or a device, such as /dev/null, is written to directly.
    """
    if Path(path).exists() and not Path(path).is_file() and not Path(path).is_dir():
        with open(path, "wb") as device:
            device.write(data)
        return
    with open_atomically(path) as file:
        file.write(data)


@contextlib.contextmanager
def open_atomically(path: str | PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces ``path`` when the block ends, and is removed if the block raises."""
    target = Path(os.path.realpath(path))  # a symbolic link stays; the file that it names is replaced
    if target.is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected the path of a file")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} to write {target.name} into")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
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


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to the disk, so that a rename in it survives a power failure."""
    with contextlib.suppress(OSError):  # the platform or the file system cannot sync a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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
