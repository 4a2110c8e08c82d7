"""Source knowledge: what some methods must have seen of the source data, taken once and kept in a file.

No method reads training data while it adapts. One that needs to know something of it (`Method.needs` says what) learns
that beforehand from labelled source images, and is handed the result:

    knowledge = method.study(net, batches)          # batches of (images, labels); or: tribe source eata --model ...
    knowledge.save("eata_wrn28_10_cifar10.safetensors")
    method = tribe.methods.create("eata", classes=10, knowledge="eata_wrn28_10_cifar10.safetensors")
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tribe.engine.backbone import Backbone
from tribe.engine.screening import sound
from tribe.engine.state import hash_tensors
from tribe.storage import tensors as tensor_file

SHIPPED = Path(__file__).parent / "models" / "shipped"  # what belongs to the network that comes with the package


class Method(Protocol):
    """What this module needs of a method; `tribe.methods.Method` has it."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def needs(self) -> str | None: ...  # noqa: D102


class KnowledgeError(tensor_file.TensorFileError):
    """Source knowledge that is missing or cannot be used, and why."""


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """The digest of a file; that of schema 1 covers the tensors alone."""
    if metadata.get("schema") == "1":
        return hash_tensors(dict(sorted(tensors.items())))
    return tensor_file.content_digest(metadata, tensors)


KNOWLEDGE = tensor_file.Kind(
    "tribe-source",
    2,
    {"method": str, "network": str, "spec": dict},
    noun="file of source knowledge",
    advice="`tribe source` makes one",
    error=KnowledgeError,
    digest=_digest,
)


@dataclass(frozen=True, eq=False)
class Knowledge:
    """Named tensors, whose they are and what they were taken from. Never changed."""

    method: str  # the name of the method that can read them
    tensors: Mapping[str, Tensor]
    network: str  # Backbone.fingerprint(exact=False) of the network they belong to
    spec: Mapping[str, Any] = field(default_factory=dict)  # how they were made: data set, images, ...
    path: str | None = None  # the file they came from

    @cached_property
    def digest(self) -> str:
        """A hash of the tensors, in whatever order a file gives them back."""
        return hash_tensors(dict(sorted(self.tensors.items())))

    @cached_property
    def _placed(self) -> dict[tuple[torch.device, torch.dtype], dict[str, Tensor]]:
        return {}

    def on(self, net: Backbone) -> dict[str, Tensor]:
        """The tensors in a network's precision where it lives; moved once."""
        place = net.device, net.origin.get().affine.weight.dtype
        if place not in self._placed:
            self._placed[place] = {
                name: t.to(place[0], place[1] if t.is_floating_point() else t.dtype) for name, t in self.tensors.items()
            }
        return self._placed[place]

    def save(self, path: str | PathLike[str]) -> None:
        """Write a file, whole or not at all."""
        header = {"method": self.method, "network": self.network, "spec": dict(self.spec)}
        tensor_file.write(path, KNOWLEDGE, header, self.tensors)

    @staticmethod
    def load(path: str | PathLike[str]) -> "Knowledge":
        """Read what `save` wrote, or say why it cannot be read."""
        if not Path(path).is_file():
            raise KnowledgeError(f"no source knowledge at {path}; `tribe source` makes it")
        header, tensors = tensor_file.read(path, KNOWLEDGE)
        return Knowledge(**header, tensors=tensors, path=str(path))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Knowledge):
            return NotImplemented
        return (self.method, self.network, self.digest) == (other.method, other.network, other.digest)

    def __hash__(self) -> int:
        return hash((self.method, self.network, self.digest))

    def __deepcopy__(self, memo: object) -> "Knowledge":
        return self  # never changed, and large

    def __repr__(self) -> str:
        return f"Knowledge({self.method}, {self.digest[:12]}{'' if self.path is None else f', {self.path}'})"


KnowledgeLike = Knowledge | str | PathLike[str] | None  # what a method's field `knowledge` may be set to


def resolve_knowledge(method: Method) -> None:
    """Replace a path in a method's field ``knowledge`` by what the file holds, and refuse another method's."""
    given: KnowledgeLike = getattr(method, "knowledge", None)
    if given is None:
        return
    if not isinstance(given, (Knowledge, str, PathLike)):
        raise KnowledgeError(
            f"knowledge of {method.name} is the path of a file that tribe source {method.name} wrote, or what its "
            f"study gives; got {given!r}"
        )
    known = given if isinstance(given, Knowledge) else Knowledge.load(given)
    if known.method != method.name:
        raise KnowledgeError(f"{known!r} was made for {known.method}; {method.name} needs {method.needs}")
    object.__setattr__(method, "knowledge", known)


def checked_tensors(method: Method, net: Backbone, shapes: Mapping[str, Sequence[int | str]]) -> dict[str, Tensor]:
    """A method's source knowledge on the network's device; refused if it is missing or cannot serve this network.

    Args:
        method: whose field ``knowledge`` it is.
        net: whose knowledge it must be.
        shapes: the tensors it must hold. A letter in a shape stands for one size, the same wherever it is.
    """
    knowledge = getattr(method, "knowledge", None)
    if not isinstance(knowledge, Knowledge):
        raise KnowledgeError(
            f"{method.name} needs {method.needs}, taken once from source images: tribe source {method.name} --model "
            f"... --dataset ... writes it to a file, and knowledge=FILE hands it over (in Python: {method.name}.study)"
        )
    if knowledge.network != net.fingerprint(exact=False):
        made = ", ".join(f"{k} {v}" for k, v in knowledge.spec.items() if isinstance(v, str))
        raise KnowledgeError(
            f"{knowledge!r} belongs to another network ({made or 'unnamed'}): its weights differ from this one's. Make "
            f"it anew with tribe source {method.name}"
        )
    tensors, sizes = knowledge.on(net), dict[str, int]()
    for name, shape in shapes.items():
        if wrong := _wrong(tensors.get(name), shape, sizes):
            raise KnowledgeError(
                f"{knowledge!r} holds {wrong} as {name}; expected finite numbers, {_shown(shape)}. Make it anew with "
                f"tribe source {method.name}"
            )
    return tensors


def _wrong(t: Tensor | None, shape: Sequence[int | str], sizes: dict[str, int]) -> str | None:
    """What is found instead of finite numbers of a shape; a letter takes its size from where it first stands."""
    if t is None:
        return "nothing"
    wanted = [sizes.setdefault(n, has) if isinstance(n, str) else n for n, has in zip(shape, t.shape, strict=False)]
    if len(shape) != t.dim() or wanted != list(t.shape):
        return f"a tensor of shape {_shown(t.shape)}"
    return None if bool(t.isfinite().all()) else "values that are not finite"


def _shown(shape: Sequence[int | str]) -> str:
    return f"({', '.join(map(str, shape))})"


def study_batches(
    net: Backbone, batches: Iterable[tuple[Tensor, Tensor | None]]
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Source images (1, B, ...) and their labels (1, B) where the network lives, for `study`; bad images are left out.

    Labels may be None: most methods ask the network instead.
    """
    for x, y in batches:
        if not x.is_floating_point():
            hint = "images.float() / 255" if x.dtype == torch.uint8 else "images.float()"
            raise TypeError(
                f"source images are {x.dtype}; expected floating point, as the network was trained on: {hint}"
            )
        if y is not None and (y.shape != x.shape[:1] or y.is_floating_point() or bool((y < 0).any())):
            raise ValueError(
                f"labels are one class number, 0 or more, for each of {len(x)} source images; got {y.dtype} of shape "
                f"{tuple(y.shape)}{f', {y.min().item()} the smallest' if y.numel() else ''}"
            )
        x = x.to(net.device, net.dtype)
        good = sound(x, 1)
        if bool(good.any()):
            yield x[good].unsqueeze(0), None if y is None else y.to(net.device)[good].long().unsqueeze(0)


def require_labels(y: Tensor | None, logits: Tensor) -> Tensor:
    """The labels that logits (..., K) are to be held to; refused if there are none, or others than 0 to K - 1."""
    if y is None:
        raise ValueError("source images came without labels, and here they are needed: one class number for each image")
    if bool((y >= logits.shape[-1]).any()):
        raise ValueError(f"the network tells {logits.shape[-1]} classes apart; among the labels is {int(y.max())}")
    return y


def find_knowledge(
    method: str, model: str, dataset: str, root: str | PathLike[str], fields: Mapping[str, Any] | None = None
) -> Path | None:
    """Where the source knowledge of a method lies: where `tribe source` puts it, or in the package; None: nowhere.

    Of several files, that which most of the method's fields shaped, and no others.
    """
    own, marks = knowledge_path(method, model, dataset, root), set(_marks(fields or {}))
    there = (path for folder in (own.parent, SHIPPED) for path in (folder / own.name, *folder.glob(f"{own.stem}+*")))
    fitting = [path for path in there if path.is_file() and marks.issuperset(path.stem.split("+")[1:])]
    return max(fitting, key=lambda path: path.stem.count("+"), default=None)


def knowledge_path(
    method: str, model: str, dataset: str, root: str | PathLike[str], fields: Mapping[str, Any] | None = None
) -> Path:
    """Where `tribe source` puts a method's source knowledge; ``fields`` shaped it and are not what they usually are.

    >>> knowledge_path("eata", "timm/resnet50", "imagenet", "data").as_posix()
    'data/source/eata_timm_resnet50_imagenet.safetensors'
    >>> knowledge_path("ttac", "compact", "mnist", "data", {"statistics": "frozen"}).name
    'ttac_compact_mnist+statistics=frozen.safetensors'
    """
    name = "+".join((_plain(f"{method}_{model}_{dataset}"), *_marks(fields or {})))
    return Path(root) / "source" / f"{name}.safetensors"


def _marks(fields: Mapping[str, Any]) -> list[str]:
    return [f"{name}={_plain(str(value))}" for name, value in sorted(fields.items())]


def _plain(text: str) -> str:
    return re.sub(r"[^\w.@-]+", "_", text)
