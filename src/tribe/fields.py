"""Checks of values that people give: the fields of components, the options of commands. One check for each kind.

Names of files, classes, domains and methods are data, too: `printable` makes them safe to show.
"""

import dataclasses
import math
import unicodedata
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import numpy as np


class Range(NamedTuple):
    """Bounds of a number: low and high included, ``above`` and ``below`` not.

    >>> print(Range(high=1), Range(above=0), Range(above=0, high=1), Range(low=1), 1 in Range(below=1), sep=", ")
    between 0 and 1, above 0, above 0 and at most 1, at least 1, False
    """

    low: float = 0
    high: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def __contains__(self, value: Any) -> bool:
        return bool(self.low <= value <= self.high and self.above < value < self.below)

    def __str__(self) -> str:
        bounds = "not negative" if self.low == 0 else f"at least {self.low:g}"
        if self.above > -math.inf:
            bounds = f"above {self.above:g}" + (f" and at most {self.high:g}" if self.high < math.inf else "")
        elif self.high < math.inf:
            bounds = f"between {self.low:g} and {self.high:g}"
        return bounds if self.below == math.inf else f"{bounds} and below {self.below:g}"


# Types of fields with a range.
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range()]
Share = Annotated[float, Range(high=1)]
PositiveShare = Annotated[float, Range(above=0, high=1)]
Momentum = Annotated[float, Range(below=1)]
Count = Annotated[int, Range(low=1)]


def is_whole(value: Any, least: int | None = None) -> bool:
    """Return whether a value is a whole number, numpy's included, and at least ``least``; a boolean is not.

    >>> is_whole(3), is_whole(True), is_whole(3.0), is_whole(0, least=1)
    (True, False, False, False)
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool | np.bool_)
    return whole and (least is None or int(value) >= least)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number, numpy's included; a boolean is not.

    >>> is_number(0.5), is_number(math.inf), is_number(False)
    (True, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool | np.bool_) and math.isfinite(value)


def require(ok: bool, expected: str, got: Any) -> None:
    """Raise a ValueError that says what was expected and what was given.

    >>> require(is_whole(0, least=1), "batch is a whole number, at least 1", 0)
    Traceback (most recent call last):
    ValueError: batch is a whole number, at least 1; got 0
    """
    if not ok:
        raise ValueError(f"{expected}; got {got!r}")


def require_whole(component: Any, *names: str, least: int = 1) -> None:
    """Require that these fields of a component are whole numbers, each at least ``least``."""
    for name in names:
        value = getattr(component, name)
        require(is_whole(value, least), f"{name} is a whole number, at least {least}", value)


def check_fields(component: Any) -> None:
    """Check the fields of a frozen dataclass by their types: numbers and their range, truth values, fixed choices.

    It replaces numpy's numbers with Python's.
    """
    for field in dataclasses.fields(component):
        value = getattr(component, field.name)
        name = f"{field.name} of {getattr(component, 'name', type(component).__name__)}"
        options = get_args(field.type) if get_origin(field.type) in (Union, UnionType) else (field.type,)
        kinds = {get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in options}
        literal = {kind for kind in kinds if get_origin(kind) is Literal}
        choices = tuple(choice for kind in literal for choice in get_args(kind))
        named = kinds - literal == {float, tuple[str, ...]}
        if value is None and NoneType in kinds:
            continue
        if named and isinstance(value, str) and value in choices:
            continue
        if choices and not named:
            *others, last = map(repr, choices)
            valid, expected = value in choices, f"{', '.join(others)} or {last}"
        elif named and not is_number(value):
            valid = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
            expected = ", ".join(["a number or a tuple of names", *map(repr, choices)])
        elif not named and not kinds <= {bool, int, float, NoneType}:
            continue
        elif float in kinds:
            valid, expected = is_number(value), "a finite number"
        elif int in kinds:
            valid = is_whole(value) and -(2**63) <= value < 2**63
            expected = "a whole number of at most 64 bits" if is_whole(value) else "a whole number"
        else:
            valid, expected = isinstance(value, bool | np.bool_), "True or False"
        require(valid, f"{name} is {expected}", value)
        for bounds in (bounds for kind in options for bounds in getattr(kind, "__metadata__", ())):
            if isinstance(bounds, Range) and is_number(value):
                require(value in bounds, f"{name} is {bounds}", value)
    plain_numbers(component)


def plain_numbers(component: Any) -> None:
    """Replace numpy's numbers in the fields of a frozen dataclass with Python's, which files can hold."""
    for field in dataclasses.fields(component):
        value = getattr(component, field.name)
        if isinstance(value, np.generic):
            object.__setattr__(component, field.name, value.item())


def printable(text: str, keep: str = "") -> str:
    r"""Return a text that is safe to show: control, bidirectional and invisible characters become visible escapes.

    Raw, a name in a file from elsewhere could clear a terminal, rewrite what it shows, or break a page. ``keep``: such
    characters that stay, such as line breaks.

    >>> print(printable("fog"), printable("\x1b[2Jfog\u202e\n"))
    fog \x1b[2Jfog\u202e\n
    """
    if text.isprintable():
        return text
    shown = {c for c in text if c.isprintable() or unicodedata.category(c) == "Zs"} | set(keep)  # Zs: spaces
    return "".join(c if c in shown else c.encode("unicode_escape").decode() for c in text)
