"""Small networks with LayerNorm for CIFAR and digits: a ConvNeXt and a vision transformer.

LayerNorm has no statistics of the source data. So methods adapt its affine parameters only: see docs/networks.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tribe.data.models.architectures import Architecture, register
from tribe.data.models.layers import IMAGENET, Normalization, global_pool, input_layer

WIDTHS, BLOCKS = (48, 96, 192), 2  # ConvNeXt: channels of the stages, blocks of each; 16, 8 and 4 pixels a side
PATCH, WIDTH, DEPTH, HEADS = 4, 96, 6, 4  # vision transformer: pixels of a patch, channels, layers, attention heads


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of (N, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each pixel."""
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Block(nn.Module):
    """A 7x7 convolution of each channel, LayerNorm, and two layers that mix the channels, with a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, width, H, W) -> the same shape."""
        y = self.norm(self.conv(x).movedim(1, -1))
        return x + self.narrow(F.gelu(self.wide(y))).movedim(-1, 1)  # type: ignore[no-any-return]


class ConvNeXt(nn.Module):
    """Stages that halve the image and double the channels."""

    def __init__(self, classes: int, channels: int = 3, normalize: Normalization | None = IMAGENET) -> None:
        super().__init__()
        self.normalize = input_layer(normalize)
        stages: list[nn.Module] = []
        for width in WIDTHS:
            halve = nn.Conv2d(channels, width, 2, 2)
            first = [halve, ChannelNorm(width)] if not stages else [ChannelNorm(channels), halve]
            stages.append(nn.Sequential(*first, *(Block(width) for _ in range(BLOCKS))))
            channels = width
        self.stages, self.norm, self.fc = nn.Sequential(*stages), nn.LayerNorm(channels), nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images in [0, 1] -> logits."""
        return self.fc(self.norm(global_pool(self.stages(self.normalize(x)))))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention between patches, then two layers for each patch, with LayerNorm before both."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.both, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) -> the same shape."""
        parts = self.both(self.norm1(x)).unflatten(-1, (3, self.heads, -1))  # (N, T, 3, heads, c)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Patches of the image, layers of attention, the mean over patches."""

    def __init__(self, classes: int, channels: int, size: int, normalize: Normalization | None = IMAGENET) -> None:
        super().__init__()
        self.normalize, self.patches = input_layer(normalize), nn.Conv2d(channels, WIDTH, PATCH, PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // PATCH) ** 2, WIDTH))
        self.layers = nn.Sequential(*(Layer(WIDTH, HEADS) for _ in range(DEPTH)))
        self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images in [0, 1] -> logits."""
        x = self.patches(self.normalize(x)).flatten(2).transpose(1, 2) + self.positions
        return self.fc(self.norm(self.layers(x)).mean(1))  # type: ignore[no-any-return]


@register("convnext_cifar")
@dataclass(frozen=True)
class CifarConvNeXt(Architecture):
    """A ConvNeXt of three stages for 32x32 pixels."""

    normalize: Normalization | None = IMAGENET

    paper = "Liu et al., A ConvNet for the 2020s, CVPR 2022"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"convnext_cifar": {}}

    def network(self) -> nn.Module:
        """Build the network."""
        return ConvNeXt(self.classes, self.channels, self.normalize)


@register("convnext_mnist")
@dataclass(frozen=True)
class DigitsConvNeXt(CifarConvNeXt):
    """The same for grey digits of 28x28 pixels."""

    channels: int = 1
    normalize: Normalization | None = None

    size = 28
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"convnext_mnist": {}}


@register("vit_cifar")
@dataclass(frozen=True)
class CifarVisionTransformer(Architecture):
    """A vision transformer of six layers for 32x32 pixels."""

    normalize: Normalization | None = IMAGENET

    paper = "Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"vit_cifar": {}}

    def network(self) -> nn.Module:
        """Build the network."""
        return VisionTransformer(self.classes, self.channels, self.size, self.normalize)
