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
import math
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
    return parse(read_bytes(path), schema, str(path), advice)


def read_bytes(path: str | PathLike[str]) -> bytes:
    """Return the content of a file of at most `MOST_BYTES`."""
    try:
        return read_regular(path, MOST_BYTES)
    except NotRegular as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def read_lines(path: str | PathLike[str]) -> list[bytes]:
    """Return the lines of a file with a JSON text in each; empty lines are left out."""
    return [line for line in read_bytes(path).splitlines() if line.strip()]


def parse(content: bytes | str, schema: Schema, place: str, advice: str = "", *, finite: bool = True) -> Any:
    """Return the value in a JSON text, checked.

    Args:
        content: the text.
        schema: the expected schema, see above.
        place: what error messages call the text.
        advice: what to do about a text that cannot be used.
        finite: refuse NaN and infinity, which are not JSON.

    Raises:
        ValueError: it is not JSON, or not of the schema.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        number = _finite if finite else float
        value = json.loads(text, object_pairs_hook=_unique, parse_float=number, parse_constant=number)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(
            _sentences(f"{place} is damaged: it is not JSON, or it was cut short ({reason})", advice)
        ) from None
    return check(value, schema, place, advice)


def check(value: Any, schema: Schema, place: str, advice: str = "") -> Any:
    """Return the value if it is of the schema; else raise a ValueError that names the first place that is not."""
    try:
        _check(value, schema, ())
    except SchemaMismatch as error:
        name = ".".join(error.place) or "it"
        text = f"{place} is damaged: {name} is {error.shown}; expected {error.expected}"
        raise ValueError(_sentences(text, advice)) from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an object has the same key twice")
    return value


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:20]} is not a finite number")
    return number


NAMES: dict[Any, str] = {
    str: "text",
    bool: "true or false",
    dict: "an object",
    list: "a list",
    int: "an integer",
    float: "a finite number",
    None: "null",
}


def _check(value: Any, schema: Schema, place: tuple[str, ...]) -> None:
    """Raise a `SchemaMismatch` for the first part of a value that is not of its schema."""
    if isinstance(schema, Where):
        _check(value, schema.schema, place)
    if isinstance(schema, tuple) and not isinstance(schema, Where):
        _check_any(value, schema, place)
    elif not _is(value, schema):
        raise SchemaMismatch(place, _expected(schema), _shown(value))
    elif isinstance(schema, dict):
        for name, item in value.items() if ... in schema else ():
            _check(item, schema[...], (*place, _name(name)))
        for key, inner in schema.items():
            if key is not ... and (name := key.removesuffix("?")) in value:
                _check(value[name], inner, (*place, name))
            elif key is not ... and name == key:
                raise SchemaMismatch((*place, name), _expected(inner), "missing")
    elif isinstance(schema, list):
        for i, item in enumerate(value):
            _check(item, schema[0], (*place, str(i)))


def _check_any(value: Any, schemas: tuple[Schema, ...], place: tuple[str, ...]) -> None:
    deepest = SchemaMismatch(place, _expected(schemas), _shown(value))
    for schema in schemas:
        try:
            return _check(value, schema, place)
        except SchemaMismatch as error:
            if len(error.place) > len(deepest.place):
                deepest = error
    raise deepest


def _is(value: Any, schema: Schema) -> bool:
    """Whether a value is of a schema, its parts aside."""
    if isinstance(schema, Where):
        return schema.holds(value)
    if isinstance(schema, dict | list):
        return isinstance(value, type(schema))
    if isinstance(schema, set | frozenset):
        return isinstance(value, str | int | float) and any(type(value) is type(one) and value == one for one in schema)
    if schema is int:
        return is_whole(value)
    if schema is float:
        return is_number(value)
    return value is None if schema is None else isinstance(value, schema)


def _expected(schema: Schema) -> str:
    if isinstance(schema, Where):
        return schema.expected
    if isinstance(schema, tuple):
        return " or ".join(map(_expected, schema))
    if isinstance(schema, set | frozenset):
        return " or ".join(sorted(map(repr, schema)))
    if isinstance(schema, dict | list):
        return NAMES[type(schema)]
    return NAMES.get(schema, "a value")


def _name(text: str) -> str:
    """Return a key as messages show it: short, and without characters that are not printable."""
    return text if len(text) <= 40 and text.isprintable() else _shown(text)


def _shown(value: Any) -> str:
    """Return a value as messages show it, short."""
    if isinstance(value, dict | list):
        return f"{NAMES[type(value)]} of {len(value)}"
    return reprlib.repr(value)


def _sentences(text: str, advice: str) -> str:
    return f"{text}. {advice}" if advice else text
