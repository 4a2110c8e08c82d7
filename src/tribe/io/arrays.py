"""Read npy and npz files with numpy, never with pickle, and compare the arrays with what is expected."""

import zipfile
from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tribe.io.files import regular_size

MOST_UNPACKED = 64 * 2**20  # bytes that an npz file may unpack to, however small it is; a larger one in proportion
MOST_RATIO = 100  # of unpacked bytes to bytes of the file. Records reach 10; zeros reach 1,000
KINDS = {"U": "one text", "i": "a column of integers", "f": "a column of floats", "b": "a column of booleans"}


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


def read_npz(path: str | PathLike[str], arrays: Mapping[str, str] | None = None) -> dict[str, NDArray[Any]]:
    """Return arrays of an npz file by name; a ValueError says why it cannot be read.

    ``arrays`` has the kind of each expected array, a key of `KINDS`: text (no dimension), or columns of equal lengths;
    by default all arrays of any type and shape are returned.
    """
    try:
        most = max(MOST_UNPACKED, MOST_RATIO * regular_size(path))
        with zipfile.ZipFile(path) as archive:  # numpy reads no further than these sizes
            if (total := sum(member.file_size for member in archive.infolist())) > most:
                raise ValueError(f"it unpacks to {total:,} bytes; expected {most:,} at most")
        with np.load(path, allow_pickle=False) as file:
            loaded = {name: file[name] for name in (file.files if arrays is None else arrays)}
    except FileNotFoundError:
        raise
    except Exception as error:  # numpy and zipfile fail in many ways on damaged bytes
        raise ValueError(_reason(error)) from error
    if arrays is not None:
        _check_kinds(loaded, arrays)
    return loaded


def _check_kinds(loaded: Mapping[str, NDArray[Any]], kinds: Mapping[str, str]) -> None:
    """Raise for the first array that is not of its kind; all columns have the length of the first."""
    length = next((len(array) for array in loaded.values() if array.ndim), 0)
    for name, array in loaded.items():
        shape = () if kinds[name] == "U" else (length,)
        plain = array.dtype.isnative and (not shape or array.dtype.itemsize <= 8)  # no long doubles
        if array.dtype.kind != kinds[name] or array.shape != shape or not plain:
            found = f"{array.dtype} of shape {array.shape}"
            raise ValueError(f"its array {name} is {found}; expected {KINDS[kinds[name]]} of shape {shape}")


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
