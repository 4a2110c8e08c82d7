"""A workbench builds components by name: data sets, scenarios, networks and methods, with the fields they are given.

It knows where data and weights are and which device computes. What cannot be built is a ValueError (or TypeError,
OSError) that says why.
"""

import copy
import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

import torch

from tribe import methods
from tribe.core.backbone import Backbone
from tribe.core.precision import choose_device
from tribe.data import datasets, models, scenarios
from tribe.data.datasets import Dataset, fingerprint, optional
from tribe.data.datasets.files import data_root
from tribe.data.datasets.imagenet import holds_classes
from tribe.data.scenarios import Scenario
from tribe.experiments.provenance import code_at, code_of
from tribe.experiments.spec import ComponentSpec, canonical, decode_fields, describe
from tribe.experiments.stream import Stream
from tribe.fields import is_number
from tribe.knowledge import Knowledge, KnowledgeError, find_knowledge, knowledge_path
from tribe.methods import AnyMethod, check_classes, get_fields, with_fields


class Components(NamedTuple):
    """The components of an experiment, built, with the names they were requested by."""

    dataset: Dataset
    net: Backbone
    scenario: Scenario
    method: AnyMethod
    images: str  # the data set's fingerprint
    weights: str  # the network's
    dataset_name: str
    model: ComponentSpec
    scenario_name: str
    method_name: str


class Workbench:
    """Where experiments are computed: a device, the place of data and weights, and a cache of what was built.

    Args:
        data: root of the data sets; None: $TRIBE_DATA or the cache directory.
        device: auto, cpu, cuda or cuda:1.
        weights: files of weights by the name of the network; others lie where `tribe train` puts them.
        threads: that a CPU computes with; None: as many as torch takes now.
        networks: custom networks by name, such as ``file.py:net``.
    """

    def __init__(
        self,
        data: str | PathLike[str] | None = None,
        device: str = "auto",
        weights: Mapping[str, str | PathLike[str]] | None = None,
        threads: int | None = None,
        networks: Mapping[str, torch.nn.Module] | None = None,
    ) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads is how many a CPU computes with, at least 1; got {threads}")
        self.data = None if data is None else Path(data)
        self.device = choose_device(device)
        self.threads = threads or torch.get_num_threads()
        self.weights = {name: Path(path) for name, path in (weights or {}).items()}
        self.networks = dict(networks or {})
        self._datasets: dict[str, Dataset] = {}  # by name and fields, and by name, fields of a spec and fingerprint
        self._images: dict[int, str] = {}  # by the id of the data set
        self._nets: dict[str, tuple[Backbone, str]] = {}
        self._methods: dict[tuple[object, ...], AnyMethod] = {}
        self._streams: dict[str, Stream] = {}

    def prepare(
        self,
        dataset: ComponentSpec,
        model: ComponentSpec,
        scenario: ComponentSpec,
        method: ComponentSpec,
        *,
        images: str | None = None,
    ) -> Components:
        """Build the components of an experiment, or say why it cannot be done; ``images``: see `dataset`."""
        try:
            data = self.dataset(dataset, images)
            request = Request(dataset.name, model.name, self.weights.get(model.name), self.data)
            net, weights = self.net(request, data, model)
            protocol = build_scenario(scenario.name, decode_fields(scenario.fields))
            protocol = protocol if protocol.domains is not None else protocol.on(data.domains)
            adapting = self.method(request, data, net, model, method)
            names = dataset.name, model, scenario.name, method.name
            return Components(data, net, protocol, adapting, self._fingerprint(dataset.name, data), weights, *names)
        except TypeError as error:  # a field that a component does not have
            raise ValueError(str(error)) from error

    def dataset(self, spec: ComponentSpec, images: str | None = None) -> Dataset:
        """A data set, opened once.

        The spec of an experiment does not say in which folder the images are. ``images`` is their fingerprint: of the
        data sets with this spec that were opened before, it selects the one with these images.
        """
        key = canonical([spec.name, spec.fields, images])
        if images is None or key not in self._datasets:
            key = canonical([spec.name, spec.fields])
        if key not in self._datasets:
            data = self._datasets[key] = build_dataset(spec.name, self.data, decode_fields(spec.fields))
            described = describe(spec.name, data, strict=False)  # as an experiment names it, with every default
            self._datasets.setdefault(canonical([spec.name, described.fields]), data)
        return self._datasets[key]

    def fingerprint(self, spec: ComponentSpec) -> str:
        """The fingerprint of a data set's images, computed once."""
        return self._fingerprint(spec.name, self.dataset(spec))

    def _fingerprint(self, name: str, data: Dataset) -> str:
        if id(data) not in self._images:
            images = self._images[id(data)] = fingerprint(data)
            described = describe(name, data, strict=False)
            self._datasets.setdefault(canonical([name, described.fields, images]), data)
        return self._images[id(data)]

    def net(self, request: "Request", data: Dataset, spec: ComponentSpec) -> tuple[Backbone, str]:
        """A network on the device, read once, and its fingerprint, which takes a while."""
        key = canonical([spec.name, spec.fields, trained_on(data, request.dataset), optional(data, "outputs")])
        if key not in self._nets:
            model = self.networks.get(spec.name)
            model = build_model(request, data, decode_fields(spec.fields)) if model is None else model
            model = model.to(self.device)
            net = restrict(model if isinstance(model, Backbone) else Backbone(model), data)
            self._nets[key] = net, net.fingerprint()
        return self._nets[key]

    def method(
        self, request: "Request", data: Dataset, net: Backbone, model: ComponentSpec, spec: ComponentSpec
    ) -> AnyMethod:
        """A method, built once: it takes long to read its source knowledge and to check it against the network."""

        def key(fields: Mapping[str, Any]) -> tuple[object, ...]:
            return id(data), methods.get(spec.name), canonical([model.name, model.fields, spec.name, fields])

        if key(spec.fields) not in self._methods:
            method = build_method(spec.name, net, data, request, decode_fields(spec.fields))
            self._methods[key(spec.fields)] = method
            described = describe(spec.name, method, strict=False)  # as an experiment names it, with every default
            self._methods.setdefault(key(described.fields), method)
        return self._methods[key(spec.fields)]

    def stream(
        self,
        dataset: ComponentSpec,
        scenario: ComponentSpec,
        seeds: Sequence[int] = (0,),
        batch: int = 64,
        images: str | None = None,
    ) -> Stream:
        """Streams of a data set, made once: experiments with the same data, scenario and seeds share them.

        ``images``: see `dataset`.
        """
        key = canonical([dataset.json(), scenario.json(), list(seeds), batch, images])
        if key not in self._streams:
            protocol = build_scenario(scenario.name, decode_fields(scenario.fields))
            self._streams[key] = Stream(self.dataset(dataset, images), protocol, seeds, batch)
        return self._streams[key]


# -- one component ----------------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """The names of a data set and a network, and where their files are."""

    dataset: str
    model: str
    weights: Path | None = None
    data: Path | None = None

    @property
    def root(self) -> Path:
        """The root of all data, which ``data`` is unless it is the folder of this data set alone."""
        of_all = self.data is not None and "data" in _fields(self.dataset) and not holds_classes(self.data)
        return data_root(str(self.data) if of_all else None)


class MissingKnowledge(KnowledgeError):
    """A method whose source knowledge is missing or cannot be used: why, and the command that makes it."""

    def __init__(self, why: str, command: str) -> None:
        super().__init__(f"{why}. Here: {command}")
        self.why, self.command = why, command

    @staticmethod
    def of_all(errors: "Sequence[MissingKnowledge]") -> "MissingKnowledge":
        """One error for several methods."""
        whys, commands = (dict.fromkeys(texts) for texts in zip(*((e.why, e.command) for e in errors), strict=True))
        return MissingKnowledge(". ".join(whys), " && ".join(commands))


def build_dataset(name: str, data: Path | None, fields: Mapping[str, Any]) -> Dataset:
    """A data set by name; ``data`` is the root of all of them, or the folder of this one."""
    place = {} if data is None else {"data" if "data" in _fields(name) else "root": str(data)}
    if "root" in _fields(name) and "root" not in {**place, **fields}:
        raise ValueError(f"data set {name} needs its folder: --data FOLDER, or root= among its fields")
    return datasets.create(name, **{**place, **_converted([datasets.get(name)], fields)})


def build_scenario(name: str, fields: Mapping[str, Any]) -> Scenario:
    """A scenario by name."""
    return scenarios.create(name, **_converted([scenarios.get(name)], fields))


def build_model(request: Request, data: Dataset, fields: Mapping[str, Any]) -> torch.nn.Module:
    """A network with weights: those of the request, else those of its library, else those found for the data set."""
    weights = request.weights
    if weights is None and request.model.startswith(("timm/", "torchvision/")):
        return models.create(request.model, pretrained=True, **fields)
    if weights is None:
        weights = models.find(request.model, trained_on(data, request.dataset), request.root)
    return models.load(request.model, weights, **fields)


def restrict(net: Backbone, data: Dataset) -> Backbone:
    """The network with the outputs that are the classes of a data set, if it tells more classes apart."""
    outputs, known = optional(data, "outputs"), net.classes
    if outputs is None or known is None or known <= max(outputs) or known == len(outputs):
        return net
    return net.restricted_to(outputs)


def build_method(name: str, net: Backbone, data: Dataset, request: Request, fields: Mapping[str, Any]) -> AnyMethod:
    """A method with its published settings for the data set and, where it needs it, its source knowledge."""
    if methods.get(name).needs is None:
        return plain_method(name, net, data, request.dataset, fields)
    clean, alone = trained_on(data, request.dataset), methods.parse(name).alone  # the method needs knowledge alone
    own = methods.field_names(alone)
    given = {field: value for field, value in fields.items() if field in own}
    unusual = departures(alone, net, data, request.dataset, given)
    path = find_knowledge(alone, request.model, clean, request.root, unusual)
    try:
        method = plain_method(name, net, data, request.dataset, {"knowledge": path, **fields})
        method.init(net)  # refuses knowledge that is missing or belongs to another network
        _check_knowledge(method, clean)
    except KnowledgeError as error:
        raise MissingKnowledge(str(error), _source_command(alone, clean, request, unusual)) from error
    return method


def plain_method(name: str, net: Backbone, data: Dataset, dataset: str, fields: Mapping[str, Any]) -> AnyMethod:
    """A method with its published settings for the data set, if there are any."""
    check_classes(net, None)
    known, outputs = len(data.classes), net.classes
    if known and outputs and known != outputs:
        raise ValueError(
            f"the network tells {outputs} classes apart, but {dataset} has {known}, and does not say which outputs "
            "they are, as folders with the wnids of ImageNet do"
        )
    cls = methods.get(name)
    published = cls.presets.get(trained_on(data, dataset), {})
    given = {**published, "classes": outputs or known, **_converted(methods.classes_of(name), fields)}
    if "room" not in fields and (usual := published.get("room", getattr(cls, "room", None))) is not None:
        given["room"] = max(usual, _values(data))  # the default is for small images
    return methods.create(name, **given)


def departures(name: str, net: Backbone, data: Dataset, dataset: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, but for source knowledge, in which a method differs from the one without any given field."""
    given = {field: value for field, value in fields.items() if field != "knowledge"}
    usual, changed = (get_fields(plain_method(name, net, data, dataset, chosen)) for chosen in ({}, given))
    return {field: changed[field] for field in given if changed[field] != usual[field]}


def in_precision(net: Backbone, method: AnyMethod, precision: str) -> tuple[Backbone, AnyMethod]:
    """A network, and a method that was built for it, in a precision: for bf16 a copy of the network with such weights.

    Statistics and the affine parameters of norm layers stay float32. Source knowledge describes the network before it
    is rounded; the method's copy of it names the rounded one.
    """
    if precision != "bf16":
        return net, method
    rounded = copy.deepcopy(net).to(torch.bfloat16)
    known = get_fields(method).get("knowledge")
    if isinstance(known, Knowledge):
        known = dataclasses.replace(known, network=rounded.fingerprint(exact=False))
        method = with_fields(method, knowledge=known)
    return rounded, method


def trained_on(data: Dataset, name: str) -> str:
    """The clean data set behind a corrupted one: what a source network was trained on."""
    return optional(data, "clean_name") or name


def model_code(name: str) -> str | None:
    """The hash of a network's code; None: it is part of tribe or of a library."""
    place, colon, _ = name.rpartition(":")
    return code_at(place) if colon else code_of(type(models.architecture(name)))


def _check_knowledge(method: AnyMethod, clean: str) -> None:
    """Refuse knowledge of other images than the network of this data set was trained on."""
    known = get_fields(method).get("knowledge")
    images = known.spec.get("dataset") if isinstance(known, Knowledge) else None
    if images is not None and images not in (clean, "folder"):
        raise KnowledgeError(f"{known!r} was taken from {images}, not from {clean}")


def _source_command(method: str, clean: str, request: Request, fields: Mapping[str, Any]) -> str:
    """The command that makes the source knowledge of a method with these fields, at the path where it is searched."""
    words = ["tribe", "source", method, "--model", request.model]
    if clean in datasets.names() and clean != "folder":
        words += ["--dataset", clean, *([] if request.data is None else ["--data", str(request.data)])]
    else:
        place = knowledge_path(method, request.model, clean, request.root, fields)
        words += ["--dataset", "folder", "--data", "TRAINING_IMAGES"]
        words += [] if clean == "folder" else ["--out", str(place)]
    words += [] if request.weights is None else ["--weights", str(request.weights)]
    return shlex.join(
        words + [word for name, value in fields.items() for word in ("--set", f"{method}.{name}={value}")]
    )


def _values(data: Dataset) -> int:
    """The number of values of an image: what a memory of images needs room for."""
    domain = next((domain for domain in data.domains if len(data.labels(domain))), None)
    return 0 if domain is None else data.images(domain, torch.tensor([0]))[0].numel()


def _converted(components: Sequence[type[Any]], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields in the types that components take, from what people write."""
    types = {field.name: field.type for component in components for field in dataclasses.fields(component)}
    return {name: _convert(types.get(name), value) for name, value in fields.items()}


def _convert(wanted: Any, value: Any) -> Any:
    """A value of a field's type: true, false and none in any case, and for a sequence one value, or words with commas.

    Numbers become text where the field, or an item of its sequence, is text.

    >>> _convert(bool | None, "false"), _convert(bool | None, "NONE"), _convert(str, "none")
    (False, None, 'none')
    >>> _convert(Sequence[str] | None, "fog,snow"), _convert(Sequence[int], 5), _convert(str, "fog,snow")
    (('fog', 'snow'), (5,), 'fog,snow')
    >>> _convert(Sequence[str] | None, (9, 8)), _convert(Sequence[str], 9), _convert(str, 2024)
    (('9', '8'), ('9',), '2024')
    """
    kinds = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)
    constants = {str(constant).lower(): constant for constant in (True, False, None) if type(constant) in kinds}
    if isinstance(value, str) and value.lower() in constants:
        return constants[value.lower()]
    several = [get_args(kind)[:1] for kind in kinds if get_origin(kind) in (Sequence, tuple)]
    if not {int, float} & set(kinds) and (str in kinds or several == [(str,)]):
        value = tuple(map(_text, value)) if isinstance(value, tuple) else _text(value)
    if type(value) in kinds or (type(value),) not in several:
        return value
    return tuple(word.strip() for word in value.split(",") if word.strip()) if isinstance(value, str) else (value,)


def _text(value: Any) -> Any:
    """A number as text; other values as they are."""
    return str(value) if is_number(value) else value


def _fields(name: str) -> set[str]:
    return {field.name for field in dataclasses.fields(datasets.get(name))}  # type: ignore[arg-type]
