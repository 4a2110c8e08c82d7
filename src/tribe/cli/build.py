"""What is said on the command line, read: ``owner.field=value``, severities, and components in one's own files."""

import ast
import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tribe
from tribe.cli.targets import find_target, load_target
from tribe.datasets import Dataset
from tribe.engine.backbone import Backbone
from tribe.lab import components as build
from tribe.lab.components import Asked, departures, described, in_precision, plain_method, ready, scenario, trained_on
from tribe.methods import Method, registry
from tribe.registry import Registry, nearest
from tribe.scenarios import Scenario

Settings = dict[str, dict[str, Any]]  # component -> field -> value


def settings(given: Sequence[str], owners: Sequence[str]) -> Settings:
    """``owner.field=value`` -> fields by owner; values as Python literals, else as words."""
    found: Settings = {owner: {} for owner in owners}
    for text in given:
        place, equals, value = text.partition("=")
        owner, dot, field = place.partition(".")
        if not (equals and dot and field):
            raise ValueError(f"--set takes COMPONENT.FIELD=VALUE, such as scenario.sigma=0.01; got {text!r}")
        if owner not in found:
            raise ValueError(f"--set {text}: {owner!r} takes no part in this run: {nearest(owner, found)}")
        try:
            found[owner][field] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[owner][field] = value
    return found


def dataset(name: str, data: Path | None, severity: str | None, fields: dict[str, Any]) -> Dataset:
    """A data set by name, with the severities that ``--severity`` says."""
    given = dict(fields)
    if severity is not None:
        try:
            given["severities"] = tuple(int(s) for s in severity.split(","))
        except ValueError:
            raise ValueError(f"--severity is a number from 1 to 5, or several: 1,3,5; got {severity!r}") from None
    return build.dataset(name, data, given)


def network(
    name: str,
    weights: Path | None,
    data: Dataset,
    dataset: str,
    root: Path | None,
    fields: dict[str, Any],
    where: torch.device,
) -> Backbone:
    """A network by name, or one's own by ``file.py:attribute``, which may be a `Backbone` that names its classifier."""
    if ":" not in name:
        built = build.model(Asked(dataset, name, weights, root), data, fields)
    else:
        built = load_target(name)
        built = built if weights is None else tribe.models.load(built, weights)
    built = built.to(where)
    return built if isinstance(built, Backbone) else Backbone(built)


def methods(text: str) -> list[str]:
    """The methods of a comma-separated list: names, `all`, `ablations`, or one's own, ``file.py:Class``; + may lead."""
    words = [word.strip().removeprefix("+") for word in text.split(",")]
    return list(dict.fromkeys(name for word in words if word for name in _methods(word)))


def _methods(word: str) -> list[str]:
    if word == "ablations":
        return tribe.methods.variants()
    if word == "all":  # a method with variants is there for these; the source model opens the list
        names = [name for name in registry.names() if not registry.get(name).variants]
        return sorted(names, key=lambda name: (name != "source", name))
    return [named(METHOD, word)]


class Kind(NamedTuple):
    """A kind of component that may be one's own."""

    registry: Registry[Any]
    expected: str
    fits: Callable[[Any], bool]


def _below(base: type) -> Callable[[Any], bool]:
    return lambda found: isinstance(found, type) and issubclass(found, base) and found is not base


def _is_dataset(found: Any) -> bool:
    """Whether a class has what the protocol asks for; what is a field without a default shows in no attribute."""
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        return False
    there = {*dir(found), *(field.name for field in dataclasses.fields(found))}
    return there >= {"classes", "domains", "labels", "images"}


METHOD = Kind(registry, "a subclass of tribe.methods.Method", _below(Method))
SCENARIO = Kind(tribe.scenarios.registry, "a subclass of tribe.scenarios.Scenario", _below(Scenario))
DATASET = Kind(
    tribe.datasets.registry, "a dataclass with classes, domains, labels(domain), images(domain, index)", _is_dataset
)


def named(kind: Kind, word: str) -> str:
    """The name of a component, from its name or from ``package.module:Class`` or ``file.py:Class``.

    A class that is not registered becomes so, under its own name in small letters.
    """
    if ":" not in word:
        return word
    what = kind.registry.kind
    found = find_target(word, what, kind.fits)
    if not kind.fits(found):
        raise ValueError(f"{word} is no {what}: expected {kind.expected}; see CONTRIBUTING")
    name = next((name for name in kind.registry.names() if kind.registry.get(name) is found), None)
    if name is None:
        name = re.split("[:.]", word)[-1].lower()
        kind.registry.register(name)(found)
    return name


def refuse_unwritable(file: str | None) -> None:
    """Refuse a --json that could not be written, before the work and not after it."""
    if file in (None, "-"):
        return
    path = Path(str(file))
    if path.is_dir():
        raise ValueError(f"--json {path} is a folder; expected the path of a file")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} into")


__all__ = [
    "DATASET",
    "METHOD",
    "SCENARIO",
    "Asked",
    "Kind",
    "Settings",
    "dataset",
    "departures",
    "described",
    "in_precision",
    "methods",
    "named",
    "network",
    "plain_method",
    "ready",
    "refuse_unwritable",
    "scenario",
    "settings",
    "trained_on",
]
