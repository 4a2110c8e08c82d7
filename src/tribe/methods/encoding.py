"""The fields of a component as plain data, and back: one encoding for experiments, records and state files."""

import dataclasses
from collections.abc import Mapping
from os import PathLike
from typing import Any

from tribe.core.augment import Augment
from tribe.io.states import STATE, StateFileError
from tribe.knowledge import Knowledge, KnowledgeError
from tribe.methods import AnyMethod, create, get, get_fields


def encode_fields(component: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, or of all parts of a pipeline, as plain data, which ids are hashes of.

    Source knowledge becomes ``{"knowledge": digest}``, an augmentation ``{"augment": fields}``, any other callable
    ``{"callable": name}``, since no file can hold it. All other values stay as they are.
    """
    return {name: _encode(value) for name, value in get_fields(component).items()}


def _encode(value: Any) -> Any:
    if isinstance(value, Augment):
        return {"augment": dataclasses.asdict(value)}
    if isinstance(value, Knowledge):
        return {"knowledge": value.digest}
    if callable(value):
        return {"callable": getattr(value, "__qualname__", type(value).__qualname__)}
    return value


def decode_value(value: Any) -> Any:
    """Return a value of `encode_fields` after it went through JSON; knowledge and callables stay encoded."""
    if isinstance(value, list):
        return tuple(decode_value(item) for item in value)
    if isinstance(value, dict) and value.keys() == {"augment"} and isinstance(value["augment"], dict):
        return Augment(**{name: decode_value(field) for name, field in value["augment"].items()})
    return value


# -- state files ------------------------------------------------------------------------------------------------------


def method_for_file(method: AnyMethod) -> dict[str, Any]:
    """Return the fields of a method as a state file holds them: source knowledge also has the path of its file."""
    fields = encode_fields(method)
    for name, known in get_fields(method).items():
        if isinstance(known, Knowledge):
            with_path = {"knowledge": known.path, "digest": known.digest}
            fields[name] = with_path if known.path else {"callable": repr(known)}
    return fields


def method_from_file(
    path: str | PathLike[str], name: str, saved: Mapping[str, Any], given: Mapping[str, Any]
) -> AnyMethod:
    """Build the method of a state file.

    A field that could not be saved must be among ``given``, and no other may be, except source knowledge: its file can
    move, and its digest identifies it.
    """
    try:
        get(name)
    except ValueError as error:
        raise StateFileError(
            f"{path} was saved with method {name!r}, unknown here: import what registers it"
        ) from error
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
        else:
            fields[field] = value
    if unknown := sorted(given.keys() - saved.keys()):
        raise TypeError(f"{name} has no field {unknown[0]!r}")
    try:
        decoded = {field: value if field in given else decode_value(value) for field, value in fields.items()}
        return create(name, **decoded)
    except (TypeError, ValueError) as error:
        raise StateFileError(f"{path} holds settings that {name} does not take here: {error}") from error


def _knowledge(path: str | PathLike[str], saved: Mapping[str, Any], given: Any) -> Knowledge:
    """Return the source knowledge that a state was saved with, from its saved path or from ``given``."""
    if not all(isinstance(saved.get(name), str) for name in ("knowledge", "digest")):
        raise StateFileError(f"{path} is damaged: its source knowledge has no path or no digest. {STATE.advice}")
    place = saved["knowledge"] if given is None else given
    hint = "If its file has moved or was renamed, give its new path: load(path, model, knowledge=FILE)"
    try:
        knowledge = place if isinstance(place, Knowledge) else Knowledge.load(place)
    except KnowledgeError as error:
        raise StateFileError(f"{path} was saved with knowledge from {saved['knowledge']}: {error}. {hint}") from error
    if knowledge.digest != saved["digest"]:
        raise StateFileError(
            f"{path} was saved with source knowledge {saved['digest'][:12]} from {saved['knowledge']}; {place} holds "
            f"{knowledge.digest[:12]}. {hint}"
        )
    return knowledge
