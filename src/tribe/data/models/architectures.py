"""Architectures: the configuration of a network, and networks by name."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import nn

from tribe.data.models.layers import Normalization, initialize
from tribe.fields import plain_numbers, require_whole
from tribe.registry import Registry, nearest


@dataclass(frozen=True)
class Architecture(ABC):
    """The configuration of a network. Its fields are those that `create` takes; `build` makes the network."""

    classes: int = 10
    channels: int = 3
    normalize: Normalization | None = None  # applied to images in [0, 1] inside the network; None: no normalisation

    name: ClassVar[str]
    paper: ClassVar[str]
    size: ClassVar[int] = 32  # rows and columns of its images
    head: ClassVar[str] = "fc"  # the layer that returns the logits
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # well-known names, and the fields of each

    @classmethod
    def preset(cls, name: str) -> Mapping[str, Any] | None:
        """The fields of a name; None if it is not a name of this architecture."""
        return {} if name == cls.name else cls.presets.get(name)

    def __post_init__(self) -> None:
        plain_numbers(self)
        require_whole(self, "classes", "channels")
        if self.normalize is not None and {len(part) for part in self.normalize} != {self.channels}:
            raise ValueError(
                f"normalize needs a mean and a std for each of {self.channels} channels, or None for a network that "
                f"takes images in [0, 1] as they are; got {self.normalize}"
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of its images: channels, rows, columns."""
        return self.channels, self.size, self.size

    def build(self) -> nn.Module:
        """Build the network with fresh weights, in training mode."""
        return initialize(self.network())

    @abstractmethod
    def network(self) -> nn.Module:
        """Build the network, before its weights are initialised."""


registry: Registry[Architecture] = Registry("model")
register = registry.register
_FREE = {
    field.name for field in fields(Architecture)
}  # fields that may be changed for every name; others, such as depth, are fixed by it


def names() -> list[str]:
    """The names of networks, sorted. Other depths and widths, and models of timm and torchvision, have names too."""
    return sorted(name for family in registry.names() for name in registry.get(family).presets)


def architecture(name: str, **fields: Any) -> Architecture:
    """The configuration of a name; `create` builds the network.

    >>> architecture("wrn40_2", classes=100).shape
    (3, 32, 32)
    """
    for family in registry.names():
        preset = registry.get(family).preset(str(name))
        if preset is None:
            continue
        for field in (fields.keys() & preset.keys()) - _FREE:
            if fields[field] != preset[field]:
                raise TypeError(
                    f"the name {name!r} says {field}={preset[field]!r} already; use {family!r} to choose another"
                )
        return registry.create(family, **{**preset, **fields})
    families = [family for family in registry.names() if registry.get(family).presets]
    raise ValueError(
        f"unknown model {name!r}: {nearest(str(name), {*names(), *families})}; also wrn{{depth}}_{{width}}, timm/..., "
        "torchvision/..."
    )


def create(name: str, **fields: Any) -> nn.Module:
    """Build a network by name, with fields such as classes: fresh weights, training mode, images in [0, 1].

    >>> create("resnet20", classes=100).linear.out_features
    100
    """
    return architecture(name, **fields).build()
