"""The labels of methods in a report: a name, and the fields that differ from the published ones for the data set."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from tribe import methods
from tribe.data import datasets
from tribe.fields import is_number
from tribe.methods.encoding import decode_value, encode_fields

Fields = Mapping[str, Any]
CHOSEN = ("classes", "knowledge")  # fields of a method that `tribe run` sets by itself
ROOM = "room"  # a field that `tribe run` raises for larger images


def is_known(method: str | None) -> bool:
    """Whether this is a method, or a variant of one, that is registered here; with a time filter or without."""
    return method is not None and methods.parse(method).method in methods.names()


def component(value: Any) -> tuple[str | None, Fields]:
    """Return name and fields of a component in a spec; (None, {}) where its form is unknown."""
    if isinstance(value, str):
        return value, {}
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        fields = value.get("fields")
        return value["name"], fields if isinstance(fields, Mapping) else {}
    return None, {}


def departures(spec: Fields) -> dict[str, Any]:
    """Return the fields in which a spec's method differs from what `tribe run` chooses for the data set.

    Fields that follow from others, as TRIBE's details follow from its convention, are left out.
    """
    (name, fields), (data, _) = component(spec.get("method")), component(spec.get("dataset"))
    given = {key: value for key, value in fields.items() if key not in CHOSEN}
    usual = _built(name, data, fields, {})
    if ROOM in usual and is_number(given.get(ROOM)) and given[ROOM] >= usual[ROOM]:
        del given[ROOM]
    overrides = _differing(given, usual)
    for key in list(overrides):
        others = {other: value for other, value in overrides.items() if other != key}
        nested = {other for other, value in others.items() if isinstance(value, Mapping)}  # no command sets these
        if _differing(given, _built(name, data, fields, others)).keys() <= nested:
            overrides = others
    return overrides


def _built(name: str | None, data: str | None, fields: Fields, overrides: Fields) -> dict[str, Any]:
    """Return the fields of a method with some overrides; none if it cannot be built here."""
    if name is None or not is_known(name):
        return {}
    dataset = datasets.get(data) if data in datasets.names() else None
    clean = datasets.optional(dataset, "clean_name") or data
    given = {**methods.get(name).presets.get(str(clean), {}), "classes": fields.get("classes"), **overrides}
    try:
        method = methods.create(name, **{k: decode_value(v) for k, v in given.items() if not isinstance(v, Mapping)})
    except (ValueError, TypeError, AttributeError, ArithmeticError):  # no run has had such fields
        return {}
    plain: dict[str, Any] = json.loads(json.dumps(encode_fields(method), default=_fields_of))
    return plain


def _differing(fields: Fields, usual: Fields) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in usual or usual[key] != value}


def _fields_of(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else repr(value)
