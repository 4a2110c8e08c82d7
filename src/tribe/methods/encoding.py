"""The fields of a component as plain data, and back: one encoding for experiments, records and state files."""

import dataclasses
import json
import reprlib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from tribe.core.augment import Augment
from tribe.io.states import STATE, StateFileError
from tribe.knowledge import Knowledge, KnowledgeError
from tribe.methods import AnyMethod, Pipeline, classes_of, create, get, get_fields


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


# Nothing that a file names is opened or imported: it could name any file of this machine.


def require_savable(method: AnyMethod) -> None:
    """Raise if no file can hold the method's state."""
    if method.not_savable_because is not None:
        raise ValueError(f"{method.name}: {method.not_savable_because}")


def method_for_file(method: AnyMethod) -> dict[str, Any]:
    """Return the fields of a method as a state file holds them: source knowledge also has the name of its file."""
    require_savable(method)
    fields = encode_fields(method)
    for name, known in get_fields(method).items():
        if isinstance(known, Knowledge):
            with_name = {"knowledge": Path(known.path or "knowledge").name, "digest": known.digest}
            fields[name] = with_name
    return fields


def check_settings(source: str | PathLike[str], name: str, saved: Mapping[str, Any], method: AnyMethod) -> None:
    """Raise unless a state file was saved with this method and these settings. No method is built from the file.

    A callable, which no file can hold, is taken for that of ``method``.
    """
    if name != method.name:
        raise StateFileError(f"{source} was saved with method {name[:80]!r}; here {method.name!r} runs")
    mine = json.loads(json.dumps(method_for_file(method)))
    defaults = {field.name: field.default for part in Pipeline.of(method).parts for field in dataclasses.fields(part)}
    for field in sorted(saved.keys() | mine.keys()):
        if field not in mine:
            raise StateFileError(f"{source} was saved with a field {field[:80]!r}, which {name!r} does not have here")
        own = mine[field]
        given = saved[field] if field in saved else json.loads(json.dumps(_encode(defaults[field]), default=str))
        if _setting(given) != _setting(own):
            shown, here = (reprlib.repr(value) for value in (given, own))
            raise StateFileError(f"{source} was saved with {field}={shown}; here {field}={here}")


def _setting(value: Any) -> Any:
    """Return the part of a saved value that decides: of source knowledge its digest, of a callable that it is one."""
    if isinstance(value, dict) and "knowledge" in value:
        return "knowledge", value.get("digest")
    return "callable" if isinstance(value, dict) and "callable" in value else value


def method_from_file(
    path: str | PathLike[str], name: str, saved: Mapping[str, Any], given: Mapping[str, Any]
) -> AnyMethod:
    """Build the method of a state file.

    A field that could not be saved must be among ``given``, and no other may be. Source knowledge must be, too: its
    digest identifies it.
    """
    try:
        get(name)
    except ValueError as error:
        raise StateFileError(
            f"{path} was saved with method {name!r}, unknown here: import what registers it"
        ) from error
    fields: dict[str, Any] = {}
    opened = {
        field.name for cls in classes_of(name) for field in dataclasses.fields(cls) if "Knowledge" in str(field.type)
    }
    for field, value in saved.items():
        if isinstance(value, dict) and "callable" in value:
            if field not in given:
                raise StateFileError(
                    f"{path} was saved with a custom {field} ({value['callable']}), which a file cannot hold: "
                    f"load(path, model, {field}=...)"
                )
            fields[field] = given[field]
        elif isinstance(value, dict) and "knowledge" in value:
            fields[field] = _knowledge(path, field, value, given.get(field))
        elif field in given:
            words = f"{path} holds {field}={reprlib.repr(value)} already"
            raise StateFileError(f"{words}; only what could not be saved can be given")
        elif field in opened and value is not None:
            raise StateFileError(f"{path} is damaged: its {field} is not source knowledge as a file holds it")
        else:
            fields[field] = value
    if unknown := sorted(given.keys() - saved.keys()):
        raise TypeError(f"{name} has no field {unknown[0]!r}")
    try:
        decoded = {field: value if field in given else decode_value(value) for field, value in fields.items()}
        return create(name, **decoded)
    except (TypeError, ValueError, RecursionError) as error:
        raise StateFileError(f"{path} holds settings that {name} does not take here: {error}") from error


def _knowledge(path: str | PathLike[str], field: str, saved: Mapping[str, Any], given: Any) -> Knowledge:
    """Return the source knowledge that a state was saved with, from ``given``."""
    if not all(isinstance(saved.get(name), str) for name in ("knowledge", "digest")):
        raise StateFileError(f"{path} is damaged: its source knowledge has no name or no digest. {STATE.advice}")
    kind = f"source knowledge {saved['digest'][:12]} from {saved['knowledge'][:200]}"
    if given is None:
        words = f"was saved with {kind}, which is not opened because a file names it"
        raise StateFileError(f"{path} {words}: give it, load(path, model, {field}=FILE)")
    try:
        knowledge = given if isinstance(given, Knowledge) else Knowledge.load(given)
    except KnowledgeError as error:
        raise StateFileError(f"{path} was saved with {kind}: {error}. {field}=FILE gives it") from error
    if knowledge.digest != saved["digest"]:
        raise StateFileError(
            f"{path} was saved with {kind}; {given} holds {knowledge.digest[:12]}. {field}=FILE gives the right one"
        )
    return knowledge
