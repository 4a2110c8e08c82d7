"""Components by name: data sets, scenarios, networks and methods, each with the fields it is asked for.

What the command line and experiments share. What cannot be built is a ValueError (or TypeError, OSError) in words.
"""

import copy
import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

import torch

from tribe import datasets, methods, models, scenarios
from tribe.datasets import Dataset
from tribe.datasets.files import data_root
from tribe.datasets.fingerprint import fingerprint
from tribe.engine.backbone import Backbone
from tribe.knowledge import Knowledge, KnowledgeError, find_knowledge, knowledge_path
from tribe.lab.provenance import code_at, code_of, coded
from tribe.lab.stream import Stream
from tribe.methods import Method
from tribe.methods.base import check_classes
from tribe.scenarios import Scenario

PLACES = ("data", "root")  # fields of a data set that say where it lies, which is no part of what it is


class Asked(NamedTuple):
    """What was asked for, in its own words."""

    dataset: str
    model: str
    weights: Path | None = None
    data: Path | None = None

    @property
    def root(self) -> Path:
        """The root of all data, which ``data`` is unless the data set is a folder of one's own."""
        of_all = self.data is not None and "data" in _fields(self.dataset)
        return data_root(str(self.data) if of_all else None)


def dataset(name: str, data: Path | None, fields: Mapping[str, Any]) -> Dataset:
    """A data set by name; ``data`` is the root of all of them, or of a folder of one's own."""
    place = {} if data is None else {"data" if "data" in _fields(name) else "root": str(data)}
    if "root" in _fields(name) and "root" not in {**place, **fields}:
        raise ValueError(f"data set {name} lies where you say: --data FOLDER, or root= among its fields")
    return datasets.create(name, **{**place, **_meant(datasets.get(name), fields)})


def scenario(name: str, imbalance: float | None, fields: Mapping[str, Any]) -> Scenario:
    """A protocol by name."""
    given = {"imbalance": imbalance} if imbalance is not None else {}
    return scenarios.create(name, **{**given, **_meant(scenarios.get(name), fields)})


def model(asked: Asked, data: Dataset, fields: Mapping[str, Any]) -> torch.nn.Module:
    """A network, with weights: named ones where they lie, others as they come."""
    weights = asked.weights
    if weights is None and asked.model.startswith(("timm/", "torchvision/")):
        return models.create(asked.model, pretrained=True, **fields)
    if weights is None:
        weights = models.find(asked.model, trained_on(data, asked.dataset), asked.root)
    return models.load(asked.model, weights, **fields)


class Unlearned(KnowledgeError):
    """A method whose source knowledge is missing or cannot be used: why, and the command that makes it."""

    def __init__(self, why: str, command: str) -> None:
        super().__init__(f"{why}. Here: {command}")
        self.why, self.command = why, command


def ready(
    names: Sequence[str], net: Backbone, data: Dataset, asked: Asked, fields: Mapping[str, Mapping[str, Any]]
) -> dict[str, Method]:
    """Methods by name, each as `method` builds it; what several of them must know first is told together."""
    built: dict[str, Method] = {}
    missing: list[Unlearned] = []
    for name in names:
        try:
            built[name] = method(name, net, data, asked, fields[name])
        except Unlearned as error:
            missing.append(error)
    if missing:
        raise Unlearned(". ".join(m.why for m in missing), " && ".join(m.command for m in missing))
    return built


def method(name: str, net: Backbone, data: Dataset, asked: Asked, fields: Mapping[str, Any]) -> Method:
    """A method, ready: with what was published for the data set, and with its source knowledge where it lies."""
    if methods.get(name).needs is None:
        return plain_method(name, net, data, asked.dataset, fields)
    learned = trained_on(data, asked.dataset)
    told = departures(name, net, data, asked.dataset, fields)
    found = find_knowledge(name, asked.model, learned, asked.root, told)
    try:
        built = plain_method(name, net, data, asked.dataset, {"knowledge": found, **fields})
        built.init(net)  # what is missing, or belongs to another network, is refused here
        _same_data(built, learned)
    except KnowledgeError as error:
        raise Unlearned(str(error), _source_command(name, learned, asked, told)) from error
    return built


def departures(name: str, net: Backbone, data: Dataset, dataset: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that make a method another than the one that is played by default, but for its source knowledge."""
    told = {field: value for field, value in fields.items() if field != "knowledge"}
    usual, own = (plain_method(name, net, data, dataset, chosen) for chosen in ({}, told))
    return {field: getattr(own, field) for field in told if getattr(own, field) != getattr(usual, field)}


def in_precision(net: Backbone, method: Method, precision: str) -> tuple[Backbone, Method]:
    """A network, and a method that was built for it, in a precision: for bf16 a copy of the network with such weights.

    Statistics and the affine parameters of norm layers stay float32. Source knowledge describes the network before it
    was rounded, and goes over to the copy.
    """
    if precision != "bf16":
        return net, method
    rounded = copy.deepcopy(net).to(torch.bfloat16)
    knowledge = getattr(method, "knowledge", None)
    if isinstance(knowledge, Knowledge):
        own = dataclasses.replace(knowledge, network=rounded.fingerprint(exact=False))
        method = dataclasses.replace(method, knowledge=own)  # type: ignore[call-arg]
    return rounded, method


def _same_data(method: Method, learned: str) -> None:
    """Refuse knowledge of other images than the network of this data set was trained on."""
    knowledge = getattr(method, "knowledge", None)
    of = knowledge.spec.get("dataset") if isinstance(knowledge, Knowledge) else None
    if of is not None and of not in (learned, "folder"):
        raise KnowledgeError(f"{knowledge!r} was taken from {of}, not from {learned}")


def _source_command(method: str, learned: str, asked: Asked, fields: Mapping[str, Any]) -> str:
    """The command that makes the source knowledge of a method with these fields, where it will be looked for."""
    words = ["tribe", "source", method, "--model", asked.model]
    if learned in datasets.names() and learned != "folder":
        words += ["--dataset", learned, *([] if asked.data is None else ["--data", str(asked.data)])]
    else:
        place = knowledge_path(method, asked.model, learned, asked.root, fields)
        words += ["--dataset", "folder", "--data", "TRAINING_IMAGES"]
        words += [] if learned == "folder" else ["--out", str(place)]
    words += [] if asked.weights is None else ["--weights", str(asked.weights)]
    return shlex.join(
        words + [word for name, value in fields.items() for word in ("--set", f"{method}.{name}={value}")]
    )


def plain_method(name: str, net: Backbone, data: Dataset, dataset: str, fields: Mapping[str, Any]) -> Method:
    """A method with what was published for the data set, where something was."""
    check_classes(net, None)
    known, outputs = len(data.classes), net.classes
    if known and outputs and known != outputs:
        raise ValueError(f"the network tells {outputs} classes apart, but {dataset} has {known}")
    cls = methods.get(name)
    published = cls.presets.get(trained_on(data, dataset), {})
    given = {**published, "classes": outputs or known, **_meant(cls, fields)}
    if "room" not in fields and (usual := published.get("room", getattr(cls, "room", None))) is not None:
        given["room"] = max(usual, _values(data))  # what is usual is for small images
    return methods.create(name, **given)


def _values(data: Dataset) -> int:
    """Of how many values an image of the data set consists: what a memory of images needs room for."""
    domain = next((domain for domain in data.domains if len(data.labels(domain))), None)
    return 0 if domain is None else data.images(domain, torch.tensor([0]))[0].numel()


def trained_on(data: Dataset, name: str) -> str:
    """The clean data set behind a corrupted one: what a source network was trained on."""
    return str(getattr(data, "clean_name", name))


def described(name: str, component: Any, strict: bool = True) -> dict[str, Any]:
    """A component in plain data; where files lie is no part of it. One that is not tribe's has its code as a hash.

    If that is in no file it is refused; not ``strict``: there is none.
    """
    known = dataclasses.fields(component) if dataclasses.is_dataclass(component) else ()
    told = [field.name for field in known if field.name not in PLACES]
    code = code_of(type(component), *getattr(component, "functions", ()), strict=strict)
    return {"name": name, "fields": {field: _told(getattr(component, field)) for field in told}, **coded(code)}


def setting(net: Backbone, stream: Stream, model: Mapping[str, Any], strict: bool = True) -> dict[str, Any]:
    """What a run is about, whatever the method: as records and folders say it, in plain data.

    ``model`` is what to say of the network beside its fingerprint; ``strict`` is as for `described`.
    """
    parts = {"dataset": stream.dataset, "scenario": stream.scenario}
    told = {n: described(getattr(part, "name", type(part).__name__), part, strict) for n, part in parts.items()}
    return {
        "dataset": told["dataset"] | {"fingerprint": fingerprint(stream.dataset)},
        "model": {**model, "fingerprint": net.fingerprint()},
        "scenario": told["scenario"],
        "batch": stream.batch,
    }


def settings_of(name: str, method: Method, strict: bool = True) -> dict[str, Any]:
    """What a run's spec says of its method beside the name: fields, and code that is not tribe's."""
    return {key: value for key, value in described(name, method, strict).items() if key != "name"}


def model_code(name: str) -> str | None:
    """The code of a network, as a hash, unless it is tribe's or a library's."""
    place, colon, _ = name.rpartition(":")
    return code_at(place) if colon else code_of(type(models.architecture(name)))


def _told(value: Any) -> Any:
    """Source knowledge by its hash and how it was made; everything else as it is."""
    return {"digest": value.digest, **value.spec} if isinstance(value, Knowledge) else value


def _meant(component: type[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as a component takes them, from what people write."""
    types = {field.name: field.type for field in dataclasses.fields(component)}
    return {name: _as_wanted(types.get(name), value) for name, value in fields.items()}


def _as_wanted(wanted: Any, value: Any) -> Any:
    """A value of a field's type: true, false and none in any case, and for a sequence one value, or words with commas.

    >>> _as_wanted(bool | None, "false"), _as_wanted(bool | None, "NONE"), _as_wanted(str, "none")
    (False, None, 'none')
    >>> _as_wanted(Sequence[str] | None, "fog,snow"), _as_wanted(Sequence[int], 5), _as_wanted(str, "fog,snow")
    (('fog', 'snow'), (5,), 'fog,snow')
    """
    kinds = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)
    constants = {str(constant).lower(): constant for constant in (True, False, None) if type(constant) in kinds}
    if isinstance(value, str) and value.lower() in constants:
        return constants[value.lower()]
    several = [get_args(kind)[:1] for kind in kinds if get_origin(kind) in (Sequence, tuple)]
    if type(value) in kinds or (type(value),) not in several:
        return value
    return tuple(word.strip() for word in value.split(",") if word.strip()) if isinstance(value, str) else (value,)


def _fields(name: str) -> set[str]:
    return {field.name for field in dataclasses.fields(datasets.get(name))}  # type: ignore[arg-type]
