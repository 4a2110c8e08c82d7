"""A method's fields as plain data, and back: one encoding for state files, records and experiments."""

import dataclasses
from collections.abc import Mapping
from os import PathLike
from typing import Any

from tribe.engine.augment import Augment
from tribe.knowledge import Knowledge, KnowledgeError
from tribe.methods.base import Method, registry
from tribe.storage.states import StateFileError


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


def _knowledge(path: str | PathLike[str], saved: Mapping[str, Any], given: Any) -> Knowledge:
    """The source knowledge that a state was saved with, from where it lay then, or from what is given."""
    where = saved["knowledge"] if given is None else given
    moved = "If its file has moved or was renamed, say where it lies now: load(path, model, knowledge=FILE)"
    try:
        known = where if isinstance(where, Knowledge) else Knowledge.load(where)
    except KnowledgeError as error:
        raise StateFileError(
            f"{path} was saved with source knowledge from {saved['knowledge']}: {error}. {moved}"
        ) from error
    if known.digest != saved["digest"]:
        raise StateFileError(
            f"{path} was saved with source knowledge {saved['digest'][:12]} from {saved['knowledge']}; {where} holds "
            f"{known.digest[:12]}. {moved}"
        )
    return known


def _from_json(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def method_from_json(
    path: str | PathLike[str], name: str, saved: Mapping[str, Any], given: Mapping[str, Any]
) -> Method:
    """Build the saved method; a field that could not be saved must be among those given, and no other may be.

    Source knowledge may: its file can move, and its digest tells whether it is the one.
    """
    if name not in registry.names():
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
        elif isinstance(value, dict) and "knowledge" in value:
            fields[field] = _knowledge(path, value, given.get(field))
        elif field in given:
            raise StateFileError(f"{path} holds {field}={value!r} already; only what could not be saved can be given")
        elif isinstance(value, dict) and "augment" in value:
            ranges: dict[str, Any] = {k: _from_json(v) for k, v in value["augment"].items()}
            fields[field] = Augment(**ranges)
        else:
            fields[field] = _from_json(value)
    if unknown := sorted(given.keys() - saved.keys()):
        raise TypeError(f"{name} has no field {unknown[0]!r}")
    try:
        return registry.create(name, **fields)
    except (TypeError, ValueError) as error:
        raise StateFileError(f"{path} holds settings that {name} does not take here: {error}") from error
