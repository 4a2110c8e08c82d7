"""Where data lies, and arrays that are opened without being read."""

import os
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class MissingData(FileNotFoundError):
    """Data that is not where it should be, and what would put it there."""


def data_root(data: str | None = None) -> Path:
    """The folder of all data sets: ``data`` if given, else $TRIBE_DATA, else the user's cache directory."""
    if data is not None:
        return Path(data).expanduser()
    if root := os.environ.get("TRIBE_DATA"):
        return Path(root).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "tribe"


def find(root: Path, *names: str, what: str, hint: str) -> Path:
    """The first of some paths that exists, or an error that says what was looked for, where, and what to do."""
    for name in names:
        if (root / name).exists():
            return root / name
    looked = " or ".join(str(root / name) for name in names)
    root_is = "the root can be set with --data, data= or TRIBE_DATA"
    raise MissingData(f"{what} not found: looked for {looked}. {hint}; {root_is}")


def unpack(url: str, into: Path) -> str:
    """The part of an error message that is a command to run: download an archive and unpack it in a folder."""
    folder, flags = shlex.quote(str(into)), "xz" if url.endswith("gz") else "x"
    return f"To place it, run: mkdir -p {folder} && curl -fL {url} | tar {flags} -C {folder}"


def positions(index: Tensor, count: int, domain: str) -> NDArray[np.int64]:
    """Image numbers for numpy, all of them there; numpy itself would count negative ones from the end."""
    rows = np.asarray(index)
    if rows.size and not 0 <= rows.min() <= rows.max() < count:
        raise IndexError(f"domain {domain!r} has images 0 to {count - 1}; got {rows.min()} to {rows.max()}")
    return rows


def open_array(path: Path, shape: tuple[int | None, ...], dtype: Any = np.uint8) -> NDArray[Any]:
    """Memory-map an npy file and check what it is; None in ``shape`` matches any size."""
    try:
        array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as an array ({error}): it was cut short, or is no npy file") from error
    fits = array.ndim == len(shape) and all(want in (None, got) for want, got in zip(shape, array.shape, strict=True))
    if not fits or (dtype is not None and array.dtype != dtype):
        wanted = "(" + ", ".join("n" if size is None else str(size) for size in shape) + ")"
        raise ValueError(f"{path} holds {array.dtype} of shape {array.shape}; expected {np.dtype(dtype)} {wanted}")
    return array  # type: ignore[no-any-return]


def open_labels(path: Path, classes: int) -> Tensor:
    """Read a label file and check its range."""
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as labels ({error}): it was cut short, or is no npy file") from error
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{path} holds {array.dtype} of shape {array.shape}; expected integers, one per image")
    if len(array) and (array.min() < 0 or array.max() >= classes):
        raise ValueError(f"{path} holds labels {array.min()} to {array.max()}; expected 0 to {classes - 1}")
    return torch.from_numpy(array.astype(np.int64))


def to_images(rows: NDArray[Any]) -> Tensor:
    """(n, H, W, C) bytes -> (n, C, H, W) floats in [0, 1]."""
    return torch.from_numpy(np.ascontiguousarray(rows.transpose(0, 3, 1, 2))).float().div_(255)
