"""Registries: one for each kind of component. They map names to classes, and their errors list similar names."""

import dataclasses
import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the part of an error message that suggests similar names and lists all of them.

    >>> nearest("trbe", ["source", "tribe"])
    "did you mean 'tribe'? Known: source, tribe"
    >>> nearest("CoTTA", ["cotta", "source"])
    "did you mean 'cotta'? Known: cotta, source"
    """
    names = sorted(names)
    spelled = {word.lower(): word for word in names}
    close = [spelled[word] for word in difflib.get_close_matches(name.lower(), spelled, n=2, cutoff=0.5)]
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{hint}Known: {', '.join(names) or 'none'}"


def build(cls: type[T], kind: str, fields: Mapping[str, Any]) -> T:
    """Build a component from its class and its fields; an unknown field raises TypeError, with similar names."""
    names = [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    for field in fields:
        if field not in names:
            raise TypeError(f"{kind} {cls.name!r} has no field {field!r}: {nearest(field, names)}")  # type: ignore[attr-defined]
    return cls(**fields)


class Registry(Generic[T]):
    """Components of one kind, by name.

    A file in the registry's package registers its class with the decorator; nothing else needs to be edited. Where a
    module above that package registers the components, ``home`` names it, and the first look-up imports it.

    >>> shapes = Registry("shape")
    >>> @shapes.register("square")
    ... @dataclasses.dataclass(frozen=True)
    ... class Square:
    ...     side: float = 1.0
    >>> shapes.create("square", side=2.0)
    Square(side=2.0)
    >>> shapes.create("sqare")
    Traceback (most recent call last):
    ValueError: unknown shape 'sqare': did you mean 'square'? Known: square
    >>> shapes.create("square", sid=2.0)
    Traceback (most recent call last):
    TypeError: shape 'square' has no field 'sid': did you mean 'side'? Known: side
    """

    def __init__(self, kind: str, home: str | None = None) -> None:
        self.kind, self._home = kind, home
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Return a class decorator that registers a component under a name."""

        def add(cls: type[T]) -> type[T]:
            other = self._classes.get(name)
            if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"{self.kind} {name!r} is registered already, by {other.__module__}")
            self._classes[name] = cls
            cls.name = name  # type: ignore[attr-defined]
            return cls

        return add

    def names(self) -> list[str]:
        """Return all known names, sorted."""
        self._visit()
        return sorted(self._classes)

    def get(self, name: str) -> type[T]:
        """Return the class behind a name."""
        self._visit()
        if name not in self._classes:
            raise ValueError(f"unknown {self.kind} {name!r}: {nearest(str(name), self._classes)}")
        return self._classes[name]

    def create(self, name: str, **fields: Any) -> T:
        """Build a component from its name and its fields."""
        return build(self.get(name), self.kind, fields)

    def _visit(self) -> None:
        """Import the home, once."""
        if self._home is not None:
            importlib.import_module(self._home)
            self._home = None

    def load(self, package: str, path: Iterable[str]) -> None:
        """Import every module of a package, so that each can register what it holds."""
        for module in pkgutil.iter_modules(path):
            importlib.import_module(f"{package}.{module.name}")
