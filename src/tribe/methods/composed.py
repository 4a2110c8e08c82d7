"""A method with something around it: a time filter after it, a guard over it. Its fields are those of both.

``tribe+guard+time`` names TRIBE under a guard, with a filter after that. `compose` makes a class for each pair.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from tribe.core.backbone import Backbone
from tribe.core.rng import Key
from tribe.core.state import Info
from tribe.knowledge import Knowledge
from tribe.methods.method import Deployed, Method

SHARED = (  # what a composed method has in common with the method alone
    "output", "per_class", "presets", "small", "variants", "added", "eager_only", "in_segments", "needs", "works_on",
    "does_not_adapt",
)  # fmt: skip


class Wrapper(NamedTuple):
    """What a name after a plus stands for: ``tribe+guard``."""

    base: type["Composed"]
    part: type[Any]


wrappers: dict[str, Wrapper] = {}  # by name; time filters have a registry of their own


@dataclass(frozen=True)
class Composed(Method):
    """A method and a part: a frozen dataclass of settings. `compose` makes a subclass for each pair."""

    inner_class: ClassVar[Any]  # set by `compose`
    part_class: ClassVar[Any]

    def __post_init__(self) -> None:
        inner, part = (
            cls(**{field.name: getattr(self, field.name) for field in dataclasses.fields(cls)})
            for cls in (self.build_inner(), self.part_class)
        )
        for built in (inner, part):  # a field that was None, or given by path, has its value now
            for field in dataclasses.fields(built):
                object.__setattr__(self, field.name, getattr(built, field.name))
        object.__setattr__(self, "_parts", (inner, part))

    @classmethod
    def build_inner(cls) -> type[Method]:
        """The class of the method inside."""
        inner: type[Method] = cls.inner_class
        return inner

    @classmethod
    def classes_of(cls) -> tuple[type[Any], ...]:
        """The classes of the method alone and of all that is around it."""
        inner = cls.inner_class
        return (*(inner.classes_of() if issubclass(inner, Composed) else (inner,)), cls.part_class)

    @property
    def inner(self) -> Method:
        """The method alone."""
        method: Method = self._parts[0]  # type: ignore[attr-defined]
        return method

    @property
    def part(self) -> Any:
        """The part alone."""
        return self._parts[1]  # type: ignore[attr-defined]

    @property
    def functions(self) -> tuple[type[Any], ...]:
        """As the method alone: classes whose code a result depends on, besides those of the method and the part."""
        return getattr(self.inner, "functions", ())

    def study(self, net: Backbone, batches: Any) -> Knowledge:
        """As the method alone."""
        return self.inner.study(net, batches)

    def deployed(self, net: Backbone, state: Any) -> Deployed:
        """The network of the method alone."""
        return self.inner.deployed(net, state.inner)

    def recast(self, net: Backbone, state: Any) -> Any:
        """As the method alone."""
        return state._replace(inner=self.inner.recast(net, state.inner))

    @classmethod
    def around(cls, method: Method, part: Any) -> Self:
        """A method and a part that are built already, as one."""
        both = (method, part)
        fields = {field.name: getattr(built, field.name) for built in both for field in dataclasses.fields(built)}
        made: Self = compose(cls, type(method), type(part))(**fields)  # type: ignore[assignment, arg-type]
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy: no module holds the class, so it is made again from the classes of its parts."""
        layers, cls = [], type(self)
        while issubclass(cls, Composed):
            layers.append((cls.__bases__[0], cls.part_class))
            cls = cls.inner_class
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return _make_again, (cls, layers[::-1], fields)


class ComposedState:
    """What the state of a composed method, a named tuple with a field ``inner``, says of the method alone."""

    inner: Any

    @property
    def key(self) -> Key:
        """The method's seeds and clocks."""
        key: Key = self.inner.key
        return key

    @property
    def info(self) -> Info:
        """The method's report."""
        info: Info = self.inner.info
        return info


def _make_again(cls: Any, layers: Any, fields: dict[str, Any]) -> Any:
    """The method that `Composed.__reduce__` describes."""
    for base, part in layers:
        cls = compose(base, cls, part)
    return cls(**fields)


@functools.cache
def compose(base: type[Composed], method: type[Method], part: type[Any]) -> type[Method]:
    """The class of a method with a part around it: its fields are those of both."""
    own, added = ([*dataclasses.fields(cls)] for cls in (method, part))
    reserved = {name for name in ("inner", "part", *vars(base)) if not name.startswith("_")}
    if taken := {field.name for field in (*own, *added)} & reserved:
        raise TypeError(f"{method.name}+{part.name} has a field {sorted(taken)[0]!r}: rename it")
    if both := {field.name for field in own} & {field.name for field in added}:
        raise TypeError(
            f"{method.name} and {part.name!r} both have a field {sorted(both)[0]!r}: rename the one of "
            f"{method.__name__}"
        )

    shared = {name: getattr(method, name) for name in SHARED}
    shared["not_exportable_because"] = base.not_exportable_because or method.not_exportable_because
    shared["small"] = {**method.small, **getattr(part, "small", {})}
    # A custom method's file counts among the code that a result depends on: see tribe.experiments.provenance.
    names = {"__module__": method.__module__, "__doc__": f"{_summary(method)} Then: {_summary(part)}"}
    names |= {"name": f"{method.name}+{part.name}", "paper": f"{method.paper}; {part.paper}"}
    fields = [(field.name, field.type, _copy(field)) for field in (*own, *added)]
    cls: type[Method] = dataclasses.make_dataclass(
        f"{method.__name__}{part.__name__}",
        fields,
        bases=(base,),
        namespace={**shared, **names, "inner_class": method, "part_class": part},
        frozen=True,
    )
    cls.reuses_memory = method.reuses_memory  # step has the argument for every method
    return cls


def _copy(field: Any) -> Any:
    """A new dataclass field with the same default: a field belongs to one class."""
    options = {name: getattr(field, name) for name in ("default", "default_factory")}
    return dataclasses.field(**options)


def _summary(component: type[Any]) -> str:
    return (component.__doc__ or component.__name__).strip().partition("\n")[0]
