"""Tensors of the protocol as numpy arrays: from raw bytes without a copy, and from JSON."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tribe.serve.protocol.errors import BadInput
from tribe.serve.protocol.messages import Images

DTYPES: dict[str, "np.dtype[Any]"] = {
    "FP32": np.dtype("<f4"),
    "FP16": np.dtype("<f2"),
    "FP64": np.dtype("<f8"),
    "UINT8": np.dtype("u1"),
}
BF16 = np.dtype("<u2")  # numpy has no such type: its bits are the upper half of a float32's
NAMES = f"{', '.join(DTYPES)} or BF16"
EXPECTED = f"expected {NAMES}: floating point in [0, 1], or UINT8 from 0 to 255"


def dtype_of(datatype: str) -> "np.dtype[Any]":
    """The numpy type of the bytes of a datatype."""
    if datatype == "BF16":
        return BF16
    if datatype not in DTYPES:
        raise BadInput(f"the images have the datatype {datatype[:20]!r}; {EXPECTED}")
    return DTYPES[datatype]


def byte_size(datatype: str, shape: Sequence[int]) -> int:
    """How many bytes a tensor has, as a Python integer, which does not overflow."""
    return dtype_of(datatype).itemsize * math.prod(shape)


def from_bytes(content: Any, datatype: str, shape: tuple[int, ...], offset: int = 0) -> Images:
    """Images from raw bytes, little-endian and row by row. They share the memory, if it is aligned."""
    dtype = dtype_of(datatype)
    array = np.frombuffer(content, dtype, math.prod(shape), offset)
    if datatype == "BF16":
        array = np.left_shift(array, 16, dtype=np.uint32).view(np.float32)
    elif not array.flags.aligned:
        array = array.copy()
    return array.reshape(shape)


def from_numbers(data: Any, datatype: str, shape: tuple[int, ...]) -> Images:
    """Images from JSON numbers, in nested lists or in one."""
    dtype = np.dtype(np.float32) if datatype == "BF16" else dtype_of(datatype)
    try:
        array = np.asarray(data)
        plain = array.dtype.kind in ("ui" if datatype == "UINT8" else "uif")
        if plain and dtype.kind == "u" and array.size and not (array.min() >= 0 and array.max() <= 255):
            plain = False
        if not plain:
            raise ValueError("not all are numbers" if datatype != "UINT8" else "not all are integers from 0 to 255")
    except (ValueError, OverflowError) as error:
        raise BadInput(f"the data of the images cannot be read ({error}); expected numbers of {datatype}") from error
    if array.size != math.prod(shape) or array.shape not in ((array.size,), shape):
        raise BadInput(
            f"the data of the images has the shape {array.shape}; expected {shape}, or one list of its numbers"
        )
    with np.errstate(over="ignore"):  # a number that is too large for FP16 is infinite, and the image is a bad one
        return array.astype(dtype).reshape(shape)
