"""The small residual networks of He et al. for CIFAR, with shortcuts that have no parameters.

The names of layers are those of Y. Idelbayev's published weights, which want ImageNet's mean and standard deviation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from tribe.data.models.architectures import Architecture, register
from tribe.data.models.layers import IMAGENET, BatchNormReLU, Normalization, global_pool, input_layer
from tribe.fields import require_whole


class SmallBlock(nn.Module):
    """Two 3x3 convolutions; where the shape changes the shortcut is every other pixel, padded with empty channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = BatchNormReLU(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.padding = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) -> (N, outputs, H / stride, W / stride)."""
        y = self.bn1(self.conv1(x))
        y = self.bn2(self.conv2(y))
        if self.padding:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(x + y, inplace=True)


class SmallResNet(nn.Module):
    """Three stages of 16, 32 and 64 channels."""

    def __init__(self, depth: int, classes: int, channels: int = 3, normalize: Normalization | None = IMAGENET) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.normalize = input_layer(normalize)
        self.conv1 = nn.Conv2d(channels, 16, 3, 1, 1, bias=False)
        self.bn1 = BatchNormReLU(16)
        self.layer1 = stage(16, 16, 1, blocks)
        self.layer2 = stage(16, 32, 2, blocks)
        self.layer3 = stage(32, 64, 2, blocks)
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images in [0, 1] -> logits."""
        x = self.bn1(self.conv1(self.normalize(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(global_pool(x))  # type: ignore[no-any-return]


def stage(inputs: int, outputs: int, stride: int, blocks: int) -> nn.Sequential:
    """Blocks of one width; the first may halve the image."""
    return nn.Sequential(
        SmallBlock(inputs, outputs, stride), *(SmallBlock(outputs, outputs, 1) for _ in range(blocks - 1))
    )


@register("resnet_cifar")
@dataclass(frozen=True)
class CifarResNet(Architecture):
    """ResNet-20 and its deeper sisters. By name the paper's depths: a "resnet152" is torchvision's, though 6n + 2."""

    normalize: Normalization | None = IMAGENET
    depth: int = 20  # 6n + 2: three stages of n blocks of two layers

    paper = "He et al., Deep Residual Learning for Image Recognition, CVPR 2016, section 4.2"
    head = "linear"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        f"resnet{depth}": {"depth": depth} for depth in (8, 20, 32, 44, 56, 110)
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole(self, "depth")
        if self.depth % 6 != 2 or self.depth < 8:
            raise ValueError(f"the depth of a CIFAR ResNet is 6n + 2, such as 20, 32 or 56; got {self.depth}")

    def network(self) -> nn.Module:
        """Build the network."""
        return SmallResNet(self.depth, self.classes, self.channels, self.normalize)
