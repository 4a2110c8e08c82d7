"""Local files of data sets: where they are, what to do if one is missing; npy and npz files, never with pickle."""

import os
import shlex
import zipfile
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tribe.io.files import regular_size

EMBEDDED = Path(__file__).parent / "data" / "mnist_test.npz"
MOST_UNPACKED = 64 * 2**20  # bytes that an npz file may unpack to, however small it is; a larger one in proportion
MOST_RATIO = 100  # of unpacked bytes to bytes of the file. Records reach 10; zeros reach 1,000


class MissingData(FileNotFoundError):
    """Data that was not found, with a command that puts it in place."""


def data_root(data: str | None = None) -> Path:
    """Return the folder of all data sets: ``data`` if given, else $TRIBE_DATA, else the user's cache directory."""
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
    """Return the sentence with a command that downloads an archive and unpacks it in a folder."""
    place, flags = shlex.quote(str(folder)), "xz" if url.endswith("gz") else "x"
    return f"To place it, run: mkdir -p {place} && curl -fL {url} | tar {flags} -C {place}"


@cache
def mnist_test() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the pixels and labels of the MNIST test images that come with the package (see NOTICE), read-only."""
    with np.load(EMBEDDED, allow_pickle=False) as file:
        pixels, labels = file["images"], file["labels"]
    pixels.flags.writeable = labels.flags.writeable = False
    return pixels, labels


def open_npy(path: str | PathLike[str]) -> NDArray[Any]:
    """Memory-map the array of an npy file; a ValueError says why it cannot be read."""
    try:
        size = regular_size(path)
        array = np.lib.format.open_memmap(path, "r")
    except FileNotFoundError:
        raise
    except Exception as error:  # numpy fails in many ways on damaged bytes
        raise ValueError(f"it was cut short, or is not an npy file of numbers ({_reason(error)})") from error
    if size != array.offset + array.nbytes:
        raise ValueError(f"it is longer than the {array.dtype} array of shape {array.shape} in it")
    return array


def read_npz(path: str | PathLike[str]) -> dict[str, NDArray[Any]]:
    """Return the arrays of an npz file by name; a ValueError says why it cannot be read."""
    try:
        most = max(MOST_UNPACKED, MOST_RATIO * regular_size(path))
        with zipfile.ZipFile(path) as archive:  # numpy reads no further than these sizes
            if (total := sum(member.file_size for member in archive.infolist())) > most:
                raise ValueError(f"it unpacks to {total:,} bytes; expected {most:,} at most")
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except FileNotFoundError:
        raise
    except Exception as error:  # numpy and zipfile fail in many ways on damaged bytes
        raise ValueError(_reason(error)) from error


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def open_images(path: Path, shape: tuple[int, ...]) -> NDArray[Any]:
    """Memory-map a file of uint8 images; raise if it has another shape."""
    array = _open(path, "an array")
    if array.shape != shape or array.dtype != np.uint8:
        raise ValueError(f"{path} holds {array.dtype} {array.shape}; expected uint8 {shape}")
    return array


def open_labels(path: Path, classes: int) -> Tensor:
    """Read a label file and check its range."""
    array = _open(path, "labels")
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{path} holds {array.dtype} of shape {array.shape}; expected integers, one per image")
    if len(array) and (array.min() < 0 or array.max() >= classes):
        raise ValueError(f"{path} holds labels {array.min()} to {array.max()}; expected 0 to {classes - 1}")
    return torch.from_numpy(array.astype(np.int64))


def _open(path: Path, what: str) -> NDArray[Any]:
    try:
        return open_npy(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read as {what}: {getattr(error, 'strerror', None) or error}") from error


def positions(index: Tensor, count: int, domain: str) -> NDArray[np.int64]:
    """Return image numbers for numpy; raise for negative ones, which numpy would count from the end."""
    rows = np.asarray(index)
    if rows.size and not 0 <= rows.min() <= rows.max() < count:
        raise IndexError(f"domain {domain!r} has images 0 to {count - 1}; got {rows.min()} to {rows.max()}")
    return rows
