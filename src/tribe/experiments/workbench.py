"""A workbench builds components by name: data sets, scenarios, networks and methods, with the fields they are given.

What cannot be built is a ValueError (or TypeError, OSError) that says why.
"""

import copy
import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from tribe import methods
from tribe.core.backbone import Backbone
from tribe.core.precision import choose_device
from tribe.data import datasets, models, scenarios
from tribe.data.datasets import Dataset, fingerprint, optional
from tribe.data.datasets.files import data_root
from tribe.data.datasets.imagenet import holds_classes
from tribe.data.scenarios import Scenario
from tribe.experiments.spec import ComponentSpec, canonical
from tribe.experiments.stream import Stream
from tribe.fields import is_number, is_whole
from tribe.knowledge import Knowledge, KnowledgeError, find_knowledge, knowledge_path
from tribe.methods import AnyMethod, check_classes, get_fields, with_fields
from tribe.methods.encoding import decode_value

T = TypeVar("T")


class Parts(NamedTuple):
    """The components of an experiment, built."""

    net: Backbone  # in float32
    method: AnyMethod
    stream: Stream
    images: str  # fingerprint of the images
    weights: str  # fingerprint of the network


class MissingKnowledge(KnowledgeError):
    """Source knowledge that is missing or cannot be used: why, and the command that makes it."""

    def __init__(self, why: str, command: str) -> None:
        super().__init__(f"{why}. Here: {command}")
        self.why, self.command = why, command

    @staticmethod
    def of_all(errors: "Sequence[MissingKnowledge]") -> "MissingKnowledge":
        """Return one error for several methods."""
        whys, commands = (dict.fromkeys(texts) for texts in zip(*((e.why, e.command) for e in errors), strict=True))
        return MissingKnowledge(". ".join(whys), " && ".join(commands))


class Workbench:
    """Where experiments are computed: a device, the place of data and weights, and the components, built once.

    Args:
        data: Root of the data sets; None: $TRIBE_DATA or the cache directory.
        device: auto, cpu, cuda or cuda:1.
        weights: Files of weights by the name of the network; others lie where `tribe train` puts them.
        threads: Of a CPU; None: as many as torch takes now.
        networks: Custom networks by name, such as ``file.py:net``.
    """

    def __init__(
        self,
        data: str | PathLike[str] | None = None,
        device: str = "auto",
        weights: Mapping[str, str | PathLike[str]] | None = None,
        threads: int | None = None,
        networks: Mapping[str, torch.nn.Module] | None = None,
    ) -> None:
        if threads is not None and not is_whole(threads, least=1):
            raise ValueError(f"threads is how many a CPU computes with, at least 1; got {threads!r}")
        self.data = None if data is None else Path(data)
        self.device = choose_device(device)
        self.threads = threads or torch.get_num_threads()
        self.weights = {name: Path(path) for name, path in (weights or {}).items()}
        self.networks = dict(networks or {})
        self._built: dict[str, Any] = {}

    def build(
        self,
        dataset: ComponentSpec,
        model: ComponentSpec,
        scenario: ComponentSpec,
        method: ComponentSpec,
        seeds: Sequence[int] = (0,),
        batch: int = 64,
    ) -> Parts:
        """Build the components of an experiment, or say why it cannot be done."""
        try:
            data, place = self.dataset(dataset), [dataset.name, dataset.fields]
            stream = self._once(  # experiments with the same data, scenario and seeds share it
                [*place, scenario.name, scenario.fields, list(seeds), batch],
                lambda: Stream(data, build_scenario(scenario.name, scenario.fields), seeds, batch),
            )
            trained = [model.name, model.fields, trained_on(data), optional(data, "outputs")]
            net = self._once(trained, lambda: self.network(model.name, data, model.fields))
            weights = self._once(["weights", *trained], net.fingerprint)
            adapting = self._once(
                [*place, model.name, model.fields, id(methods.get(method.name)), method.name, method.fields],
                lambda: self.method(method.name, net, data, model.name, method.fields),
            )
            images = self._once(["images", *place], lambda: fingerprint(data))
            return Parts(net, adapting, stream, images, weights)
        except TypeError as error:  # a field that a component does not have
            raise ValueError(str(error)) from error

    def dataset(self, spec: ComponentSpec) -> Dataset:
        """Return a data set, opened once."""
        return self._once([spec.name, spec.fields], lambda: build_dataset(spec.name, self.data, spec.fields))

    def network(self, name: str, data: Dataset, fields: Mapping[str, Any]) -> Backbone:
        """Return a network on the device, with its weights and the outputs that are the classes of the data set.

        It is a custom one, or has the weights of ``weights``, of its library or of the data set.
        """
        path, given = self.weights.get(name), {field: decode_value(value) for field, value in fields.items()}
        if name in self.networks:
            model = self.networks[name]
        elif path is None and name.startswith(("timm/", "torchvision/")):
            model = models.create(name, pretrained=True, **given)
        else:
            model = models.load(name, path or models.find(name, trained_on(data), self.root(data)), **given)
        model = model.to(self.device)
        return restrict(model if isinstance(model, Backbone) else Backbone(model), data)

    def method(self, name: str, net: Backbone, data: Dataset, model: str, fields: Mapping[str, Any]) -> AnyMethod:
        """Return a method with its published settings for the data set and, where it needs it, its source knowledge."""
        if methods.get(name).needs is None:
            return plain_method(name, net, data, fields)
        alone = methods.parse(name).alone  # knowledge does not depend on a guard or a filter
        own = methods.field_names(alone)
        unusual = departures(alone, net, data, {field: value for field, value in fields.items() if field in own})
        if isinstance(fields.get("knowledge"), str | PathLike):
            path = fields["knowledge"]
        else:  # none, or a digest in a spec
            path = find_knowledge(alone, model, trained_on(data), self.root(data), unusual)
        try:
            method = plain_method(name, net, data, {**fields, "knowledge": path})
            method.init(net)  # refuses knowledge that is missing or belongs to another network
            knowledge, clean = get_fields(method).get("knowledge"), trained_on(data)
            images = knowledge.spec.get("dataset") if isinstance(knowledge, Knowledge) else None
            if images not in (None, clean, "folder"):
                raise KnowledgeError(f"{knowledge!r} was taken from {images}, not from {clean}")
        except KnowledgeError as error:
            raise MissingKnowledge(str(error), self._source_command(alone, data, model, unusual)) from error
        return method

    def root(self, data: Dataset | type[Dataset]) -> Path:
        """Return the root of all data: ``data``, unless it is the folder of this data set alone."""
        takes_root = "data" in getattr(data, "__dataclass_fields__", {})
        of_all = self.data is not None and takes_root and not holds_classes(self.data)
        return data_root(str(self.data) if of_all else None)

    def _once(self, key: Sequence[Any], make: Callable[[], T]) -> T:
        built: T = self._built[name] if (name := canonical(key)) in self._built else make()
        self._built[name] = built
        return built

    def _source_command(self, method: str, data: Dataset, model: str, fields: Mapping[str, Any]) -> str:
        """Return the command that makes the source knowledge of a method with these fields, where it is searched."""
        clean, words = trained_on(data), ["tribe", "source", method, "--model", model]
        if clean in datasets.names() and clean != "folder":
            words += ["--dataset", clean, *([] if self.data is None else ["--data", str(self.data)])]
        else:
            place = knowledge_path(method, model, clean, self.root(data), fields)
            words += ["--dataset", "folder", "--data", "TRAINING_IMAGES"]
            words += [] if clean == "folder" else ["--out", str(place)]
        words += ["--weights", str(self.weights[model])] if model in self.weights else []
        return shlex.join(
            words + [word for name, value in fields.items() for word in ("--set", f"{method}.{name}={value}")]
        )


def build_dataset(name: str, data: Path | None, fields: Mapping[str, Any]) -> Dataset:
    """Return a data set by name; ``data`` is the root of all of them, or the folder of this one."""
    known = getattr(datasets.get(name), "__dataclass_fields__", {})
    place = {} if data is None else {"data" if "data" in known else "root": str(data)}
    if "root" in known and "root" not in {**place, **fields}:
        raise ValueError(f"data set {name} needs its folder: --data FOLDER, or root= among its fields")
    return datasets.create(name, **{**place, **_converted([datasets.get(name)], fields)})


def build_scenario(name: str, fields: Mapping[str, Any]) -> Scenario:
    """Return a scenario by name."""
    return scenarios.create(name, **_converted([scenarios.get(name)], fields))


def restrict(net: Backbone, data: Dataset) -> Backbone:
    """Return the network with the outputs that are the classes of a data set, if it has more."""
    outputs, count = optional(data, "outputs"), net.classes
    if outputs is None or count is None or count <= max(outputs) or count == len(outputs):
        return net
    return net.restricted_to(outputs)


def plain_method(name: str, net: Backbone, data: Dataset, fields: Mapping[str, Any]) -> AnyMethod:
    """Return a method with its published settings for the data set, if there are any; without source knowledge."""
    check_classes(net, None)
    count, outputs = len(data.classes), net.classes
    if count and outputs and count != outputs:
        raise ValueError(
            f"the network has {outputs} outputs, but {trained_on(data)} has {count} classes, and does not say which "
            "outputs they are, as folders with the wnids of ImageNet do"
        )
    cls = methods.get(name)
    published = cls.presets.get(trained_on(data), {})
    given = {**published, "classes": outputs or count, **_converted(methods.classes_of(name), fields)}
    if "room" not in fields and (usual := published.get("room", getattr(cls, "room", None))) is not None:
        filled = (domain for domain in data.domains if len(data.labels(domain)))
        numbers = (data.images(domain, torch.tensor([0]))[0].numel() for domain in filled)
        given["room"] = max(usual, next(numbers, 0))  # the default is for small images
    return methods.create(name, **given)


def departures(name: str, net: Backbone, data: Dataset, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields, except source knowledge, in which a method differs from the one with no field given."""
    given = {field: value for field, value in fields.items() if field != "knowledge"}
    usual, changed = (get_fields(plain_method(name, net, data, chosen)) for chosen in ({}, given))
    return {field: changed[field] for field in given if changed[field] != usual[field]}


def in_precision(net: Backbone, method: AnyMethod, precision: str) -> tuple[Backbone, AnyMethod]:
    """Return a network, and a method that was built for it, in a precision; for bf16 a copy of the network.

    Statistics and the affine parameters of norm layers stay float32. Source knowledge describes the network before it
    is rounded; the method's copy of it names the rounded one.
    """
    if precision != "bf16":
        return net, method
    rounded = copy.deepcopy(net).to(torch.bfloat16)
    knowledge = get_fields(method).get("knowledge")
    if isinstance(knowledge, Knowledge):
        knowledge = dataclasses.replace(knowledge, network=rounded.fingerprint(exact=False))
        method = with_fields(method, knowledge=knowledge)
    return rounded, method


def trained_on(data: Dataset | type[Dataset]) -> str:
    """Return the name of the clean data set behind a corrupted one: the data that a source network was trained on."""
    return str(optional(data, "clean_name") or optional(data, "name") or type(data).__name__)


def _converted(components: Sequence[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields in the types that components take, from what people write, or from a spec."""
    types = {name: kind for component in components for name, kind in get_type_hints(component).items()}
    return {name: _convert(types.get(name), decode_value(value)) for name, value in fields.items()}


def _convert(wanted: Any, value: Any) -> Any:
    """Return a value of a field's type: true, false and none in any case; a sequence from one value, or from text.

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
        texts = [str(item) if is_number(item) else item for item in (value if isinstance(value, tuple) else [value])]
        value = tuple(texts) if isinstance(value, tuple) else texts[0]
    if type(value) in kinds or (type(value),) not in several:
        return value
    return tuple(word.strip() for word in value.split(",") if word.strip()) if isinstance(value, str) else (value,)
