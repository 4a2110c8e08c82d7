"""Residual networks: torchvision's, and the wide, small and grouped ones for small images.

The names of layers are those of published weights: torchvision's, RobustBench's `Standard` (wide ResNet) and
`Hendrycks2020AugMix_ResNeXt`, and Y. Idelbayev's for the small ResNets, which want ImageNet's mean and standard
deviation.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from tribe.data.models.architectures import (
    HALF,
    IMAGENET,
    Architecture,
    BatchNormReLU,
    GlobalPool,
    Normalization,
    register,
)
from tribe.fields import Count


def stage(
    block: Callable[[int, int, int], nn.Module], inputs: int, width: int, stride: int, blocks: int, expansion: int = 1
) -> nn.Sequential:
    """Blocks of one width, from which `expansion` times as many channels come; the first may halve the image."""
    rest = (block(expansion * width, width, 1) for _ in range(blocks - 1))
    return nn.Sequential(block(inputs, width, stride), *rest)


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """A 1x1 convolution where the shape changes; None where the input can be added directly."""
    if inputs == outputs and stride == 1:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions."""

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

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
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


STAGES: Mapping[int, tuple[Callable[[int, int, int], nn.Module], int, tuple[int, int, int, int]]] = {
    18: (BasicBlock, 1, (2, 2, 2, 2)),  # the block, channels that leave it for each inside it, blocks of each stage
    34: (BasicBlock, 1, (3, 4, 6, 3)),
    50: (Bottleneck, 4, (3, 4, 6, 3)),
    101: (Bottleneck, 4, (3, 4, 23, 3)),
    152: (Bottleneck, 4, (3, 8, 36, 3)),
}


@register("resnet")
@dataclass(frozen=True)
class TorchvisionResNet(Architecture):
    """ResNet-18 to -152 for photographs, and the variant for digits of 28x28."""

    classes: Count = 1000
    normalize: Normalization | None = IMAGENET
    depth: Count = 50

    paper = "He et al., Deep Residual Learning for Image Recognition, CVPR 2016"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **{f"resnet{depth}": {"depth": depth} for depth in STAGES},
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
        """A 7x7 stem that quarters the image, then stages of 64, 128, 256 and 512 channels (times the expansion)."""
        block, expansion, (first, second, third, fourth) = STAGES[self.depth]
        return self.sequence(
            conv1=nn.Conv2d(self.channels, 64, 7, 2, 3, bias=False),
            bn1=BatchNormReLU(64),
            maxpool=nn.MaxPool2d(3, 2, 1),
            layer1=stage(block, 64, 64, 1, first, expansion),
            layer2=stage(block, 64 * expansion, 128, 2, second, expansion),
            layer3=stage(block, 128 * expansion, 256, 2, third, expansion),
            layer4=stage(block, 256 * expansion, 512, 2, fourth, expansion),
            pool=GlobalPool(),
            fc=nn.Linear(512 * expansion, self.classes),
        )


class SmallBlock(nn.Module):
    """Two 3x3 convolutions; where the shape changes the shortcut is every other pixel, padded with empty channels."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = BatchNormReLU(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.stride, self.padding = stride, (width - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) -> (N, width, H / stride, W / stride)."""
        y = self.bn1(self.conv1(x))
        y = self.bn2(self.conv2(y))
        if self.padding:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(x + y, inplace=True)


@register("resnet_cifar")
@dataclass(frozen=True)
class CifarResNet(Architecture):
    """ResNet-20 and its deeper sisters. By name the paper's depths: a "resnet152" is torchvision's, though 6n + 2."""

    normalize: Normalization | None = IMAGENET
    depth: Count = 20  # 6n + 2: three stages of n blocks of two layers

    paper = "He et al., Deep Residual Learning for Image Recognition, CVPR 2016, section 4.2"
    head = "linear"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        f"resnet{depth}": {"depth": depth} for depth in (8, 20, 32, 44, 56, 110)
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth % 6 != 2 or self.depth < 8:
            raise ValueError(f"the depth of a CIFAR ResNet is 6n + 2, such as 20, 32 or 56; got {self.depth}")

    def network(self) -> nn.Module:
        """Three stages of 16, 32 and 64 channels."""
        blocks = (self.depth - 2) // 6
        return self.sequence(
            conv1=nn.Conv2d(self.channels, 16, 3, 1, 1, bias=False),
            bn1=BatchNormReLU(16),
            layer1=stage(SmallBlock, 16, 16, 1, blocks),
            layer2=stage(SmallBlock, 16, 32, 2, blocks),
            layer3=stage(SmallBlock, 32, 64, 2, blocks),
            pool=GlobalPool(),
            linear=nn.Linear(64, self.classes),
        )


class GroupedBlock(nn.Module):
    """1x1 down, 3x3 in groups (which has the stride), 1x1 up: the paper's type C."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 2 * width
        self.conv_reduce = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn_reduce = BatchNormReLU(width)
        self.conv_conv = nn.Conv2d(width, width, 3, stride, 1, groups=4, bias=False)
        self.bn = BatchNormReLU(width)
        self.conv_expand = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn_expand = nn.BatchNorm2d(outputs)
        self.downsample = shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) -> (N, 2 width, H / stride, W / stride)."""
        y = self.bn_reduce(self.conv_reduce(x))
        y = self.bn(self.conv_conv(y))
        y = self.bn_expand(self.conv_expand(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)), inplace=True)


@register("resnext29")
@dataclass(frozen=True)
class ResNeXt(Architecture):
    """ResNeXt-29 4x32d."""

    classes: Count = 100

    paper = "Xie et al., Aggregated Residual Transformations for Deep Neural Networks, CVPR 2017"
    head = "classifier"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "resnext29": {},
        "resnext29_augmix": {"normalize": HALF},  # RobustBench's own weights, whose file does not say so
    }

    def network(self) -> nn.Module:
        """Three stages of three blocks with 128, 256 and 512 channels inside, 4 x 32 in the first."""
        return self.sequence(
            conv_1_3x3=nn.Conv2d(self.channels, 64, 3, 1, 1, bias=False),
            bn_1=BatchNormReLU(64),
            stage_1=stage(GroupedBlock, 64, 128, 1, 3, 2),
            stage_2=stage(GroupedBlock, 256, 256, 2, 3, 2),
            stage_3=stage(GroupedBlock, 512, 512, 2, 3, 2),
            pool=GlobalPool(),
            classifier=nn.Linear(1024, self.classes),
        )


class WideBlock(nn.Module):
    """Normalise, activate, convolve, twice; where the shape changes the shortcut convolves the activated input."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = BatchNormReLU(inputs)
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn2 = BatchNormReLU(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.convShortcut = None if inputs == width else nn.Conv2d(inputs, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) -> (N, width, H / stride, W / stride)."""
        y = self.bn1(x)
        shortcut = x if self.convShortcut is None else self.convShortcut(y)
        y = self.conv2(self.bn2(self.conv1(y)))
        return shortcut + y  # type: ignore[no-any-return]


@register("wrn")
@dataclass(frozen=True)
class WRN(Architecture):
    """WRN-depth-width. Every wrn{depth}_{width} is a name."""

    depth: Count = 28  # 6n + 4: three stages of n blocks of two layers
    width: Count = 10  # factor of the channels

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
        if self.depth % 6 != 4 or self.depth < 10:
            raise ValueError(f"the depth of a wide ResNet is 6n + 4, such as 16, 28 or 40; got {self.depth}")

    def network(self) -> nn.Module:
        """Three stages of 16, 32 and 64 times `width` channels."""
        blocks, width = (self.depth - 4) // 6, self.width
        return self.sequence(
            conv1=nn.Conv2d(self.channels, 16, 3, 1, 1, bias=False),
            block1=nn.Sequential(OrderedDict(layer=stage(WideBlock, 16, 16 * width, 1, blocks))),
            block2=nn.Sequential(OrderedDict(layer=stage(WideBlock, 16 * width, 32 * width, 2, blocks))),
            block3=nn.Sequential(OrderedDict(layer=stage(WideBlock, 32 * width, 64 * width, 2, blocks))),
            bn1=BatchNormReLU(64 * width),
            pool=GlobalPool(),
            fc=nn.Linear(64 * width, self.classes),
        )
