"""One container for tensor files: safetensors with a kind, a schema number, a header of plain data and a digest.

State files, source knowledge and checkpoints are kinds of it. A file is written atomically and is never a pickle. The
digest covers the header and all tensors, so a damaged file is recognised.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from tribe._version import __version__
from tribe.core.shortage import is_out_of_memory
from tribe.core.state import hash_tensors
from tribe.io import json_files
from tribe.io.files import write_atomically
from tribe.io.json_files import Schema

INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = {*INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64}  # that every operation supports
FAULTS = (SafetensorError, ValueError, TypeError, RuntimeError, OverflowError, KeyError)  # of a damaged file


class TensorFileError(ValueError):
    """A tensor file that cannot be used, and why."""


@dataclass(frozen=True)
class Kind:
    """A kind of tensor file."""

    format: str  # its name in the file, such as "tribe-state"
    schema: int  # the number that is written; a file with another one is refused
    fields: Mapping[str, Schema]  # of the header; a str is stored as it is, anything else as JSON
    noun: str  # what messages call a file
    advice: str  # what to do about a file that cannot be used
    error: type[TensorFileError] = TensorFileError
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that are written only if they differ


def content_digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of the header and the tensors; the order of the tensors does not matter."""
    text = json.dumps({name: value for name, value in metadata.items() if name != "digest"}, sort_keys=True)
    return hashlib.sha256((text + hash_tensors(dict(sorted(tensors.items())))).encode()).hexdigest()


def portable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as a file takes them: on the CPU, contiguous."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def write(path: str | PathLike[str], kind: Kind, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a tensor file atomically."""
    write_atomically(path, encode(kind, header, tensors))


def encode(kind: Kind, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of a tensor file."""
    placed = portable(tensors)
    metadata = {"format": kind.format, "schema": str(kind.schema), "tribe": __version__}
    written = {
        name: value for name, value in header.items() if name not in kind.defaults or value != kind.defaults[name]
    }
    metadata |= {name: value if kind.fields[name] is str else json.dumps(value) for name, value in written.items()}
    metadata["digest"] = content_digest(metadata, placed)
    return save(placed, metadata)


def read(path: str | PathLike[str], kind: Kind) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors of a file of this kind; ``kind.error`` says why it cannot be read."""
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected a {kind.noun}")
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no {kind.noun} at {path}")
    return _checked(path, kind, lambda: read_safetensors(path))


def decode(data: bytes, kind: Kind, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors in the bytes of a file; ``name`` is what messages call them."""
    return _checked(name, kind, lambda: _from_bytes(data))


def read_safetensors(path: str | PathLike[str]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors of a safetensors file; a ValueError says why it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except FAULTS as error:
        if is_out_of_memory(error):  # no damage
            raise
        raise ValueError(str(error).splitlines()[0]) from error
    _check_dtypes(tensors)
    return metadata, tensors


def check_like(
    path: str | PathLike[str], kind: Kind, noun: str, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]
) -> None:
    """Raise if tensors do not have the names, shapes and types of others; ``noun`` is what messages call the others."""
    if wrong := sorted(tensors.keys() ^ like.keys()):
        raise kind.error(f"{path} does not hold {noun}: {', '.join(wrong[:4])} missing or unexpected. {kind.advice}")
    for name, tensor in tensors.items():
        if tensor.shape != like[name].shape or tensor.dtype != like[name].dtype:
            raise kind.error(
                f"{path}: {name} is {tuple(tensor.shape)} {tensor.dtype}; expected {tuple(like[name].shape)} "
                f"{like[name].dtype}. {kind.advice}"
            )


def _from_bytes(data: bytes) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])  # the library has checked it
    except FAULTS as error:
        if is_out_of_memory(error):  # no damage
            raise
        raise ValueError(str(error).splitlines()[0]) from error
    _check_dtypes(tensors)
    return header.get("__metadata__") or {}, tensors


def _check_dtypes(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} holds {tensor.dtype}; expected integers, booleans or floats of 16 to 64 bits")


def _checked(
    path: str | PathLike[str], kind: Kind, opened: Callable[[], tuple[dict[str, str], dict[str, Tensor]]]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        metadata, tensors = opened()
    except ValueError as error:
        raise kind.error(
            f"{path} is not a {kind.noun}, or it was cut short or damaged ({error}). {kind.advice}"
        ) from error
    if metadata.get("format") != kind.format:
        raise kind.error(f"{path} is a safetensors file, but not a {kind.noun}, or it is damaged. {kind.advice}")
    if (schema := metadata.get("schema")) != str(kind.schema):
        raise kind.error(
            f"{path} was written by tribe {metadata.get('tribe', '?')[:20]} with schema {str(schema)[:20]}; this "
            f"version reads schema {kind.schema}: install the version that wrote it"
        )
    if metadata.get("digest") != content_digest(metadata, tensors):
        raise kind.error(f"{path} is damaged: it does not hold what was saved. {kind.advice}")
    try:
        header = {
            name: metadata[name] if schema is str else json_files.parse(metadata[name], schema, name)
            for name, schema in kind.fields.items()
            if name in metadata or name not in kind.defaults
        }
    except (KeyError, ValueError) as error:
        raise kind.error(f"{path} is damaged: its header cannot be read ({error}). {kind.advice}") from error
    return {**kind.defaults, **header}, tensors
