"""The names of methods and pipelines, such as ``selftrain/bn+st+guard+time``: parsed here and nowhere else.

A name is that of a method, then a slash and a variant if it has one, then a plus and a guard, then a plus and a filter.
A variant may have a plus in its name: what the last parts mean is looked up.
"""

import dataclasses
from typing import Any, NamedTuple

from tribe.filters import registry as filters
from tribe.methods.method import Method, registry
from tribe.methods.pipeline import AnyMethod, Pipeline, guards
from tribe.registry import build, nearest

names = registry.names


class ParsedName(NamedTuple):
    """The parts of a name."""

    method: str
    variant: str | None
    guard: str | None
    filter: str | None

    @property
    def alone(self) -> str:
        """The name of the method or of its variant, without guard and filter."""
        return self.method if self.variant is None else f"{self.method}/{self.variant}"

    @property
    def unfiltered(self) -> str:
        """The name without the filter."""
        return "+".join(part for part in (self.alone, self.guard) if part is not None)

    @property
    def suffix(self) -> str:
        """The guard and the filter as they stand in the name: "+guard+time"."""
        return "".join(f"+{part}" for part in (self.guard, self.filter) if part is not None)


def parse(name: str) -> ParsedName:
    """Split a name into its parts; the method need not be registered.

    >>> parse("selftrain/bn+st+guard+time")
    ParsedName(method='selftrain', variant='bn+st', guard='guard', filter='time')
    >>> parse("tribe+time").unfiltered
    'tribe'
    """
    rest, _, last = name.rpartition("+")
    filter_name = last if last in filters.names() else None
    rest = name if filter_name is None else rest
    first, _, last = rest.rpartition("+")
    guard = last if last in guards.names() else None
    method, slash, variant = (rest if guard is None else first).partition("/")
    return ParsedName(method, variant if slash else None, guard, filter_name)


def variants() -> list[str]:
    """Return the named settings of all methods, such as "selftrain/fixmatch"."""
    return [f"{name}/{variant}" for name in names() for variant in registry.get(name).variants]


def get(name: str) -> type[Method]:
    """Return the class of the method in a name.

    Raises:
        ValueError: the name has an unknown part, or its parts are in another order.

    >>> get("tribe+time").__name__
    'Tribe'
    """
    parsed = parse(name)
    first, plus, rest = parsed.method.partition("+")
    if plus and first in names():  # tribe+tiem
        _refuse_rest(name, rest.split("+"))
    cls = registry.get(parsed.method)
    if parsed.variant is not None and parsed.variant not in cls.variants:
        last = parsed.variant.rpartition("+")[2]
        if last in guards.names() or last in filters.names():
            _refuse_rest(name, [last])
        raise ValueError(f"{parsed.method} has no variant {parsed.variant!r}: {nearest(parsed.variant, cls.variants)}")
    return cls


def _refuse_rest(name: str, parts: list[str]) -> None:
    """Raise ValueError for what comes after a method's name."""
    known = [*guards.names(), *filters.names()]
    for part in parts:
        if part not in known:
            raise ValueError(f"unknown guard or time filter {part!r}: {nearest(part, known)}")
    raise ValueError(f"{name!r} names two guards or two filters, or a guard after a filter: a time filter comes last")


def classes_of(name: str) -> tuple[type[Any], ...]:
    """Return the classes of the method, the guard and the filter in a name."""
    parsed, cls = parse(name), get(name)
    guard = () if parsed.guard is None else (guards.get(parsed.guard),)
    return cls, *guard, *(() if parsed.filter is None else (filters.get(parsed.filter),))


def field_names(name: str) -> set[str]:
    """Return the names of the fields that `create` takes for a name."""
    return {field.name for cls in classes_of(name) for field in dataclasses.fields(cls) if field.init}


def create(name: str, **fields: Any) -> AnyMethod:
    """Build a method, or a pipeline, from its name and its fields; each part takes the fields that it has.

    >>> create("selftrain/robust-bn", classes=10).learning
    False
    >>> create("source+time", within="batch").filter.within
    'batch'
    """
    parsed, cls = parse(name), get(name)
    fields = {**cls.variants.get(parsed.variant or "", {}), **fields}
    known = field_names(name)
    for field in fields:
        if field not in known:
            raise TypeError(f"method {name!r} has no field {field!r}: {nearest(field, known)}")
    method = build(cls, registry.kind, _fields_for(cls, fields))
    if parsed.guard is None and parsed.filter is None:
        return method
    guard_cls = None if parsed.guard is None else guards.get(parsed.guard)
    filter_cls = None if parsed.filter is None else filters.get(parsed.filter)
    return Pipeline(
        method,
        None if guard_cls is None else guard_cls(**_fields_for(guard_cls, fields)),
        None if filter_cls is None else filter_cls(**_fields_for(filter_cls, fields)),
    )


def _fields_for(cls: type[Any], fields: dict[str, Any]) -> dict[str, Any]:
    own = {field.name for field in dataclasses.fields(cls) if field.init}
    return {name: value for name, value in fields.items() if name in own}
