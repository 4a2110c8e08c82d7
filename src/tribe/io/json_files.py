"""Read JSON that others may have written: bounded in size and depth, and checked against a schema before it is used.

A schema is plain data:

    str, bool, dict, list, object    a value of this type; ``object`` is any value
    int, float                       an integer; a finite number, which may be an integer. No truth value is either
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
MOST_PARTS = 2**20  # objects and lists of a document: an empty one has two bytes there, and 64 in memory
MOST_LINES = 2**16  # of a file with a document in each
MOST_DEPTH = 64  # of nested objects and lists: code that walks a document may recurse
MOST_DIGITS = 20  # of an integer: 64 bits, with a sign

Schema = Any  # as above


class Where(NamedTuple):
    """A schema whose values also meet a condition."""

    schema: Schema
    holds: Callable[[Any], bool]
    expected: str  # describes the condition


def read(path: str | PathLike[str], schema: Schema, advice: str = "") -> Any:
    """Read a JSON file and check it; ``advice`` is what to do about a file that cannot be used."""
    return parse(read_bytes(path), schema, str(path), advice)


def read_bytes(path: str | PathLike[str]) -> bytes:
    """The content of a file of bounded size."""
    try:
        return read_regular(path, MOST_BYTES)
    except NotRegular as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def read_lines(path: str | PathLike[str]) -> list[bytes]:
    """The lines of a file with a JSON text in each, which is bounded as a whole; empty lines are left out."""
    content = read_bytes(path)
    _check_size(content.count(b"[") + content.count(b"{"), f"{path} holds")
    lines = [line for line in content.splitlines() if line.strip()]
    if len(lines) > MOST_LINES:
        raise ValueError(f"{path} has more than {MOST_LINES:,} lines: no file of this kind is so long")
    return lines


def parse(content: bytes | str, schema: Schema, place: str, advice: str = "", *, finite: bool = True) -> Any:
    """The value in a JSON text, checked.

    Args:
        content: the text.
        schema: what is expected, see above.
        place: what errors call the text.
        advice: what to do about a text that cannot be used.
        finite: refuse NaN and infinity, which are not JSON.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        _check_size(text.count("[") + text.count("{"), "it holds")
        number = _number if finite else float
        value = json.loads(
            text, object_pairs_hook=_object, parse_int=_integer, parse_float=number, parse_constant=number
        )
        if isinstance(value, dict | list):
            _check_depth(value)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(
            _sentences(f"{place} is damaged: it is not JSON, or it was cut short ({reason})", advice)
        ) from None
    return check(value, schema, place, advice)


def check(value: Any, schema: Schema, place: str, advice: str = "") -> Any:
    """The value, if it is of the schema; else an error names the first place inside it that is not."""
    if found := _mismatch(value, schema, ()):
        where, expected, got = found
        name = ".".join(where) or "it"
        got = "missing" if got is MISSING else _shown(got)
        raise ValueError(_sentences(f"{place} is damaged: {name} is {got}; expected {expected}", advice))
    return value


# -- text to value ----------------------------------------------------------------------------------------------------


def _check_size(parts: int, holds: str) -> None:
    if parts > MOST_PARTS:
        raise ValueError(f"{holds} more than {MOST_PARTS:,} objects and lists")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has the same key twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"an integer has {len(digits)} digits; expected at most {MOST_DIGITS}")
    return int(digits)


def _number(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:20]} is not a finite number")
    return number


def _check_depth(value: dict[str, Any] | list[Any]) -> None:
    level = [value]
    for _ in range(MOST_DEPTH):
        inner = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise ValueError(f"it is nested more than {MOST_DEPTH} levels deep")


# -- value to schema --------------------------------------------------------------------------------------------------

MISSING = object()
Mismatch = tuple[tuple[str, ...], str, Any]  # the place inside the document, what was expected there, what is there
NAMES: dict[Any, str] = {
    str: "text",
    bool: "true or false",
    dict: "an object",
    list: "a list",
    int: "an integer",
    float: "a finite number",
    None: "null",
}


def _mismatch(value: Any, schema: Schema, place: tuple[str, ...]) -> Mismatch | None:
    """The first part of a value that is not of its schema."""
    if value is MISSING:
        return place, _expected(schema), value
    if isinstance(schema, Where):
        inner = _mismatch(value, schema.schema, place)
        return inner or (None if schema.holds(value) else (place, _expected(schema), value))
    if isinstance(schema, tuple):
        found = [_mismatch(value, one, place) for one in schema]
        if not all(found):
            return None
        deepest = max((one for one in found if one), key=lambda one: len(one[0]))
        return deepest if len(deepest[0]) > len(place) else (place, _expected(schema), value)
    if isinstance(schema, dict) and isinstance(value, dict):
        return _first(_members(value, schema), place)
    if isinstance(schema, list) and isinstance(value, list):
        return _first(((str(i), item, schema[0]) for i, item in enumerate(value)), place)
    return None if _is(value, schema) else (place, _expected(schema), value)


def _members(value: dict[str, Any], schema: dict[Any, Schema]) -> Any:
    """The name, value and schema of each member of an object that has a schema."""
    if ... in schema:
        yield from ((name, item, schema[...]) for name, item in value.items())
    for key, inner in schema.items():
        if key is not ...:
            name = key.removesuffix("?")
            if name in value or name == key:
                yield name, value.get(name, MISSING), inner


def _first(members: Any, place: tuple[str, ...]) -> Mismatch | None:
    found = (_mismatch(value, schema, (*place, _name(name))) for name, value, schema in members)
    return next((one for one in found if one), None)


def _is(value: Any, schema: Schema) -> bool:
    if schema is object:
        return True
    if schema is None:
        return value is None
    if isinstance(schema, set | frozenset):
        return isinstance(value, str | int | float) and any(type(value) is type(one) and value == one for one in schema)
    if schema is int:
        return is_whole(value)
    if schema is float:
        return is_number(value)
    return isinstance(schema, type) and isinstance(value, schema)


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
    """A key in a place: short, and without characters that are not printable."""
    return text if len(text) <= 40 and text.isprintable() else _shown(text)


def _shown(value: Any) -> str:
    """A value in an error message, short."""
    if isinstance(value, dict | list):
        return f"{NAMES[type(value)]} of {len(value)}"
    return reprlib.repr(value)


def _sentences(text: str, advice: str) -> str:
    return f"{text}. {advice}" if advice else text
