"""Folders of data to which one writer at a time adds finished files.

Files are written beside their place and moved there. A writer locks the folder, so an unfinished file that
it finds at the beginning was left by a process that was killed.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tribe.io.files import Busy, CannotWrite, exclusive, open_atomically, room_for

ADVICE = ". What was finished is kept: make room or use another --out, and run the same command again"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Path]:
    """Make a folder and hold an exclusive lock on it; where there are no locks, the last writer wins."""
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            locked = stack.enter_context(exclusive(folder / ".lock"))
        except Busy as error:
            raise CannotWrite(f"another process is writing to {folder}: wait for it, or use another --out") from error
        except OSError as error:
            raise CannotWrite(f"{folder} cannot be written to: {error.strerror or error}") from error
        if locked:
            _sweep(folder)
        yield folder


def _sweep(folder: Path) -> None:
    for pattern in (".*.tmp", "*/.*.tmp"):
        for leftover in folder.glob(pattern):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()


@contextlib.contextmanager
def replacing(path: Path, needed: int = 0) -> Iterator[IO[bytes]]:
    """Open a file that replaces ``path`` once it is whole; an error message says how many bytes it needs."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_atomically(path) as file:
            yield file
    except OSError as error:
        raise _cannot(path, error, needed) from error


def _cannot(path: Path, error: OSError, needed: int) -> CannotWrite:
    return error if isinstance(error, CannotWrite) else CannotWrite.because(error, path, needed, ADVICE)


def check_space(folder: Path, needed: int) -> None:
    """Raise CannotWrite if there is too little room for the work."""
    if needed > shutil.disk_usage(folder).free:
        raise CannotWrite(f"there is too little room in {folder}. {room_for(needed, folder)}. Use another --out")
