"""One container for tensor files: safetensors with a format name, a schema number, a header of plain data and a digest.

State files, source knowledge and checkpoints are kinds of it. A file is written atomically and is never a pickle. The
digest covers the header and all tensors, so a damaged file is recognised.
"""

import contextlib
import hashlib
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tribe._version import __version__
from tribe.core.state import hash_tensors
from tribe.fields import is_whole
from tribe.io import json_files
from tribe.io.files import write_atomically
from tribe.io.json_files import Schema, Where

INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = {*INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64}  # that every operation supports
FAULTS = (SafetensorError, TypeError, RuntimeError, OverflowError)  # of a damaged file: sizes may be over 64 bits
SLACK = 2**20  # numbers in a tensor that a method or a network may make beside those of its file


class TensorFileError(ValueError):
    """A tensor file that cannot be used, and why."""


def content_digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Hash all that a file holds; the order of its tensors does not matter."""
    text = json.dumps({name: value for name, value in metadata.items() if name != "digest"}, sort_keys=True)
    return hashlib.sha256((text + hash_tensors(dict(sorted(tensors.items())))).encode()).hexdigest()


@dataclass(frozen=True)
class Kind:
    """A kind of tensor file."""

    format: str  # its name in the file, such as "tribe-state"
    schema: int  # the number that is written; a file with a higher one is refused, one without a number has schema 1
    fields: Mapping[str, Schema]  # what the header holds; a str is stored as it is, anything else as JSON
    noun: str  # what messages call a file
    advice: str  # what to do about a file that cannot be used
    error: type[TensorFileError] = TensorFileError
    needs_digest: bool = True  # False: files from before there were digests are read, too
    digest: Callable[[Mapping[str, str], Mapping[str, Tensor]], str] = content_digest


def portable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as a file takes them: on the CPU, contiguous."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def write(path: str | PathLike[str], kind: Kind, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a tensor file atomically."""
    write_atomically(path, encode(kind, header, tensors))


def encode(kind: Kind, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a tensor file."""
    placed = portable(tensors)
    metadata = {"format": kind.format, "schema": str(kind.schema), "tribe": __version__}
    metadata |= {name: value if kind.fields[name] is str else json.dumps(value) for name, value in header.items()}
    metadata["digest"] = kind.digest(metadata, placed)
    return to_bytes(placed, metadata)


def read(path: str | PathLike[str], kind: Kind) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the header and the tensors of a file of this kind, or say why they cannot be read."""
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected a {kind.noun}")
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no {kind.noun} at {path}")
    return _read(path, kind, lambda: open_safetensors(path))


def decode(data: bytes, kind: Kind, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the bytes of a file of this kind, or say why they cannot be read; ``name`` is what messages call them."""
    return _read(name, kind, lambda: open_bytes(data))


def _read(
    path: str | PathLike[str], kind: Kind, opened: Callable[[], contextlib.AbstractContextManager[Any]]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with opened() as file:
            metadata = file.metadata() or {}
            _check_format(path, kind, metadata)
            tensors = tensors_of(file)
    except kind.error:
        raise
    except ValueError as error:
        raise kind.error(
            f"{path} is not a {kind.noun}, or it was cut short or damaged ({error}). {kind.advice}"
        ) from error
    known = {"format", "schema", "tribe", *kind.fields}
    has_digest = kind.needs_digest or not metadata.keys() <= known  # a damaged name must not pass for an older file
    if has_digest and metadata.get("digest") != kind.digest(metadata, tensors):
        raise kind.error(f"{path} is damaged: it does not hold what was saved. {kind.advice}")
    try:
        header = {name: _decode(name, metadata[name], schema) for name, schema in kind.fields.items()}
    except (KeyError, ValueError) as error:
        raise kind.error(f"{path} is damaged: its header cannot be read ({error}). {kind.advice}") from error
    return header, tensors


@contextlib.contextmanager
def open_safetensors(path: str | PathLike[str]) -> Iterator[Any]:
    """Open a safetensors file; a ValueError says why it is none.

    The library that reads it checks that the tensors lie within the file, one after another. Here the header is bounded
    first, so that a large one takes no memory, and a name that occurs twice is refused.
    """
    with open(path, "rb") as file:
        _read_header(file)
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except FAULTS as error:
        raise ValueError(str(error).splitlines()[0]) from error


@contextlib.contextmanager
def open_bytes(data: bytes) -> Iterator["TensorBytes"]:
    """As `open_safetensors`, for the bytes of such a file."""
    header = _read_header(io.BytesIO(data))
    try:
        yield TensorBytes(header.get("__metadata__") or {}, from_bytes(data))
    except FAULTS as error:
        raise ValueError(str(error).splitlines()[0]) from error


class TensorBytes:
    """The members of an open safetensors file that this module uses, for bytes in memory."""

    def __init__(self, metadata: dict[str, str], tensors: dict[str, Tensor]) -> None:
        self._metadata, self._tensors = metadata, tensors

    def metadata(self) -> dict[str, str]:
        """The texts in the header."""
        return self._metadata

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        """One tensor."""
        return self._tensors[name]


def _read_header(file: IO[bytes]) -> dict[str, Any]:
    size = int.from_bytes(file.read(8), "little")
    if size > json_files.MOST_BYTES:
        raise ValueError(f"its header has {size:,} bytes; expected at most {json_files.MOST_BYTES:,}")
    schema = Where(dict, _has_sizes, "shapes of whole numbers of 63 bits")
    header: dict[str, Any] = json_files.parse(file.read(size), schema, "its header")
    return header


def _has_sizes(header: dict[str, Any]) -> bool:
    """Whether torch can represent all shapes: an empty tensor may have any other size."""
    shapes = [entry.get("shape") for entry in header.values() if isinstance(entry, dict)]
    return all(size < 2**63 for shape in shapes if isinstance(shape, list) for size in shape if is_whole(size))


def tensors_of(file: Any) -> dict[str, Tensor]:
    """The tensors of an open safetensors file, by name; only plain numbers are accepted."""
    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} holds {tensor.dtype}; expected integers, truth values or floats of 16 to 64 bits")
    return tensors


def check_like(
    path: str | PathLike[str], kind: Kind, noun: str, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]
) -> None:
    """Refuse tensors that have not the names, shapes and types of others; ``noun`` is what the others are."""
    if wrong := sorted(tensors.keys() ^ like.keys()):
        raise kind.error(f"{path} does not hold {noun}: {', '.join(wrong[:4])} missing or unexpected. {kind.advice}")
    for name, tensor in tensors.items():
        if tensor.shape != like[name].shape or tensor.dtype != like[name].dtype:
            raise kind.error(
                f"{path}: {name} is {tuple(tensor.shape)} {tensor.dtype}; expected {tuple(like[name].shape)} "
                f"{like[name].dtype}. {kind.advice}"
            )


def _check_format(path: str | PathLike[str], kind: Kind, metadata: Mapping[str, str]) -> None:
    if metadata.get("format", "").strip('"') != kind.format:  # older training checkpoints have it in quotes
        raise kind.error(f"{path} is a safetensors file, but not a {kind.noun}, or it is damaged. {kind.advice}")
    schema = metadata.get("schema", "1")
    if schema not in map(str, range(kind.schema + 1)):
        raise kind.error(
            f"{path} was written by tribe {metadata.get('tribe', '?')[:20]} with schema {schema[:20]}; this version "
            f"reads up to {kind.schema}: upgrade tribe. If it was not, the file is damaged"
        )


def _decode(name: str, text: str, schema: Any) -> Any:
    return text if schema is str else json_files.parse(text, schema, name)


class SizeLimit(TorchDispatchMode):
    """In this context a tensor that is far larger than any in a file is refused before it is allocated.

    Some sizes are read from a file: the classes of a network, the places of a memory. What is built with them has no
    larger tensors than the file, unless the file is damaged.
    """

    def __init__(self, tensors: Mapping[str, Tensor], error: ValueError) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        stored = (min(t.numel(), t.untyped_storage().nbytes()) for t in tensors.values())  # a view may show more
        self.most, self.error = SLACK + max(stored, default=0), error

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = max((t.numel() for t in args if isinstance(t, Tensor)), default=0)
        shapes = [a for a in args if isinstance(a, list | tuple) and all(type(n) is int and n >= 0 for n in a)]
        self._check(max(map(math.prod, shapes), default=0), given)
        result = func(*args, **(kwargs or {}))
        self._check(result.numel() if isinstance(result, Tensor) else 0, given)  # sizes of -1 are known now
        return result

    def _check(self, count: int, given: int) -> None:
        """Refuse a tensor of so many numbers, unless the operation was given a tensor as large."""
        if count > max(self.most, given):
            raise self.error from ValueError(f"a tensor of {count} numbers; expected at most {self.most}")
