"""Files that are written whole or not at all.

Bytes go to a temporary file beside the target, which is then moved over it: whoever is killed half-way leaves the old
file or the new one.
"""

import contextlib
import os
import secrets
import shutil
import time
from os import PathLike
from pathlib import Path

STALE_SECONDS = 3600


def write_atomically(path: str | PathLike[str], data: bytes) -> None:
    """Write a file so that at every moment the path holds the old bytes or the new.

    What is there and no file, as a pipe or /dev/null, is written to as it is.
    """
    if Path(path).exists() and not Path(path).is_file() and not Path(path).is_dir():
        with open(path, "wb") as there:
            there.write(data)
        return
    target = Path(os.path.realpath(path))  # where a link leads: it stays a link
    if target.is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected the path of a file")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} to write {target.name} into")
    _sweep(target)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:  # a new one, with the permissions that any gets here
            with contextlib.suppress(OSError):  # there is none yet, or nobody may say so here
                shutil.copymode(target, temporary)  # what was kept from others stays so
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sweep(target: Path) -> None:
    """Remove what writers that were killed left behind, once it is too old to be somebody's work in progress."""
    for leftover in target.parent.glob(f".{target.name}.*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - leftover.stat().st_mtime > STALE_SECONDS:
                leftover.unlink()
