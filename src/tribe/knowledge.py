"""Source knowledge: what some methods must know of the source data, computed once and kept in a file.

No method reads training data while it adapts. A method that needs facts about it (`Method.needs` says which) computes
them beforehand from labelled source images, and gets the result as a field:

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
from typing import Any

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.state import hash_tensors
from tribe.core.validation import good_images
from tribe.io import tensors as tensor_file

FOLDER = "source"  # of source knowledge, in the root of the data
SHIPPED = Path(__file__).parent / "data" / "models" / "shipped"  # knowledge for the network in the package


class KnowledgeError(tensor_file.TensorFileError):
    """Source knowledge that is missing or cannot be used, and why."""


KNOWLEDGE = tensor_file.Kind(
    "tribe-source",
    2,
    {"method": str, "network": str, "spec": dict},
    noun="file of source knowledge",
    advice="`tribe source` makes one",
    error=KnowledgeError,
)


@dataclass(frozen=True, eq=False)
class Knowledge:
    """Named tensors, the method and network they belong to, and how they were made. Never changed."""

    method: str  # the name of the method that can read them
    tensors: Mapping[str, Tensor]
    network: str  # Backbone.fingerprint(exact=False) of the network they belong to
    spec: Mapping[str, Any] = field(default_factory=dict)  # how they were made: data set, images, ...
    path: str | None = None  # the file they came from

    @cached_property
    def digest(self) -> str:
        """A hash of the tensors; their order does not matter."""
        return hash_tensors(dict(sorted(self.tensors.items())))

    @cached_property
    def _placed(self) -> dict[tuple[torch.device, torch.dtype], dict[str, Tensor]]:
        return {}

    def on(self, net: Backbone) -> dict[str, Tensor]:
        """Return the tensors on a network's device in its precision; moved once."""
        place = net.device, net.origin.state.affine.weight.dtype
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
        """Read a file that `save` wrote; KnowledgeError says why if it cannot be read."""
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
        return self  # it is never changed, and may be large

    def __repr__(self) -> str:
        return f"Knowledge({self.method}, {self.digest[:12]}{'' if self.path is None else f', {self.path}'})"


KnowledgeLike = Knowledge | str | PathLike[str] | None  # values of a method's field `knowledge`


def resolve_knowledge(method: Any) -> None:
    """Load the file that a method's field ``knowledge`` names, and refuse knowledge of another method."""
    value: KnowledgeLike = getattr(method, "knowledge", None)
    if value is None:
        return
    if not isinstance(value, (Knowledge, str, PathLike)):
        raise KnowledgeError(
            f"knowledge of {method.name} is the path of a file that tribe source {method.name} wrote, or what its "
            f"study returns; got {value!r}"
        )
    knowledge = value if isinstance(value, Knowledge) else Knowledge.load(value)
    if knowledge.method != method.name:
        raise KnowledgeError(f"{knowledge!r} was made for {knowledge.method}; {method.name} needs {method.needs}")
    object.__setattr__(method, "knowledge", knowledge)


def checked_tensors(method: Any, net: Backbone, shapes: Mapping[str, Sequence[int | str]]) -> dict[str, Tensor]:
    """Return a method's source knowledge on the network's device; refused if it is missing or does not fit the network.

    A letter in the ``shapes`` of tensors that it must hold stands for one size, the same in all shapes.
    """
    knowledge = getattr(method, "knowledge", None)
    if not isinstance(knowledge, Knowledge):
        raise KnowledgeError(
            f"{method.name} needs {method.needs}, computed once from source images: tribe source {method.name} --model "
            f"... --dataset ... writes it to a file for knowledge=FILE (in Python: {method.name}.study)"
        )
    if knowledge.network != net.fingerprint(exact=False):
        made_from = ", ".join(f"{k} {v}" for k, v in knowledge.spec.items() if isinstance(v, str))
        raise KnowledgeError(
            f"{knowledge!r} belongs to another network ({made_from or 'unnamed'}): its weights differ from this one's. "
            f"Make it again with tribe source {method.name}"
        )
    tensors, sizes = knowledge.on(net), dict[str, int]()
    for name, shape in shapes.items():
        if problem := _problem(tensors.get(name), shape, sizes):
            raise KnowledgeError(
                f"{knowledge!r} holds {problem} as {name}; expected finite numbers, {_text(shape)}. Make it again with "
                f"tribe source {method.name}"
            )
    return tensors


def _problem(t: Tensor | None, shape: Sequence[int | str], sizes: dict[str, int]) -> str | None:
    """Return what a tensor is instead of finite numbers of a shape; the first tensor with a letter sets that size."""
    if t is None:
        return "nothing"
    wanted = [sizes.setdefault(n, size) if isinstance(n, str) else n for n, size in zip(shape, t.shape, strict=False)]
    if len(shape) != t.dim() or wanted != list(t.shape):
        return f"a tensor of shape {_text(t.shape)}"
    return None if bool(t.isfinite().all()) else "values that are not finite"


def _text(shape: Sequence[int | str]) -> str:
    return f"({', '.join(map(str, shape))})"


def study_batches(
    net: Backbone, batches: Iterable[tuple[Tensor, Tensor | None]]
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield source images (1, B, ...) and labels (1, B) on the network's device, for `study`, without bad images.

    Labels may be None: most methods use the network's own predictions.
    """
    for x, y in batches:
        if not x.is_floating_point():
            hint = "images.float() / 255" if x.dtype == torch.uint8 else "images.float()"
            raise TypeError(f"source images are {x.dtype}; expected floating point, as for training: {hint}")
        if y is not None and (y.shape != x.shape[:1] or y.is_floating_point() or bool((y < 0).any())):
            raise ValueError(
                f"labels are one class number, 0 or more, for each of {len(x)} source images; got {y.dtype} of shape "
                f"{tuple(y.shape)}{f', {y.min().item()} the smallest' if y.numel() else ''}"
            )
        x = x.to(net.device, net.dtype)
        good = good_images(x, 1)
        if bool(good.any()):
            yield x[good].unsqueeze(0), None if y is None else y.to(net.device)[good].long().unsqueeze(0)


def require_labels(y: Tensor | None, logits: Tensor) -> Tensor:
    """Return the labels of images with logits (..., K); refused if there are none, or if one is not below K."""
    if y is None:
        raise ValueError("source images came without labels; expected one class number for each image")
    if bool((y >= logits.shape[-1]).any()):
        raise ValueError(f"the network has {logits.shape[-1]} classes, numbered from 0; a label is {int(y.max())}")
    return y


def find_knowledge(
    method: str, model: str, dataset: str, root: str | PathLike[str], fields: Mapping[str, Any] | None = None
) -> Path | None:
    """Return the file of a method's source knowledge, in the folder of `tribe source` or in the package; None: no file.

    All fields in its name must be among ``fields``; the file with the most wins.
    """
    path, suffixes = knowledge_path(method, model, dataset, root), set(_suffixes(fields or {}))
    files = (file for folder in (path.parent, SHIPPED) for file in (folder / path.name, *folder.glob(f"{path.stem}+*")))
    fitting = [file for file in files if file.is_file() and suffixes.issuperset(file.stem.split("+")[1:])]
    return max(fitting, key=lambda file: file.stem.count("+"), default=None)


def knowledge_path(
    method: str, model: str, dataset: str, root: str | PathLike[str], fields: Mapping[str, Any] | None = None
) -> Path:
    """Where `tribe source` writes a method's source knowledge; ``fields`` are those that shape it, if not the defaults.

    >>> knowledge_path("eata", "timm/resnet50", "imagenet", "data").as_posix()
    'data/source/eata_timm_resnet50_imagenet.safetensors'
    >>> knowledge_path("ttac", "compact", "mnist", "data", {"statistics": "frozen"}).name
    'ttac_compact_mnist+statistics=frozen.safetensors'
    """
    name = "+".join((_plain(f"{method}_{model}_{dataset}"), *_suffixes(fields or {})))
    return Path(root) / FOLDER / f"{name}.safetensors"


def _suffixes(fields: Mapping[str, Any]) -> list[str]:
    return [f"{name}={_plain(str(value))}" for name, value in sorted(fields.items())]


def _plain(text: str) -> str:
    return re.sub(r"[^\w.@-]+", "_", text)
