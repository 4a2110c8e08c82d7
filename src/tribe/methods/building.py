"""Methods and pipelines from what a person names, such as ``selftrain/bn+st+guard+time``: parsed here and nowhere else.

A name is that of a method, then a slash and a variant if it has one, then, each after a plus: rare, a guard, a filter.
A variant may have a plus in its name: what the last parts mean is looked up.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from tribe import filters
from tribe.core.backbone import Backbone
from tribe.core.validation import check_source, warn_of_layers_left_alone
from tribe.methods.method import Method, check_fits, count_classes, registry
from tribe.methods.pipeline import AnyMethod, Pipeline, guards, with_fields
from tribe.methods.rare import Rare
from tribe.registry import nearest

names = registry.names


class ParsedName(NamedTuple):
    """The parts of a name."""

    method: str
    variant: str | None
    guard: str | None
    filter: str | None
    rare: str | None = None

    @property
    def alone(self) -> str:
        """The name of the method or of its variant, without the other parts."""
        return self.method if self.variant is None else f"{self.method}/{self.variant}"

    @property
    def unfiltered(self) -> str:
        """The name without the filter."""
        return self.alone + self._replace(filter=None).suffix

    @property
    def suffix(self) -> str:
        """The other parts as they stand in the name: "+rare+guard+time"."""
        return "".join(f"+{part}" for part in (self.rare, self.guard, self.filter) if part is not None)


def parse(name: str) -> ParsedName:
    """Split a name into its parts; the method need not be registered.

    >>> parse("selftrain/bn+st+guard+time")
    ParsedName(method='selftrain', variant='bn+st', guard='guard', filter='time', rare=None)
    >>> parse("tribe+time").unfiltered
    'tribe'
    """
    first, _, last = name.rpartition("+")
    rest, filter_name = (first, last) if last in filters.names() else (name, None)
    first, _, last = rest.rpartition("+")
    rest, guard = (first, last) if last in guards.names() else (rest, None)
    first, _, last = rest.rpartition("+")
    rest, rare = (first, last) if last == Rare.name else (rest, None)
    method, slash, variant = rest.partition("/")
    return ParsedName(method, variant if slash else None, guard, filter_name, rare)


def variants() -> list[str]:
    """Return the named settings of all methods, such as "selftrain/fixmatch"."""
    return [f"{name}/{variant}" for name in names() for variant in registry.get(name).variants]


def get(name: str) -> type[Method]:
    """Return the class of the method in a name; refuse one with an unknown part, or with parts in another order.

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
        if last in _suffixes():
            _refuse_rest(name, [last])
        raise ValueError(f"{parsed.method} has no variant {parsed.variant!r}: {nearest(parsed.variant, cls.variants)}")
    return cls


def _refuse_rest(name: str, parts: list[str]) -> None:
    """Raise ValueError for what comes after a method's name."""
    for part in parts:
        if part not in _suffixes():
            raise ValueError(f"unknown guard or time filter {part!r}: {nearest(part, _suffixes())}")
    order = f"the order is METHOD+{Rare.name}+guard+filter: a time filter comes last"
    raise ValueError(f"{name!r} names two guards or two filters, or a guard after a filter; {order}")


def _suffixes() -> list[str]:
    return [Rare.name, *guards.names(), *filters.names()]


def classes_of(name: str) -> tuple[type[Any], ...]:
    """Return the classes of the parts in a name, the method's first."""
    cls, parsed = get(name), parse(name)
    rare = () if parsed.rare is None else (Rare,)
    guard = () if parsed.guard is None else (guards.get(parsed.guard),)
    return cls, *rare, *guard, *(() if parsed.filter is None else (filters.get(parsed.filter),))


def field_names(name: str) -> set[str]:
    """Return the names of the fields that `create` takes for a name."""
    return {field for cls in classes_of(name) for field in _fields(cls)}


def _fields(cls: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.init]


def create(name: str, **fields: Any) -> AnyMethod:
    """Build a method, or a pipeline, from its name and its fields; each part takes the fields that it has.

    >>> create("selftrain/robust-bn", classes=10).learning
    False
    >>> create("source+time", within="batch").filter.within
    'batch'
    """
    cls, parsed, known = get(name), parse(name), field_names(name)
    fields = {**cls.variants.get(parsed.variant or "", {}), **fields}
    for field in fields:
        if field not in known:
            raise TypeError(f"method {name!r} has no field {field!r}: {nearest(field, known)}")

    def built(part: type[Any]) -> Any:
        return part(**{field: fields[field] for field in _fields(part) if field in fields})

    method: Method = built(cls)
    guard = None if parsed.guard is None else built(guards.get(parsed.guard))
    filter = None if parsed.filter is None else built(filters.get(parsed.filter))
    rare = None if parsed.rare is None else built(Rare)
    return Pipeline(method, guard, filter, rare) if parsed.suffix else method


# -- for a network ----------------------------------------------------------------------------------------------------


def backbone_for(model: nn.Module | Backbone, method: str | AnyMethod, alone: bool = True) -> Backbone:
    """Return the network of a method; its output may be anything if the method ignores it and is in no pipeline."""
    if isinstance(model, Backbone):
        return model
    known = get(method) if isinstance(method, str) else method
    alone = alone and not (isinstance(method, str) and parse(method).suffix)
    return Backbone(model, dense=alone and known.dense)


def build_method(
    net: Backbone,
    method: str | AnyMethod,
    time: str | filters.TimeFilter | None,
    classes: int | None,
    fields: Mapping[str, Any],
    guard: Any = None,
) -> AnyMethod:
    """Build a method by its name and fields, in a pipeline with a guard and a time filter if they are given.

    A method that is already built is used as it is. If it does not know the number of classes, it takes ``classes``.
    """
    if isinstance(method, Method | Pipeline):
        if fields:
            raise TypeError(
                f"the method is built already: tribe.methods.create({method.name!r}, ...) sets {', '.join(fields)}"
            )
        counted = method.classes is None and classes is not None
        built = with_fields(method, classes=_count(net, classes)) if counted else method
    else:
        get(method)  # report an unknown name before anything else
        built = create(method, classes=_count(net, classes), **fields)
    if guard is None and time is None:
        return built
    whole = Pipeline.of(built)
    if guard is not None and whole.guard is not None:
        guard = _calibrated(whole, guard)
    if time is not None and whole.filter is not None:
        raise ValueError(f"{whole.name} has a time filter already")
    filter = whole.filter if time is None else filters.resolve(time)
    return Pipeline(whole.method, whole.guard if guard is None else guard, filter, whole.rare)


def _calibrated(whole: Pipeline, watch: Any) -> Any:
    """Return the guard of a pipeline with the calibration of a watch; refuse a second guard or calibration."""
    if watch.acts or (watch.calibration is not None and whole.guard.calibration is not None):
        raise ValueError(f"{whole.name} has a guard, or is watched, already")
    return whole.guard if watch.calibration is None else dataclasses.replace(whole.guard, calibration=watch.calibration)


def check_network(net: Backbone, method: AnyMethod, classes: int | None = None) -> int | None:
    """Refuse a network that the method cannot adapt; otherwise the number of classes, if it is known."""
    found = _count(net, classes if classes is not None else method.classes)
    if method.classes is not None and method.classes != found:
        raise ValueError(f"the method was built for {method.classes} classes; the network has {found}")
    check_fits(net, method)
    check_source(net)
    warn_of_layers_left_alone(net)
    return found


def _count(net: Backbone, classes: int | None) -> int | None:
    """Return the number of classes; None if it is not known and the network may return something else than logits."""
    if net.dense and (classes is not None or (net.classes or 0) < 2):
        return classes
    return count_classes(net, classes)
