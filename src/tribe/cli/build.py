"""What is said on the command line, read: ``owner.field=value``, severities, and networks and methods in files."""

import ast
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import tribe
from tribe import build
from tribe.backbone import Backbone
from tribe.build import Asked, departures, described, in_precision, plain_method, ready, scenario, trained_on
from tribe.cli.targets import from_file, from_package, load_target, told
from tribe.datasets import Dataset
from tribe.methods import Method, registry
from tribe.registry import nearest

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
    return [own_method(word) if ":" in word else word]


def own_method(target: str) -> str:
    """The name of the method class that ``package.module:Class`` or ``file.py:Class`` is; registered if it is not."""
    place, _, attribute = target.rpartition(":")
    file = Path(place) if place.endswith(".py") else None
    if not place or not attribute:
        raise ValueError(f"{target!r} names no method: expected package.module:Class or path/to/file.py:Class")
    if file is not None and not file.is_file():
        raise ValueError(f"no file at {file}")
    try:
        module = from_package(place) if file is None else from_file(file)
        found = operator.attrgetter(attribute)(module)
    except (Exception, SystemExit) as error:  # importing runs code that may raise anything
        raise ValueError(f"importing {target} failed: {told(error)}") from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ValueError(f"{target} is no method: expected a subclass of tribe.methods.Method; see CONTRIBUTING")
    name = next((name for name in registry.names() if registry.get(name) is found), None)
    if name is None:
        name = attribute.rpartition(".")[2].lower()
        registry.register(name)(found)
    return name


__all__ = [
    "Asked",
    "Settings",
    "dataset",
    "departures",
    "described",
    "in_precision",
    "methods",
    "network",
    "own_method",
    "plain_method",
    "ready",
    "scenario",
    "settings",
    "trained_on",
]
