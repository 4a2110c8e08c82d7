"""Where data sets lie on the disk, and what to do if one is missing."""

import os
import shlex
from pathlib import Path


class MissingData(FileNotFoundError):
    """Data that was not found, with a command that puts it in place."""


def data_root(data: str | None = None) -> Path:
    """The folder of all data sets: ``data`` if given, else $TRIBE_DATA, else the user's cache directory."""
    if data is not None:
        return Path(data).expanduser()
    if root := os.environ.get("TRIBE_DATA"):
        return Path(root).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "tribe"


def find(root: Path, *names: str, what: str, hint: str) -> Path:
    """Return the first of some paths that exists, or raise an error that lists the paths and what to do."""
    for name in names:
        if (root / name).exists():
            return root / name
    paths = " or ".join(str(root / name) for name in names)
    raise MissingData(
        f"{what} not found: looked for {paths}. {hint}; the root can be set with --data, data= or TRIBE_DATA"
    )


def download_hint(url: str, folder: Path) -> str:
    """The sentence of an error message with a command that downloads an archive and unpacks it in a folder."""
    place, flags = shlex.quote(str(folder)), "xz" if url.endswith("gz") else "x"
    return f"To place it, run: mkdir -p {place} && curl -fL {url} | tar {flags} -C {place}"
