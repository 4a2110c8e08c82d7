"""Arrays in npy files: images that are memory-mapped, and labels."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def open_images(path: Path, shape: tuple[int, ...]) -> NDArray[Any]:
    """Memory-map a file of uint8 images; refuse another shape, and a file that is longer or shorter than its header."""
    try:
        array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as an array ({error}): it was cut short, or is no npy file") from error
    if array.shape != shape or array.dtype != np.uint8:
        raise ValueError(f"{path} holds {array.dtype} of shape {array.shape}; expected uint8 {shape}")
    expected, size = array.offset + array.nbytes, path.stat().st_size
    if size != expected:
        raise ValueError(f"{path} has {size} bytes; its header promises {expected}")
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


def positions(index: Tensor, count: int, domain: str) -> NDArray[np.int64]:
    """Image numbers for numpy; negative ones, which numpy would count from the end, are refused."""
    rows = np.asarray(index)
    if rows.size and not 0 <= rows.min() <= rows.max() < count:
        raise IndexError(f"domain {domain!r} has images 0 to {count - 1}; got {rows.min()} to {rows.max()}")
    return rows


def to_images(rows: NDArray[Any]) -> Tensor:
    """(n, H, W, C) bytes -> (n, C, H, W) floats in [0, 1]."""
    return torch.from_numpy(np.ascontiguousarray(rows.transpose(0, 3, 1, 2))).float().div_(255)
