"""Read JSON from elsewhere: bounded in size, and checked against a schema before it is used.

A schema is plain data:

    str, bool, dict, list, object    a value of this type; ``object`` is any value
    int, float                       an integer; a finite number, which may be an integer. Booleans are neither
    None                             null
    {"fog", "snow"}                  one of these values
    (str, None)                      any of these schemas
    [int]                            a list, each item of this schema
    {"images": int, "code?": str}    an object with these keys, "code" may be missing; other keys are permitted
    {...: float}                     an object, each value of this schema
    Where(int, is_seed, "a seed")    a schema and a condition

>>> check({"seeds": [{"images": "many"}]}, {"seeds": [{"images": int}]}, "metrics.json")
Traceback (most recent call last):
ValueError: metrics.json is damaged: seeds.0.images is 'many'; expected an integer
"""

import json
import reprlib
from collections.abc import Callable
from os import PathLike
from typing import Any, NamedTuple

from tribe.fields import is_number, is_whole
from tribe.io.files import NotRegular, read_regular

MOST_BYTES = 32 * 2**20  # of a document

Schema = Any  # as above


class Where(NamedTuple):
    """A schema whose values also meet a condition."""

    schema: Schema
    holds: Callable[[Any], bool]
    expected: str  # describes the condition


class SchemaMismatch(Exception):
    """A value that is not of its schema."""

    def __init__(self, place: tuple[str, ...], expected: str, shown: str) -> None:
        self.place, self.expected, self.shown = place, expected, shown


def read(path: str | PathLike[str], schema: Schema, advice: str = "") -> Any:
    """Return the value in a JSON file, checked; ``advice`` is what to do about a file that cannot be used."""
    try:
        content = read_regular(path, MOST_BYTES)
    except NotRegular as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    return parse(content, schema, str(path), advice)


def parse(content: bytes | str, schema: Schema, place: str, advice: str = "") -> Any:
    """Return the value in a JSON text, checked; ``place`` is what messages call the text."""

    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        text = f"{place} is damaged: it is not JSON, or it was cut short ({reason})"
        raise ValueError(f"{text}. {advice}" if advice else text) from None
    return check(value, schema, place, advice)


def check(value: Any, schema: Schema, place: str, advice: str = "") -> Any:
    """Return the value if it is of the schema; else raise a ValueError that names the first place that is not."""
    try:
        _check(value, schema, ())
    except SchemaMismatch as error:
        name = ".".join(error.place) or "it"
        text = f"{place} is damaged: {name} is {error.shown}; expected {error.expected}"
        raise ValueError(f"{text}. {advice}" if advice else text) from None
    return value


TYPES: dict[Any, tuple[str, Callable[[Any], bool]]] = {  # what messages call a type, and whether a value is of it
    str: ("text", lambda value: isinstance(value, str)),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    dict: ("an object", lambda value: isinstance(value, dict)),
    list: ("a list", lambda value: isinstance(value, list)),
    int: ("an integer", is_whole),
    float: ("a finite number", is_number),
    None: ("null", lambda value: value is None),
    object: ("a value", lambda value: True),
}


def _check(value: Any, schema: Schema, place: tuple[str, ...]) -> None:
    """Raise a `SchemaMismatch` for the first part of a value that is not of its schema."""
    expected, holds = _kind(schema)
    if isinstance(schema, Where):
        _check(value, schema.schema, place)
    elif isinstance(schema, tuple):
        deepest = SchemaMismatch(place, expected, _shown(value))
        for one in schema:
            try:
                return _check(value, one, place)
            except SchemaMismatch as error:
                deepest = max(deepest, error, key=lambda mismatch: len(mismatch.place))
        raise deepest
    if not holds(value):
        raise SchemaMismatch(place, expected, _shown(value))
    if isinstance(schema, dict):
        for name, item in value.items() if ... in schema else ():
            _check(item, schema[...], (*place, name if len(name) <= 40 and name.isprintable() else _shown(name)))
        for key, inner in schema.items():
            if key is not ... and (name := key.removesuffix("?")) in value:
                _check(value[name], inner, (*place, name))
            elif key is not ... and name == key:
                raise SchemaMismatch((*place, name), _kind(inner)[0], "missing")
    elif isinstance(schema, list):
        for i, item in enumerate(value):
            _check(item, schema[0], (*place, str(i)))


def _kind(schema: Schema) -> tuple[str, Callable[[Any], bool]]:
    """Return what messages call a schema, and the test whether a value is of it, its parts aside."""
    if isinstance(schema, Where):
        return schema.expected, schema.holds
    if isinstance(schema, tuple):
        kinds = [_kind(one) for one in schema]
        return " or ".join(expected for expected, _ in kinds), lambda value: any(holds(value) for _, holds in kinds)
    if isinstance(schema, set | frozenset):
        same = " or ".join(sorted(map(repr, schema)))
        return same, lambda value: any(type(value) is type(one) and value == one for one in schema)
    return TYPES[type(schema) if isinstance(schema, dict | list) else schema]


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"{TYPES[type(value)][0]} of {len(value)}"
    return reprlib.repr(value)
