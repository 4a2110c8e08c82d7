"""State files: safetensors with a schema version, the method's fields and a fingerprint of the source model.

Written atomically; never a pickle.
"""

import dataclasses
import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from tribe import methods
from tribe.atomic import write_atomically
from tribe.augment import Augment
from tribe.backbone import Backbone
from tribe.methods import Method
from tribe.source import Knowledge

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
    method: Method,
    streams: int,
    frozen: bool,
    fingerprint: str,
) -> None:
    """Write a state file."""
    from tribe import __version__

    metadata = {
        "format": FORMAT,
        "schema": str(SCHEMA),
        "tribe": __version__,
        "method": method.name,
        "fields": json.dumps(method_to_json(method)),
        "streams": str(streams),
        "frozen": json.dumps(frozen),
        "fingerprint": fingerprint,
    }
    write_atomically(path, to_bytes({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, metadata))


def read(path: str | PathLike[str]) -> Saved:
    """Read a state file, or say why it is not one."""
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
    try:
        fields, streams, frozen = (json.loads(metadata[name]) for name in ("fields", "streams", "frozen"))
        return Saved(metadata["method"], dict(fields), int(streams), bool(frozen), metadata["fingerprint"], tensors)
    except (KeyError, ValueError, TypeError) as error:
        raise StateFileError(f"{path}: the header cannot be read ({error}); the file is damaged") from error


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
            "adapted on, with the same weights and precision"
        )


def check_tensors(path: str | PathLike[str], tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Refuse a state whose tensors are not those the method keeps."""
    if wrong := sorted(tensors.keys() ^ like.keys()):
        raise StateFileError(f"{path} does not hold this method's state: {', '.join(wrong[:4])} missing or unexpected")
    for name, tensor in tensors.items():
        if tensor.shape != like[name].shape or tensor.dtype != like[name].dtype:
            raise StateFileError(
                f"{path}: {name} is {tuple(tensor.shape)} {tensor.dtype}; expected {tuple(like[name].shape)} "
                f"{like[name].dtype}"
            )


def method_to_json(method: Method) -> dict[str, Any]:
    """A method's fields as plain data; a callable is named, since no file can hold it."""
    return {f.name: _to_json(getattr(method, f.name)) for f in dataclasses.fields(method)}


def _to_json(value: Any) -> Any:
    if isinstance(value, Augment):
        return {"augment": dataclasses.asdict(value)}
    if isinstance(value, Knowledge):
        return {"knowledge": value.path, "digest": value.digest} if value.path else {"callable": repr(value)}
    if callable(value):
        return {"callable": getattr(value, "__qualname__", type(value).__qualname__)}
    return value


def _knowledge(path: str | PathLike[str], saved: Mapping[str, Any]) -> Knowledge:
    knowledge = Knowledge.load(saved["knowledge"])
    if knowledge.digest != saved["digest"]:
        raise StateFileError(f"{path} was saved with other source knowledge than {saved['knowledge']} holds now")
    return knowledge


def _from_json(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def method_from_json(
    path: str | PathLike[str], name: str, saved: Mapping[str, Any], given: Mapping[str, Any]
) -> Method:
    """Build the saved method; a field that could not be saved must be among those given, and no other may be."""
    if name not in methods.names():
        raise StateFileError(f"{path} was saved with method {name!r}, unknown here: import what registers it")
    fields: dict[str, Any] = {}
    for field, value in saved.items():
        if isinstance(value, dict) and "callable" in value:
            if field not in given:
                raise StateFileError(
                    f"{path} was saved with a custom {field} ({value['callable']}), which a file cannot hold: "
                    f"load(path, model, {field}=...)"
                )
            fields[field] = given[field]
        elif field in given:
            raise StateFileError(f"{path} holds {field}={value!r} already; only what could not be saved can be given")
        elif isinstance(value, dict) and "knowledge" in value:
            fields[field] = _knowledge(path, value)
        elif isinstance(value, dict) and "augment" in value:
            ranges: dict[str, Any] = {k: _from_json(v) for k, v in value["augment"].items()}
            fields[field] = Augment(**ranges)
        else:
            fields[field] = _from_json(value)
    if unknown := sorted(given.keys() - saved.keys()):
        raise TypeError(f"{name} has no field {unknown[0]!r}")
    try:
        return methods.create(name, **fields)
    except (TypeError, ValueError) as error:
        raise StateFileError(f"{path} holds settings that {name} does not take here: {error}") from error
