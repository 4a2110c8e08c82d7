"""Arrays in npy files: images that are memory-mapped, and labels.

The header of a file says the type and shape of its array. It is compared with what is expected, and with the size of
the file, before an array of that size is made.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tribe.io.arrays import Header, read_header
from tribe.io.files import open_regular


def open_images(path: Path, shape: tuple[int, ...]) -> NDArray[Any]:
    """Memory-map a file of uint8 images; refuse another shape, and a file that is longer or shorter than its header."""
    header, offset = _read_header(path, "an array")
    if header.shape != shape or header.dtype != np.uint8:
        raise ValueError(f"{path} holds {header}; expected uint8 {shape}")
    return _map(path, header, offset)


def open_labels(path: Path, classes: int) -> Tensor:
    """Read a label file and check its range."""
    header, offset = _read_header(path, "labels")
    if len(header.shape) != 1 or not np.issubdtype(header.dtype, np.integer):
        raise ValueError(f"{path} holds {header}; expected integers, one per image")
    array = _map(path, header, offset)
    if len(array) and (array.min() < 0 or array.max() >= classes):
        raise ValueError(f"{path} holds labels {array.min()} to {array.max()}; expected 0 to {classes - 1}")
    return torch.from_numpy(array.astype(np.int64))


def open_array(path: Path) -> NDArray[Any]:
    """Memory-map a file of numbers of any type and shape."""
    return _map(path, *_read_header(path, "an array"))


def _read_header(path: Path, what: str) -> tuple[Header, int]:
    """The header of an npy file, and where its array begins."""
    try:
        with open_regular(path) as file:
            header, offset, size = read_header(file), file.tell(), os.fstat(file.fileno()).st_size
            if size != (expected := offset + header.nbytes):
                raise ValueError(f"it has {size} bytes; its header promises {expected}")
    except (ValueError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be read as {what} ({reason}): it was cut short, or is no npy file") from error
    return header, offset


def _map(path: Path, header: Header, offset: int) -> NDArray[Any]:
    if header.nbytes == 0:
        return np.empty(header.shape, header.dtype)
    order = "F" if header.fortran else "C"
    return np.memmap(path, header.dtype, "r", offset, header.shape, order)  # type: ignore[call-overload, no-any-return]


def positions(index: Tensor, count: int, domain: str) -> NDArray[np.int64]:
    """Image numbers for numpy; negative ones, which numpy would count from the end, are refused."""
    rows = np.asarray(index)
    if rows.size and not 0 <= rows.min() <= rows.max() < count:
        raise IndexError(f"domain {domain!r} has images 0 to {count - 1}; got {rows.min()} to {rows.max()}")
    return rows


def to_images(rows: NDArray[Any]) -> Tensor:
    """(n, H, W, C) bytes -> (n, C, H, W) floats in [0, 1]."""
    return torch.from_numpy(np.ascontiguousarray(rows.transpose(0, 3, 1, 2))).float().div_(255)
