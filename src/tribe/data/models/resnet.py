"""Residual networks in torchvision's layout, with its names of layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from tribe.data.models.architectures import Architecture, register
from tribe.data.models.layers import IMAGENET, BatchNormReLU, Normalization, global_pool, input_layer


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """A 1x1 convolution where the shape changes; None where the input can be added directly."""
    if inputs == outputs and stride == 1:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = BatchNormReLU(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) -> (N, width, H / stride, W / stride)."""
        y = self.bn1(self.conv1(x))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)), inplace=True)


class Bottleneck(nn.Module):
    """1x1 down, 3x3 (which has the stride: "v1.5"), 1x1 up to four times the width."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = BatchNormReLU(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = BatchNormReLU(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) -> (N, 4 width, H / stride, W / stride)."""
        y = self.bn1(self.conv1(x))
        y = self.bn2(self.conv2(y))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)), inplace=True)


STAGES: Mapping[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}


class ResNet(nn.Module):
    """A 7x7 stem that quarters the image, then four stages of 64, 128, 256 and 512 channels (times the expansion)."""

    def __init__(self, depth: int, classes: int, channels: int = 3, normalize: Normalization | None = IMAGENET) -> None:
        super().__init__()
        block, (first, second, third, fourth) = STAGES[depth]
        self.normalize = input_layer(normalize)
        self.conv1 = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
        self.bn1 = BatchNormReLU(64)
        self.layer1 = stage(block, 64, 64, 1, first)
        self.layer2 = stage(block, 64 * block.expansion, 128, 2, second)
        self.layer3 = stage(block, 128 * block.expansion, 256, 2, third)
        self.layer4 = stage(block, 256 * block.expansion, 512, 2, fourth)
        self.fc = nn.Linear(512 * block.expansion, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images in [0, 1] -> logits."""
        x = self.bn1(self.conv1(self.normalize(x)))
        x = F.max_pool2d(x, 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(global_pool(x))  # type: ignore[no-any-return]


def stage(
    block: type[BasicBlock] | type[Bottleneck], inputs: int, width: int, stride: int, blocks: int
) -> nn.Sequential:
    """Blocks of one width; the first may halve the image."""
    rest = (block(block.expansion * width, width, 1) for _ in range(blocks - 1))
    return nn.Sequential(block(inputs, width, stride), *rest)


@register("resnet")
@dataclass(frozen=True)
class TorchvisionResNet(Architecture):
    """ResNet-18 to -152 for photographs, and the variant for digits of 28x28."""

    classes: int = 1000
    normalize: Normalization | None = IMAGENET
    depth: int = 50

    paper = "He et al., Deep Residual Learning for Image Recognition, CVPR 2016"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "resnet18": {"depth": 18},
        "resnet34": {"depth": 34},
        "resnet50": {"depth": 50},
        "resnet101": {"depth": 101},
        "resnet152": {"depth": 152},
        "resnet18_mnist": {"depth": 18, "classes": 10, "channels": 1, "normalize": None},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth not in STAGES:
            known = ", ".join(map(str, STAGES))
            raise ValueError(f"the depth of a ResNet in torchvision's layout is one of {known}; got {self.depth}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of its images: photographs in colour, or digits in grey."""
        size = 28 if self.channels == 1 else 224
        return self.channels, size, size

    def network(self) -> nn.Module:
        """Build the network."""
        return ResNet(self.depth, self.classes, self.channels, self.normalize)
