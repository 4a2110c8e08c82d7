"""Architectures: the configuration of a network, networks by name, and the layers that they share."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor, nn

from tribe.core.calling import Normalize
from tribe.fields import Count, check_fields
from tribe.registry import Registry, nearest

Normalization = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation, one entry per channel
IMAGENET: Normalization = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF: Normalization = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # of RobustBench's AugMix networks


def input_layer(normalize: Normalization | None) -> nn.Module:
    """The first layer of a network: the normalisation of its images, if any; published names do not include it."""
    return nn.Identity() if normalize is None else Normalize(*normalize, persistent=False)


class BatchNormReLU(nn.BatchNorm2d):
    """BatchNorm and ReLU as one layer with the name of the BatchNorm: adapting it takes one pass, not two.

    Code that replaces BatchNorm layers, such as `nn.SyncBatchNorm.convert_sync_batchnorm`, must add ``act`` after the
    new layer.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU(inplace=True)  # timm's name; in place is safe, because no other layer reads the input

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) -> the same shape, not negative."""
        return self.act(super().forward(x))  # type: ignore[no-any-return]


class GlobalPool(nn.Module):
    """The mean over all pixels."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C)."""
        return x.mean((2, 3))


@dataclass(frozen=True)
class Architecture(ABC):
    """The configuration of a network. Its fields are those that `create` takes; `build` makes the network."""

    classes: Count = 10
    channels: Count = 3
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
        check_fields(self)
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
        """Build the network with He et al.'s initial weights, with which all of these were published; training mode."""
        net = self.network()
        for layer in net.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        return net

    @abstractmethod
    def network(self) -> nn.Module:
        """Build the network, before its weights are initialised."""

    def sequence(self, **layers: nn.Module) -> nn.Sequential:
        """Build a network that normalises its images and applies these layers one after the other."""
        return nn.Sequential(OrderedDict(normalize=input_layer(self.normalize), **layers))


registry: Registry[Architecture] = Registry("model")
register = registry.register
_FREE = {field.name for field in fields(Architecture)}  # every name leaves them free; it fixes others, such as depth


def names() -> list[str]:
    """The names of networks, sorted. Other depths and widths, and models of timm and torchvision, have names too."""
    return sorted(name for family in registry.names() for name in registry.get(family).presets)


def architecture(name: str, **fields: Any) -> Architecture:
    """The configuration of a name; `create` builds the network."""
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
