"""A spec is plain data in nested mappings, and what it says has a place there, such as ``scenario.fields.sigma``."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any


def by_place(spec: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """All that a spec says.

    >>> by_place({"batch": 64, "scenario": {"name": "gli-f", "fields": {"sigma": 0.1}}})
    {'batch': 64, 'scenario.name': 'gli-f', 'scenario.fields.sigma': 0.1}
    """
    found: dict[str, Any] = {}
    for name, value in spec.items():
        found |= by_place(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The places where two specs differ, and what each says there: None, too, where one says nothing at all.

    >>> list(differences({"batch": 64, "scenario": {"sigma": 0.1}}, {"batch": 64, "scenario": {"sigma": 0.2}}))
    [('scenario.sigma', 0.1, 0.2)]
    >>> list(differences({"knowledge": {"digest": "5f"}}, {"knowledge": None, "code": None}))
    [('code', None, None), ('knowledge', {'digest': '5f'}, None)]
    """
    for name in sorted(one.keys() | other.keys()):
        a, b = one.get(name), other.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from differences(a, b, f"{prefix}{name}.")
        elif a != b or (name in one) != (name in other):
            yield f"{prefix}{name}", a, b


def plain(value: Any) -> Any:
    """Turn a value into what JSON can hold; what it cannot becomes null (not finite) or its repr.

    >>> plain({"a": (1, math.nan), "b": math})["a"]
    [1, None]
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else repr(value)
