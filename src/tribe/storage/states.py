"""State files: safetensors with a schema version, the method's fields and a fingerprint of the source model.

Written atomically; never a pickle. A digest of all of it tells a damaged file from a good one, and a state that is not
finite, which could predict nothing ever again, is neither written nor read.
"""

import hashlib
import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from tribe._version import __version__
from tribe.engine.backbone import Backbone
from tribe.engine.state import hash_tensors, per_stream
from tribe.storage.atomic import write_atomically

FORMAT = "tribe-state"
SCHEMA = 1


class StateFileError(ValueError):
    """A state file that cannot be used, and why."""


class Saved(NamedTuple):
    """What a state file holds."""

    method: str
    fields: dict[str, Any]
    streams: int
    frozen: bool
    fingerprint: str
    tensors: dict[str, Tensor]


def write(
    path: str | PathLike[str],
    tensors: Mapping[str, Tensor],
    *,
    method: str,
    fields: Mapping[str, Any],
    streams: int,
    frozen: bool,
    fingerprint: str,
) -> None:
    """Write a state file; a state that is not finite is refused."""
    if lost := not_finite(tensors):
        rows = [per_stream(tensors[name], streams).isfinite().flatten(1).all(1) for name in lost]
        which = ", ".join(str(i) for i in range(streams) if not all(row[i] for row in rows))
        raise StateFileError(
            f"the state of stream {which} is not finite ({', '.join(lost[:4])}), so it can predict nothing any more: "
            f"reset(stream=...) starts it anew, restore(snapshot) goes back. Nothing was written to {path}"
        )
    placed = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    metadata = {
        "format": FORMAT,
        "schema": str(SCHEMA),
        "tribe": __version__,
        "method": method,
        "fields": json.dumps(dict(fields)),
        "streams": str(streams),
        "frozen": json.dumps(frozen),
        "fingerprint": fingerprint,
    }
    metadata["digest"] = file_digest(metadata, placed)
    write_atomically(path, to_bytes(placed, metadata))


def read(path: str | PathLike[str]) -> Saved:
    """Read a state file, or say why it is not one."""
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected a state file written by Adapter.save")
    if not Path(path).is_file():
        raise FileNotFoundError(f"no state file at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _check_header(path, metadata)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise StateFileError(
            f"{path} is not a tribe state file, or it was cut short ({error}); expected one written by Adapter.save"
        ) from error
    if "digest" in metadata and metadata["digest"] != file_digest(metadata, tensors):  # older files have none
        raise StateFileError(
            f"{path} is damaged: it does not hold what was saved. Use an earlier file, or start anew with tribe.adapt"
        )
    try:
        fields, streams, frozen = (json.loads(metadata[name]) for name in ("fields", "streams", "frozen"))
        return Saved(metadata["method"], dict(fields), int(streams), bool(frozen), metadata["fingerprint"], tensors)
    except (KeyError, ValueError, TypeError) as error:
        raise StateFileError(f"{path}: the header cannot be read ({error}); the file is damaged") from error


def file_digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """A hash of all that a file says, in whatever order it gives the tensors back."""
    words = json.dumps({name: word for name, word in metadata.items() if name != "digest"}, sort_keys=True)
    return hashlib.sha256((words + hash_tensors(dict(sorted(tensors.items())))).encode()).hexdigest()


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The tensors of a state that are lost; `info` only watches, and the next step writes it anew."""
    numbers = {n: t for n, t in tensors.items() if t.is_floating_point() and t.numel() and not n.startswith("info.")}
    # The extremes are NaN where anything is; they take one pass and no memory, which isfinite() of all would.
    return [name for name, t in numbers.items() if not all(end.isfinite() for end in t.aminmax())]


def _check_header(path: str | PathLike[str], metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise StateFileError(f"{path} is a safetensors file, but no tribe state; expected one written by Adapter.save")
    schema = metadata.get("schema", "")
    if not schema.isdigit() or int(schema) > SCHEMA:
        raise StateFileError(
            f"{path} was written by tribe {metadata.get('tribe', '?')} with schema {schema or '?'}; this version "
            f"reads up to {SCHEMA}: upgrade tribe"
        )


def check_fingerprint(path: str | PathLike[str], fingerprint: str, net: Backbone) -> None:
    """Refuse a state that was adapted on another network."""
    if net.fingerprint() != fingerprint:
        raise StateFileError(
            f"{path} was saved from another model: its weights differ from this one's. Load it with the network it was "
            "adapted on, with the same weights and precision; if the adapter was cast, with a network that is cast so, "
            "as tribe.Backbone(net).to(torch.bfloat16)"
        )


def check_tensors(path: str | PathLike[str], tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Refuse a state whose tensors are not those the method keeps, or not finite."""
    if wrong := sorted(tensors.keys() ^ like.keys()):
        raise StateFileError(f"{path} does not hold this method's state: {', '.join(wrong[:4])} missing or unexpected")
    for name, tensor in tensors.items():
        if tensor.shape != like[name].shape or tensor.dtype != like[name].dtype:
            raise StateFileError(
                f"{path}: {name} is {tuple(tensor.shape)} {tensor.dtype}; expected {tuple(like[name].shape)} "
                f"{like[name].dtype}"
            )
    if lost := not_finite(tensors):
        raise StateFileError(
            f"{path} holds a state that is not finite ({', '.join(lost[:4])}), which can predict nothing. Use an "
            "earlier file, or start anew with tribe.adapt"
        )
