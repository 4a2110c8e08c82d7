"""Overrides of fields: ``--set COMPONENT.FIELD=VALUE``."""

import ast
from collections.abc import Collection, Sequence
from typing import Any

from tribe.registry import nearest

Overrides = dict[str, dict[str, Any]]  # component -> field -> value


def parse_overrides(texts: Sequence[str] | None, components: Sequence[str], plain: Collection[str] = ()) -> Overrides:
    """Return the fields of each component. A value is a Python literal; what is not a literal is a string.

    Args:
        texts: Such as ``scenario.sigma=0.01``.
        components: The names before the dot.
        plain: Names without a dot that may be set, such as ``batch``; their values are those of the component "".

    Example:
        >>> parse_overrides(["scenario.sigma=0.01", "tent.optimizer=sgd"], ["scenario", "tent", "bn"])
        {'scenario': {'sigma': 0.01}, 'tent': {'optimizer': 'sgd'}, 'bn': {}}
        >>> parse_overrides(["batch=32"], ["tent"], ["batch"])
        {'tent': {}, '': {'batch': 32}}
    """
    overrides: Overrides = {component: {} for component in components}
    overrides |= {"": {}} if plain else {}
    for text in texts or ():
        place, equals, value = text.partition("=")
        component, dot, field = place.partition(".")
        if equals and place in plain:
            component, field = "", place
        elif not (equals and dot and field):
            raise ValueError(f"--set takes COMPONENT.FIELD=VALUE, such as scenario.sigma=0.01; got {text!r}")
        if component not in overrides:
            raise ValueError(f"--set {text}: {component!r} takes no part in this run: {nearest(component, overrides)}")
        overrides[component][field] = _value(value)
    return overrides


def parse_lists(texts: Sequence[str] | None, option: str) -> dict[str, list[Any]]:
    """Return the values of each field, from ``tribe.lr=1e-4,1e-3``; commas in brackets and quotes do not count.

    >>> parse_lists(["tribe.lr=1e-4,1e-3", "dataset.corruptions=('fog','snow'),fog", "batch="], "--grid")
    {'tribe.lr': [0.0001, 0.001], 'dataset.corruptions': [('fog', 'snow'), 'fog'], 'batch': []}
    """
    lists: dict[str, list[Any]] = {}
    for text in texts or ():
        place, equals, values = text.partition("=")
        if not (equals and place.strip()):
            raise ValueError(f"{option} takes COMPONENT.FIELD=VALUE,VALUE, such as tribe.lr=1e-4,1e-3; got {text!r}")
        if place in lists:
            raise ValueError(f"{option} names {place} twice: give all its values at once, separated by commas")
        lists[place] = [_value(word) for word in _split(values) if word.strip()]
    return lists


def _value(text: str) -> Any:
    """Return a Python literal, or else the text itself."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text


def _split(text: str) -> list[str]:
    """Split at commas that are in no bracket and no quotes."""
    words, depth, quote = [""], 0, ""
    for character in text:
        if character == "," and not depth and not quote:
            words.append("")
            continue
        words[-1] += character
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
    return words
