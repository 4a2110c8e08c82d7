"""What commands are asked for by name, built: data sets, scenarios, networks, methods, and their fields."""

import ast
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tribe
from tribe import source
from tribe.cli.targets import load_target
from tribe.datasets import Dataset
from tribe.datasets.files import data_root
from tribe.methods import Method
from tribe.registry import nearest
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
    """A data set by name; ``data`` is the root of all of them, or of a folder of one's own."""
    known = {field.name for field in dataclasses.fields(tribe.datasets.get(name))}  # type: ignore[arg-type]
    given = dict(fields)
    if data is not None:
        given["data" if "data" in known else "root"] = str(data)
    if severity is not None:
        try:
            given["severities"] = tuple(int(s) for s in severity.split(","))
        except ValueError:
            raise ValueError(f"--severity is a number from 1 to 5, or several: 1,3,5; got {severity!r}") from None
    return tribe.datasets.create(name, **given)


def scenario(name: str, imbalance: float | None, fields: dict[str, Any]) -> Scenario:
    """A protocol by name."""
    given = {"imbalance": imbalance} if imbalance is not None else {}
    return tribe.scenarios.create(name, **given | fields)


def model(
    name: str, weights: Path | None, data: Dataset, dataset: str, root: Path | None, fields: dict[str, Any]
) -> torch.nn.Module:
    """A network, with weights: named ones where they lie, others as they come."""
    if ":" in name:
        own = load_target(name)
        return own if weights is None else tribe.models.load(own, weights)
    if weights is None and name.startswith(("timm/", "torchvision/")):
        return tribe.models.create(name, pretrained=True, **fields)
    if weights is None:
        weights = tribe.models.find(name, trained_on(data, dataset), data_root(None if root is None else str(root)))
    return tribe.models.load(name, weights, **fields)


class Asked(NamedTuple):
    """What a command was asked for, in its own words."""

    dataset: str
    model: str
    weights: Path | None = None
    data: Path | None = None

    @property
    def root(self) -> Path:
        """The root of all data, which ``data`` is unless the data set is a folder of one's own."""
        fields = dataclasses.fields(tribe.datasets.get(self.dataset))  # type: ignore[arg-type]
        of_all = self.data is not None and "data" in {field.name for field in fields}
        return data_root(str(self.data) if of_all else None)


def method(name: str, net: tribe.Backbone, data: Dataset, asked: Asked, fields: dict[str, Any]) -> Method:
    """A method, ready: with what was published for the data set, and with its source knowledge where it lies."""
    if tribe.methods.get(name).needs is None:
        return plain_method(name, net, data, asked.dataset, fields)
    learned = trained_on(data, asked.dataset)
    found = {"knowledge": source.find(name, asked.model, learned, asked.root)} if "knowledge" not in fields else {}
    try:
        built = plain_method(name, net, data, asked.dataset, found | fields)
        built.init(net)  # what is missing, or belongs to another network, is refused here
    except source.KnowledgeError as error:
        raise source.KnowledgeError(f"{error}. Here: {_source_command(name, learned, asked)}") from error
    return built


def _source_command(method: str, learned: str, asked: Asked) -> str:
    """The command that makes a method's source knowledge, where `method` will look for it."""
    words = ["tribe", "source", method, "--model", asked.model]
    if learned in tribe.datasets.names() and learned != "folder":
        words += ["--dataset", learned, *([] if asked.data is None else ["--data", str(asked.data)])]
    else:
        place = source.place(method, asked.model, learned, asked.root)
        words += ["--dataset", "folder", "--data", "TRAINING_IMAGES", "--out", str(place)]
    return shlex.join(words + ([] if asked.weights is None else ["--weights", str(asked.weights)]))


def plain_method(name: str, net: tribe.Backbone, data: Dataset, dataset: str, fields: dict[str, Any]) -> Method:
    """A method with what was published for the data set, where something was."""
    known, outputs = len(data.classes), net.classes
    if known and outputs and known != outputs:
        raise ValueError(f"the network tells {outputs} classes apart, but {dataset} has {known}")
    published = tribe.methods.get(name).presets.get(trained_on(data, dataset), {})
    return tribe.methods.create(name, **{**published, "classes": outputs or known, **fields})


def trained_on(data: Dataset, name: str) -> str:
    """The clean data set behind a corrupted one: what a source network was trained on."""
    return str(getattr(data, "source", name))


def described(name: str, component: Any) -> dict[str, Any]:
    """A component in plain data; where files lie is no part of it."""
    told = [field.name for field in dataclasses.fields(component) if field.name not in ("data", "root")]
    return {"name": name, "fields": {field: _told(getattr(component, field)) for field in told}}


def _told(value: Any) -> Any:
    """Source knowledge by its hash and how it was made; everything else as it is."""
    return {"digest": value.digest, **value.spec} if isinstance(value, source.Knowledge) else value
