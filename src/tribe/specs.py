"""A spec is plain data in nested mappings, and what it says has a place there, such as ``scenario.fields.sigma``."""

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
