"""Custom components: ``package.module:attribute`` or ``path/to/file.py:attribute`` in place of a name."""

import dataclasses
import importlib
import operator
import re
import sys
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import tribe
from tribe.data.scenarios import Scenario
from tribe.experiments.provenance import from_file
from tribe.methods import Method
from tribe.methods.bridged import Bridge, bridge_class, is_factory
from tribe.norms.named import split_text
from tribe.registry import Registry, nearest


class ComponentKind(NamedTuple):
    """A kind of component that may be custom."""

    registry: Registry[Any]
    expected: str  # for error messages
    base: type = object
    members: tuple[str, ...] = ()  # of a dataclass; a field without a default is not a class attribute

    def fits(self, found: Any) -> bool:
        """Return whether an object is a component of this kind."""
        if not isinstance(found, type) or not issubclass(found, self.base) or found is self.base:
            return False
        if not self.members or not dataclasses.is_dataclass(found):
            return not self.members
        return {*self.members} <= {*dir(found), *(field.name for field in dataclasses.fields(found))}


METHOD = ComponentKind(
    tribe.methods.registry, "a subclass of tribe.methods.Method, or a function from a network to an nn.Module", Method
)
SCENARIO = ComponentKind(tribe.scenarios.registry, "a subclass of tribe.scenarios.Scenario", Scenario)
DATASET = ComponentKind(
    tribe.datasets.registry,
    "a dataclass with classes, domains, labels(domain), images(domain, index)",
    members=("classes", "domains", "labels", "images"),
)
NORM = ComponentKind(
    tribe.norms.registry,
    "a frozen dataclass with classes, observes and __call__",
    members=("classes", "observes", "__call__"),
)


def component_name(kind: ComponentKind, text: str) -> str:
    """Return the registered name of a component, given as a name, ``package.module:Class`` or ``file.py:Class``.

    A class that is not in the registry is added, under its own name in lower case.
    """
    if ":" not in text:
        return text
    found = find_custom(text, kind.registry.kind, kind.fits)
    if kind is METHOD and is_factory(found):
        found = bridge_class(found)
    if not kind.fits(found):
        raise ValueError(f"{text} is not a {kind.registry.kind}: expected {kind.expected}; see CONTRIBUTING")
    name = next((name for name in kind.registry.names() if kind.registry.get(name) is found), None)
    if name is None:
        name = found.name if issubclass(found, Bridge) else re.split("[:.]", text)[-1].lower()
        kind.registry.register(name)(found)
    return name


def method_name(text: str) -> str:
    """Return the registered name of a method, given as a name or ``file.py:Class``; both may end in ``+guard+time``."""
    parsed = tribe.methods.parse(text)
    if ":" not in parsed.alone:
        return text
    place, _, attribute = parsed.alone.rpartition(":")
    if "+" in attribute:  # raises: it is neither a guard nor a filter
        tribe.methods.get(f"source+{attribute.partition('+')[2]}")
    return component_name(METHOD, f"{place}:{attribute}") + parsed.suffix


def norm_text(text: str) -> str:
    """Return a norm rule by its registered name, from a name or ``file.py:Class``; both may have fields in brackets."""
    place, bracket = split_text(text)
    return component_name(NORM, place) + bracket


def custom_network(target: str, weights: Path | None = None) -> nn.Module:
    """Return the module that ``file.py:attribute`` is, or returns when called; with the weights of a file, if given."""
    found = find_custom(target, "model", lambda value: isinstance(value, nn.Module) or callable(value))
    if callable(found) and not isinstance(found, nn.Module):
        try:
            found = found()
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{target} could not be called without arguments: {reason}") from error
    if not isinstance(found, nn.Module):
        raise ValueError(
            f"{target} is not a model: expected an nn.Module, or a callable that returns one: {type(found)}"
        )
    return found if weights is None else tribe.models.load(found, weights)


def is_untrained(target: str, net: nn.Module) -> bool:
    """Return whether ``file.py:attribute`` is called for a network, and gives random weights: others the next time."""
    if isinstance(find_custom(target, "model", callable), nn.Module):
        return False  # it exists, and was not called
    again = custom_network(target).state_dict()
    return any(not torch.equal(value, again[name]) for name, value in net.state_dict().items() if name in again)


def find_custom(target: str, kind: str, fits: Callable[[Any], bool]) -> Any:
    """Return the object that ``package.module:attribute`` or ``file.py:attribute`` names.

    An error message names the kind, and suggests the attributes that fit it.
    """
    place, _, attribute = target.rpartition(":")
    if not place or not attribute:
        raise ValueError(
            f"{target!r} does not name a {kind}: expected package.module:attribute or path/to/file.py:attribute"
        )
    file = Path(place) if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ValueError(f"no file at {file}")
    try:
        if file is None:
            sys.path.insert(0, "")  # the working directory, which is not on the path of an installed command
            module = importlib.import_module(place)
        else:  # each path has its own module name: pickle and dataclasses find the module of a class by this name
            module = from_file(file, f"tribe_target_{zlib.crc32(str(file.resolve()).encode()):08x}")
    except (Exception, SystemExit) as error:  # the code of the module may raise anything
        name = "" if file is None else str(file.absolute())
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
        at = f", at {file}:{lines[-1]}" if lines else ""
        raise ValueError(f"importing {place} failed: {type(error).__name__}: {error}{at}") from error
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError:
        names = [name for name, value in vars(module).items() if not name.startswith("_") and fits(value)]
        raise ValueError(f"{place} has no attribute {attribute!r}: {nearest(attribute, names)}") from None
