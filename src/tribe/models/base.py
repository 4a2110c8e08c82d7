"""What every source network has in common: a configuration that builds it, and normalisation of its input."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor, nn

from tribe.engine.normalize import Normalize
from tribe.fields import plain_numbers, require_whole
from tribe.registry import Registry, nearest

Normalization = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation, an entry a channel
IMAGENET: Normalization = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF: Normalization = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # RobustBench's AugMix networks


@dataclass(frozen=True)
class Architecture(ABC):
    """A network's configuration: its fields are what `create` takes, `build` makes the network with fresh weights."""

    classes: int = 10
    channels: int = 3
    normalize: Normalization | None = None  # done to images in [0, 1] inside the network; None: it takes them as such

    name: ClassVar[str]
    paper: ClassVar[str]
    size: ClassVar[int] = 32  # rows and columns of the images it is made for
    head: ClassVar[str] = "fc"  # the layer that gives the logits
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # names people know, and the fields they stand for

    @classmethod
    def preset(cls, name: str) -> Mapping[str, Any] | None:
        """The fields a name stands for; None if it is not a name of this architecture."""
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
        """The images it is made for: channels, rows, columns."""
        return self.channels, self.size, self.size

    def build(self) -> nn.Module:
        """The network, with fresh weights, in training mode."""
        return initialize(self.network())

    @abstractmethod
    def network(self) -> nn.Module:
        """The bare network."""


class InputNormalize(Normalize):
    """Normalisation as a constant of the network: not in the state dict, whose names stay the published ones."""

    def __init__(self, normalize: Normalization) -> None:
        super().__init__(*normalize)
        for name, value in list(self.named_buffers()):
            self.register_buffer(name, value, persistent=False)


def input_layer(normalize: Normalization | None) -> nn.Module:
    """What a network does to its images first."""
    return nn.Identity() if normalize is None else InputNormalize(normalize)


class BatchNormReLU(nn.BatchNorm2d):
    """Normalise and activate as one layer, named as the BatchNorm alone would be: adapting it is one pass, not two.

    What replaces BatchNorm layers by others, as `nn.SyncBatchNorm.convert_sync_batchnorm` does, has to put the ``act``
    behind the new one.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU(inplace=True)  # timm's name for it; nobody else sees what is overwritten

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) -> the same, nowhere negative."""
        return self.act(super().forward(x))  # type: ignore[no-any-return]


def global_pool(x: Tensor) -> Tensor:
    """The mean over all pixels, (N, C, H, W) -> (N, C)."""
    return x.mean((2, 3))


def initialize(net: nn.Module) -> nn.Module:
    """He et al.'s initialisation, with which all of these networks were published."""
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return net


registry: Registry[Architecture] = Registry("model")
register = registry.register
_FREE = {field.name for field in fields(Architecture)}  # what a name suggests; depth and the like it fixes


def names() -> list[str]:
    """The names of networks, sorted. Other depths and widths, and timm's and torchvision's models, have names too."""
    return sorted(name for family in registry.names() for name in registry.get(family).presets)


def architecture(name: str, **fields: Any) -> Architecture:
    """The configuration behind a name, for those who want to look at it before building.

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
    """Build a network from its name and fields, such as classes; fresh weights, training mode, images in [0, 1].

    >>> create("resnet20", classes=100).linear.out_features
    100
    """
    return architecture(name, **fields).build()
