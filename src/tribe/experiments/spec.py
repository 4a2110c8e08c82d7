"""A spec is plain data: all that a result depends on. A value in it has a place, such as ``scenario.fields.sigma``."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tribe.data import scenarios
from tribe.data.datasets import NOT_IN_SPECS, optional
from tribe.experiments.provenance import code_of
from tribe.methods import Method, Pipeline
from tribe.methods.encoding import encode_fields


@dataclass(frozen=True)
class ComponentSpec:
    """A component: its name in the registry, and its fields as plain data."""

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    code: str | None = None  # hash of custom code, see tribe.experiments.provenance; None: it is part of tribe

    def json(self) -> dict[str, Any]:
        """Return the spec as plain data."""
        return {"name": self.name, "fields": self.fields} | ({} if self.code is None else {"code": self.code})


def describe(name: str, component: Any, strict: bool = True) -> ComponentSpec:
    """Return the spec of a data set, scenario or method, by its name in the registry.

    With ``strict``, a field that JSON cannot hold, or custom code in no file, is refused. Otherwise such a field
    becomes its repr, and such code is left out.
    """
    fields = encode_fields(component) if dataclasses.is_dataclass(component) else {}
    if not isinstance(component, Method | Pipeline):
        fields = {key: value for key, value in fields.items() if key not in NOT_IN_SPECS}
    parts = component.parts if isinstance(component, Pipeline) else (component,)
    functions = [function for part in parts for function in optional(part, "functions")]
    code = code_of(*map(type, parts), *functions, strict=strict)
    if not strict:
        return ComponentSpec(name, plain(fields), code)
    for key, value in fields.items():
        if isinstance(value, dict) and "callable" in value:
            raise ValueError(f"{name}.{key} is {value['callable']}, which JSON cannot hold: give plain data")
    return ComponentSpec(name, json.loads(json.dumps(fields, allow_nan=False)), code)


def same_for_all_seeds(scenario: Any) -> str | None:
    """Return why a scenario of a spec plays one stream for all seeds; None if it does not, or is unknown here.

    >>> same_for_all_seeds({"name": "replay", "fields": {}})
    "the stream is the order of the files; only order='random' depends on the seed"
    >>> same_for_all_seeds({"name": "replay", "fields": {"order": "random"}}), same_for_all_seeds("gli-f")
    (None, None)
    """
    name, fields = (scenario.get("name"), scenario.get("fields")) if isinstance(scenario, Mapping) else (scenario, {})
    if name not in scenarios.registry.names() or (isinstance(fields, Mapping) and fields.get("order") == "random"):
        return None
    return scenarios.registry.get(name).same_for_all_seeds


def canonical(value: Any) -> str:
    """Return the one JSON text of plain data: equal texts, equal data. Ids are hashes of it.

    >>> canonical({"b": 100.0, "a": (0.9, 1.0)})
    '{"a":[0.9,1],"b":100}'
    """
    return json.dumps(with_whole_numbers(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def with_whole_numbers(value: Any) -> Any:
    """Return plain data in which a number without a fraction is an integer: 100 and 100.0 mean the same."""
    if isinstance(value, Mapping):
        return {key: with_whole_numbers(field) for key, field in value.items()}
    if isinstance(value, list | tuple):
        return [with_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it; a number that is not finite becomes null, any other object its repr.

    >>> plain({"a": (1, math.nan)})
    {'a': [1, None]}
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


def by_place(spec: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return all values of a spec by their place.

    >>> by_place({"batch": 64, "scenario": {"name": "gli-f", "fields": {"sigma": 0.1}}})
    {'batch': 64, 'scenario.name': 'gli-f', 'scenario.fields.sigma': 0.1}
    """
    values: dict[str, Any] = {}
    for name, value in spec.items():
        values |= by_place(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return values


def differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the places where two specs differ, with both values; None also where a spec lacks the place.

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
