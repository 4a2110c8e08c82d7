"""Images in an array file, as options of commands take them."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from tribe.cli.output import fail
from tribe.data.datasets.files import open_npy, read_npz

SAMPLE = 128  # images, spread evenly over the file: enough for means, and files are often sorted by class


def read_images(path: Path) -> "np.ndarray[Any, Any]":
    """Read at most `SAMPLE` images (N, C, H, W), float32, from an array file."""
    if not path.is_file():
        fail(f"no images at {path}")
    try:
        if zipfile.is_zipfile(path):
            arrays = read_npz(path)
            if len(arrays) != 1:
                raise ValueError(f"it holds {len(arrays)} arrays ({', '.join(list(arrays)[:8])}); expected one")
            array = next(iter(arrays.values()))
        else:
            array = open_npy(path)
    except (ValueError, OSError) as error:
        fail(f"{path} is not an array file that can be read without pickle: {type(error).__name__}: {error}")
    if array.ndim != 4 or 0 in array.shape:
        fail(f"{path} holds an array of shape {array.shape}; expected images (N, C, H, W)")
    if array.shape[3] in (1, 3) and array.shape[1] not in (1, 3):
        fail(f"{path} holds {array.shape}, probably (N, H, W, C); expected (N, C, H, W): array.transpose(0, 3, 1, 2)")
    if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
        fail(f"{path} holds {array.dtype}; expected uint8 or floating point")
    chosen = np.linspace(0, len(array) - 1, min(len(array), SAMPLE)).astype(int)
    images: np.ndarray[Any, Any] = array[chosen].astype(np.float32)
    return images / 255 if array.dtype == np.uint8 else images
