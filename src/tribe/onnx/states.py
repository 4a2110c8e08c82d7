"""State files in numpy: the same bytes as `tribe.io.states` reads and writes, without torch."""

import hashlib
import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from tribe._version import __version__
from tribe.io import json_files
from tribe.io.files import write_atomically

FORMAT = "tribe-model"
ADVICE = "Use a file that Adapter.save or Session.save wrote"
State = dict[str, "np.ndarray[Any, Any]"]


class ModelFileError(ValueError):
    """A network, a model file or a state that cannot be used, and why."""


class StateHeader(NamedTuple):
    """The header of a state file."""

    method: str
    fields: dict[str, Any]
    streams: int
    frozen: bool
    fingerprint: str


def write(path: str | PathLike[str], header: StateHeader, state: Mapping[str, "np.ndarray[Any, Any]"]) -> None:
    """Write a state file, as `tribe.Adapter.save` does."""
    tensors = {name: np.ascontiguousarray(t).reshape(t.shape) for name, t in state.items()}
    metadata = {"format": "tribe-state", "schema": "1", "tribe": __version__, "method": header.method}
    metadata |= {name: json.dumps(getattr(header, name)) for name in ("fields", "streams", "frozen")}
    metadata["fingerprint"] = header.fingerprint
    metadata["digest"] = content_digest(metadata, tensors)
    write_atomically(path, save(tensors, metadata))


def read(path: str | PathLike[str]) -> tuple[StateHeader, State]:
    """Return the header and the tensors of a state file; a `ModelFileError` says why it cannot be read."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no tribe state file at {path}")
    data = Path(path).read_bytes()
    try:
        state = load(data)
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__") or {}
    except (SafetensorError, ValueError, TypeError, OverflowError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise ModelFileError(
            f"{path} is not a tribe state file, or it was cut short or damaged ({reason}). {ADVICE}"
        ) from error
    if metadata.get("format") != "tribe-state" or metadata.get("schema") != "1":
        raise ModelFileError(f"{path} is a safetensors file, but not a tribe state file of schema 1. {ADVICE}")
    if metadata.get("digest") != content_digest(metadata, state):
        raise ModelFileError(f"{path} is damaged: it does not hold what was saved. {ADVICE}")
    if "shadow" in metadata:
        words = "is of a stream in shadow, where the source answers; a session answers with what adapts"
        raise ModelFileError(f"{path} {words}. Promote the stream, then save it again")
    try:
        schemas = {"fields": dict, "streams": int, "frozen": bool}
        parsed = {name: json_files.parse(metadata[name], schema, name) for name, schema in schemas.items()}
        return StateHeader(metadata["method"], fingerprint=metadata["fingerprint"], **parsed), state
    except (KeyError, ValueError) as error:
        raise ModelFileError(f"{path} is damaged: its header cannot be read ({error}). {ADVICE}") from error


def content_digest(metadata: Mapping[str, str], tensors: Mapping[str, "np.ndarray[Any, Any]"]) -> str:
    """Return the digest of `tribe.io.tensors.content_digest`."""
    text = json.dumps({name: value for name, value in metadata.items() if name != "digest"}, sort_keys=True)
    hasher = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        values = tensors[name]
        hasher.update(f"{name} {tuple(values.shape)} torch.{values.dtype}\n".encode())
        hasher.update(np.ascontiguousarray(values).tobytes())
    return hashlib.sha256((text + hasher.hexdigest()).encode()).hexdigest()
