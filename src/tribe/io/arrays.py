"""Read npy headers and npz files that others may have written, without believing what they say of their size.

A header is compared with what is expected, and with the size of its file, before anything of its size is allocated.
Nothing in a file is evaluated or unpickled.
"""

import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from os import PathLike
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tribe.io.files import open_regular

MAGIC = b"\x93NUMPY"
MOST_HEADER = 10_000  # bytes, as numpy reads at most
MOST_DIMENSIONS = 32
MOST_UNPACKED = 64 * 2**20  # bytes that an npz file may unpack to, however small it is; a larger one in proportion
MOST_RATIO = 100  # of unpacked bytes to bytes of the file. Records reach 10; zeros reach 1,000
CHUNK = 2**20  # bytes that are unpacked at a time
KINDS = {"U": "one text", "i": "a column of integers", "f": "a column of floats", "b": "a column of truth values"}
ENTRY = re.compile(r"""\s*['"](\w+)['"]\s*:\s*(['"][^'"]*['"]|True|False|\([\d\sL,]*\))\s*(,|$)""")
DTYPE = re.compile(r"[<>|=]?[?bBiufcSU][0-9]{0,9}")  # no objects, no records, no dates
UNREADABLE = (
    *(ValueError, EOFError, OSError, OverflowError, RuntimeError, struct.error),  # RuntimeError: a password
    *(zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error),
)  # what zip raises on damaged bytes; NotImplementedError is a RuntimeError


class Header(NamedTuple):
    """What the header of an npy file says of its array."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool

    @property
    def nbytes(self) -> int:
        """Of the array, as a Python integer, which does not overflow."""
        return self.dtype.itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


def read_header(file: IO[bytes]) -> Header:
    """The header of an npy file; the file is then at the first byte of the array. ValueError: why there is none."""
    start = file.read(8)
    if len(start) < 8 or start[:6] != MAGIC:
        raise ValueError("it does not begin as an npy file does")
    if start[6] not in (1, 2, 3):
        raise ValueError(f"it is an npy file of version {start[6]}; expected 1, 2 or 3")
    size = file.read(2 if start[6] == 1 else 4)
    length = int.from_bytes(size, "little")
    if length > MOST_HEADER:
        raise ValueError(f"its npy header has {length} bytes; expected at most {MOST_HEADER}")
    text = file.read(length)
    if len(text) < length:
        raise ValueError("it was cut short in its npy header")
    return _parse(text.decode("latin-1").strip())


def _parse(text: str) -> Header:
    """The three entries of a header, such as ``{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2)}``."""
    entries, inside, end = dict[str, str](), text[1:-1].rstrip(), 0
    while match := ENTRY.match(inside, end):
        entries[match[1]], end = match[2], match.end()
    complete = text[:1] == "{" and text[-1:] == "}" and end == len(inside)
    if not complete or entries.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError(f"its npy header is damaged: {text[:80]!r}")
    return Header(_dtype(entries["descr"][1:-1]), _shape(entries["shape"]), entries["fortran_order"] == "True")


def _dtype(descr: str) -> np.dtype[Any]:
    try:
        if DTYPE.fullmatch(descr):
            return np.dtype(descr)
    except TypeError:  # such as an integer of 3 bytes
        pass
    raise ValueError(f"its npy header says it holds {descr[:40]!r}; expected numbers, truth values or text")


def _shape(text: str) -> tuple[int, ...]:
    sizes = [size.strip().removesuffix("L") for size in text.strip("()").split(",") if size.strip()]
    if len(sizes) > MOST_DIMENSIONS or any(not size.isdecimal() or len(size) > 18 for size in sizes):
        raise ValueError(f"its npy header says it has shape {text[:80]}; expected a size for each dimension")
    return tuple(map(int, sizes))


# -- npz --------------------------------------------------------------------------------------------------------------


def read_npz(path: str | PathLike[str], arrays: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    """Read some arrays of an npz file: text (no dimension), or columns (one dimension) of equal lengths.

    Args:
        path: the file.
        arrays: the kind of each array by its name, a key of `KINDS`.
    """
    with open_regular(path) as content:
        most = max(MOST_UNPACKED, MOST_RATIO * os.fstat(content.fileno()).st_size)
        try:
            with zipfile.ZipFile(content) as file:
                members = {name: _member(file, name) for name in arrays}
                headers = {name: _header(file, name, member) for name, member in members.items()}
                _check_headers(headers, arrays, most)
                return {name: _array(file, name, member) for name, member in members.items()}
        except UNREADABLE as error:
            raise ValueError(str(error) or type(error).__name__) from error


def read_single(path: str | PathLike[str]) -> NDArray[Any]:
    """Read the only array of an npz file, of any type and shape."""
    with open_regular(path) as content:
        most = max(MOST_UNPACKED, MOST_RATIO * os.fstat(content.fileno()).st_size)
        try:
            with zipfile.ZipFile(content) as file:
                if len(names := file.namelist()) != 1:
                    listed = ", ".join(name.removesuffix(".npy") for name in names[:8])
                    raise ValueError(f"it holds {len(names)} arrays ({listed}); expected one")
                name = names[0].removesuffix(".npy")
                member = _member(file, name)
                if (header := _header(file, name, member)).nbytes > most:
                    raise ValueError(
                        f"its header says it unpacks to {header.nbytes:,} bytes; expected {most:,} at most"
                    )
                return _array(file, name, member)
        except UNREADABLE as error:
            raise ValueError(str(error) or type(error).__name__) from error


def _member(file: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    member = file.NameToInfo.get(f"{name}.npy")
    if member is None:
        raise ValueError(f"it has no array {name}")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"its array {name} is compressed in another way than numpy does")
    return member


def _header(file: zipfile.ZipFile, name: str, member: zipfile.ZipInfo) -> Header:
    with file.open(member) as inside:
        try:
            return read_header(inside)
        except ValueError as error:
            raise ValueError(f"its array {name} cannot be read: {error}") from error


def _check_headers(headers: Mapping[str, Header], kinds: Mapping[str, str], most: int) -> None:
    """Compare what the headers say with what is expected, with each other, and with the size of the file."""
    lengths = [header.shape[0] for header in headers.values() if len(header.shape) == 1]
    for name, header in headers.items():
        shape = () if kinds[name] == "U" else (*lengths[:1],)
        plain = header.dtype.isnative and (not shape or header.dtype.itemsize <= 8)  # no long doubles
        if header.dtype.kind != kinds[name] or header.shape != shape or not plain:
            raise ValueError(f"its array {name} is {header}; expected {KINDS[kinds[name]]} of shape {shape}")
    if (total := sum(header.nbytes for header in headers.values())) > most:
        raise ValueError(
            f"its headers say it unpacks to {total:,} bytes; expected at most {most:,} of a file this size"
        )


def _array(file: zipfile.ZipFile, name: str, member: zipfile.ZipInfo) -> NDArray[Any]:
    """Read one array, which has as many bytes as its header says, no more and no fewer."""
    with file.open(member) as inside:
        header, filled = read_header(inside), 0
        content = np.empty(header.nbytes, np.uint8)
        while chunk := inside.read(min(CHUNK, header.nbytes - filled)):
            content[filled : filled + len(chunk)] = np.frombuffer(chunk, np.uint8)
            filled += len(chunk)
        if filled < header.nbytes or inside.read(1):
            raise ValueError(f"its array {name} does not have the {header.nbytes:,} bytes that its header says")
    return content.view(header.dtype).reshape(header.shape, order="F" if header.fortran else "C")
