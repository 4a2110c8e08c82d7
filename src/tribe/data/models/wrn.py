"""Wide residual networks for small images: normalise and activate before each convolution, few layers, many channels.

The names of layers are those of RobustBench's `Standard`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from tribe.data.models.architectures import Architecture, register
from tribe.data.models.layers import HALF, BatchNormReLU, Normalization, global_pool, input_layer
from tribe.fields import require_whole


class WideBlock(nn.Module):
    """Normalise, activate, convolve, twice; where the shape changes the shortcut convolves the activated input."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = BatchNormReLU(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn2 = BatchNormReLU(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.convShortcut = None if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) -> (N, outputs, H / stride, W / stride)."""
        y = self.bn1(x)
        shortcut = x if self.convShortcut is None else self.convShortcut(y)
        y = self.conv2(self.bn2(self.conv1(y)))
        return shortcut + y  # type: ignore[no-any-return]


class Stage(nn.Module):
    """Blocks of one width; the first may halve the image."""

    def __init__(self, blocks: int, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        rest = (WideBlock(outputs, outputs, 1) for _ in range(blocks - 1))
        self.layer = nn.Sequential(WideBlock(inputs, outputs, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        """Apply all blocks."""
        return self.layer(x)  # type: ignore[no-any-return]


class WideResNet(nn.Module):
    """Three stages of 16, 32 and 64 times `width` channels."""

    def __init__(
        self, depth: int, width: int, classes: int, channels: int = 3, normalize: Normalization | None = None
    ) -> None:
        super().__init__()
        blocks = (depth - 4) // 6
        self.normalize = input_layer(normalize)
        self.conv1 = nn.Conv2d(channels, 16, 3, 1, 1, bias=False)
        self.block1 = Stage(blocks, 16, 16 * width, 1)
        self.block2 = Stage(blocks, 16 * width, 32 * width, 2)
        self.block3 = Stage(blocks, 32 * width, 64 * width, 2)
        self.bn1 = BatchNormReLU(64 * width)
        self.fc = nn.Linear(64 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images in [0, 1] -> logits."""
        x = self.conv1(self.normalize(x))
        x = self.block3(self.block2(self.block1(x)))
        return self.fc(global_pool(self.bn1(x)))  # type: ignore[no-any-return]


@register("wrn")
@dataclass(frozen=True)
class WRN(Architecture):
    """WRN-depth-width. Every wrn{depth}_{width} is a name."""

    depth: int = 28  # 6n + 4: three stages of n blocks of two layers
    width: int = 10  # factor of the channels

    paper = "Zagoruyko and Komodakis, Wide Residual Networks, BMVC 2016"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "wrn16_4": {"depth": 16, "width": 4},
        "wrn28_10": {"depth": 28, "width": 10},
        "wrn40_2": {"depth": 40, "width": 2},
        "wrn40_2_augmix": {"depth": 40, "width": 2, "normalize": HALF},  # RobustBench's Hendrycks2020AugMix_WRN
    }

    @classmethod
    def preset(cls, name: str) -> Mapping[str, Any] | None:
        """Read depth and width from the name."""
        if found := re.fullmatch(r"wrn(\d+)_(\d+)", name):
            return {"depth": int(found[1]), "width": int(found[2])}
        return super().preset(name)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole(self, "depth", "width")
        if self.depth % 6 != 4 or self.depth < 10:
            raise ValueError(f"the depth of a wide ResNet is 6n + 4, such as 16, 28 or 40; got {self.depth}")

    def network(self) -> nn.Module:
        """Build the network."""
        return WideResNet(self.depth, self.width, self.classes, self.channels, self.normalize)
