"""One container for tensor files: safetensors with a format name, a schema number, a header of plain data and a digest.

State files, source knowledge and checkpoints are kinds of it. A file is written atomically and is never a pickle. The
digest covers the header and all tensors, so a damaged file is recognised.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from tribe._version import __version__
from tribe.engine.state import hash_tensors
from tribe.storage.atomic import write_atomically


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
    fields: Mapping[str, type]  # what the header holds; a str is stored as it is, anything else as JSON
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
    placed = portable(tensors)
    metadata = {"format": kind.format, "schema": str(kind.schema), "tribe": __version__}
    metadata |= {name: value if kind.fields[name] is str else json.dumps(value) for name, value in header.items()}
    metadata["digest"] = kind.digest(metadata, placed)
    write_atomically(path, to_bytes(placed, metadata))


def read(path: str | PathLike[str], kind: Kind) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the header and the tensors of a file of this kind, or say why they cannot be read."""
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected a {kind.noun}")
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no {kind.noun} at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _check_format(path, kind, metadata)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise kind.error(
            f"{path} is not a {kind.noun}, or it was cut short or damaged ({error}). {kind.advice}"
        ) from error
    expected = kind.digest(metadata, tensors) if kind.needs_digest or "digest" in metadata else None
    if metadata.get("digest") != expected:
        raise kind.error(f"{path} is damaged: it does not hold what was saved. {kind.advice}")
    try:
        header = {name: _decode(metadata[name], type_) for name, type_ in kind.fields.items()}
    except (KeyError, ValueError) as error:
        raise kind.error(f"{path} is damaged: its header cannot be read ({error}). {kind.advice}") from error
    return header, tensors


def _check_format(path: str | PathLike[str], kind: Kind, metadata: Mapping[str, str]) -> None:
    if metadata.get("format", "").strip('"') != kind.format:  # older training checkpoints have it in quotes
        raise kind.error(f"{path} is a safetensors file, but not a {kind.noun}, or it is damaged. {kind.advice}")
    schema = metadata.get("schema", "1")
    if not (schema.isdecimal() and int(schema) <= kind.schema):
        raise kind.error(
            f"{path} was written by tribe {metadata.get('tribe', '?')} with schema {schema}; this version reads up to "
            f"{kind.schema}: upgrade tribe. If it was not, the file is damaged"
        )


def _decode(text: str, type_: type) -> Any:
    if type_ is str:
        return text
    value = json.loads(text)
    if type(value) is not type_:
        raise ValueError(f"expected {type_.__name__}; got {text[:40]}")
    return value
