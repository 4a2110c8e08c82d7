"""A network small enough to ship: six convolutions with BatchNorm for grey digits of 28x28, 51,706 parameters."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from tribe.data.models.architectures import Architecture, BatchNormReLU, GlobalPool, register
from tribe.fields import Count

LAYERS = ((16, 1), (16, 2), (32, 1), (32, 1), (48, 2), (48, 1))  # channels and stride; 28, 14, 14, 14, 7, 7 pixels


@register("compact")
@dataclass(frozen=True)
class CompactDigits(Architecture):
    """The default network: a good classifier of digits with 5 million multiplications per image."""

    channels: Count = 1

    paper = "none: the plainest network that does the job"
    size = 28
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"compact": {}}

    def network(self) -> nn.Module:
        """Convolve, normalise, activate, six times; the mean over pixels; a linear head."""
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        channels = self.channels
        for i, (width, stride) in enumerate(LAYERS):  # three numbers each, because weight files count the ReLU
            layers[f"{3 * i}"] = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
            layers[f"{3 * i + 1}"] = BatchNormReLU(width)
            channels = width
        return self.sequence(layers=nn.Sequential(layers), pool=GlobalPool(), fc=nn.Linear(channels, self.classes))
