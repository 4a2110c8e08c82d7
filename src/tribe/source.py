"""Source knowledge: what some methods must have seen of the source data, taken once and kept in a file.

No method reads training data while it adapts. One that needs to know something of it (`Method.needs` says what) learns
that beforehand from labelled source images, and is handed the result:

    knowledge = method.study(net, batches)          # batches of (images, labels); or: tribe source eata --model ...
    knowledge.save("eata_wrn28_10_cifar10.safetensors")
    method = tribe.methods.create("eata", classes=10, knowledge="eata_wrn28_10_cifar10.safetensors")
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from tribe.atomic import write_atomically
from tribe.backbone import Backbone
from tribe.state import hash_tensors

if TYPE_CHECKING:
    from tribe.methods.base import Method

FORMAT, SCHEMA = "tribe-source", 1
SHIPPED = Path(__file__).parent / "models" / "shipped"  # what belongs to the network that comes with the package


class KnowledgeError(ValueError):
    """Source knowledge that is missing or cannot be used, and why."""


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
        words = {"format": FORMAT, "schema": str(SCHEMA), "method": self.method, "network": self.network}
        words["digest"] = self.digest
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.tensors.items()}
        write_atomically(path, to_bytes(tensors, words | {"spec": json.dumps(dict(self.spec))}))

    @staticmethod
    def load(path: str | PathLike[str]) -> "Knowledge":
        """Read what `save` wrote, or say why it cannot be read."""
        if not Path(path).is_file():
            raise KnowledgeError(f"no source knowledge at {path}; `tribe source` makes it")
        try:
            with safe_open(path, framework="pt") as file:
                words = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise KnowledgeError(f"{path} is no source knowledge, or it was cut short ({error})") from error
        if words.get("format") != FORMAT or not words.get("schema", "").isdigit() or int(words["schema"]) > SCHEMA:
            raise KnowledgeError(f"{path} is no source knowledge that this version reads; `tribe source` makes it")
        try:
            known = Knowledge(words["method"], tensors, words["network"], json.loads(words["spec"]), str(path))
            whole = words["digest"] == known.digest
        except (KeyError, ValueError):
            whole = False
        if not whole:
            raise KnowledgeError(
                f"{path} is damaged: its numbers are not those that were saved. `tribe source` makes it"
            )
        return known

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


Given = Knowledge | str | PathLike[str] | None  # what a method's field `knowledge` may be set to


def settle(method: "Method") -> None:
    """Replace a path in a method's field ``knowledge`` by what the file holds, and refuse another method's."""
    given: Given = getattr(method, "knowledge", None)
    if given is None:
        return
    known = given if isinstance(given, Knowledge) else Knowledge.load(given)
    if known.method != method.name:
        raise KnowledgeError(f"{known!r} was made for {known.method}; {method.name} needs {method.needs}")
    object.__setattr__(method, "knowledge", known)


def known(method: "Method", net: Backbone) -> dict[str, Tensor]:
    """A method's source knowledge on the network's device; refused if it is missing or of another network."""
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
    return knowledge.on(net)


def find(method: str, model: str, dataset: str, root: str | PathLike[str]) -> Path | None:
    """Where the source knowledge of a method lies: where `tribe source` puts it, or in the package; None: nowhere."""
    own = place(method, model, dataset, root)
    return next((path for path in (own, SHIPPED / own.name) if path.is_file()), None)


def place(method: str, model: str, dataset: str, root: str | PathLike[str]) -> Path:
    """Where `tribe source` puts a method's source knowledge.

    >>> place("eata", "timm/resnet50", "imagenet", "data").as_posix()
    'data/source/eata_timm_resnet50_imagenet.safetensors'
    """
    return Path(root) / "source" / (re.sub(r"[^\w.@-]+", "_", f"{method}_{model}_{dataset}") + ".safetensors")
