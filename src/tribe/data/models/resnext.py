"""ResNeXt-29 4x32d for small images: bottlenecks whose 3x3 convolution is split into groups.

The names of layers are those of RobustBench's `Hendrycks2020AugMix_ResNeXt`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from tribe.data.models.architectures import Architecture, register
from tribe.data.models.layers import HALF, BatchNormReLU, Normalization, global_pool, input_layer

GROUPS = 4  # "4x": paths through each block
EXPANSION = 2  # channels that leave a block, for each inside it


class GroupedBlock(nn.Module):
    """1x1 down, 3x3 in groups (which has the stride), 1x1 up: the paper's type C."""

    def __init__(self, inputs: int, inside: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * inside
        self.conv_reduce = nn.Conv2d(inputs, inside, 1, bias=False)
        self.bn_reduce = BatchNormReLU(inside)
        self.conv_conv = nn.Conv2d(inside, inside, 3, stride, 1, groups=GROUPS, bias=False)
        self.bn = BatchNormReLU(inside)
        self.conv_expand = nn.Conv2d(inside, outputs, 1, bias=False)
        self.bn_expand = nn.BatchNorm2d(outputs)
        self.downsample = None
        if inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) -> (N, 2 inside, H / stride, W / stride)."""
        y = self.bn_reduce(self.conv_reduce(x))
        y = self.bn(self.conv_conv(y))
        y = self.bn_expand(self.conv_expand(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)), inplace=True)


def stage(inputs: int, inside: int, stride: int, blocks: int = 3) -> nn.Sequential:
    """Blocks of one width; the first may halve the image."""
    rest = (GroupedBlock(EXPANSION * inside, inside, 1) for _ in range(blocks - 1))
    return nn.Sequential(GroupedBlock(inputs, inside, stride), *rest)


class ResNeXt29(nn.Module):
    """Three stages of three blocks with 128, 256 and 512 channels inside, 4 x 32 in the first."""

    def __init__(self, classes: int, channels: int = 3, normalize: Normalization | None = None) -> None:
        super().__init__()
        self.normalize = input_layer(normalize)
        self.conv_1_3x3 = nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
        self.bn_1 = BatchNormReLU(64)
        self.stage_1 = stage(64, 128, 1)
        self.stage_2 = stage(256, 256, 2)
        self.stage_3 = stage(512, 512, 2)
        self.classifier = nn.Linear(1024, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images in [0, 1] -> logits."""
        x = self.bn_1(self.conv_1_3x3(self.normalize(x)))
        x = self.stage_3(self.stage_2(self.stage_1(x)))
        return self.classifier(global_pool(x))  # type: ignore[no-any-return]


@register("resnext29")
@dataclass(frozen=True)
class ResNeXt(Architecture):
    """ResNeXt-29 4x32d."""

    classes: int = 100

    paper = "Xie et al., Aggregated Residual Transformations for Deep Neural Networks, CVPR 2017"
    head = "classifier"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "resnext29": {},
        "resnext29_augmix": {"normalize": HALF},  # RobustBench's own weights, whose file does not say so
    }

    def network(self) -> nn.Module:
        """Build the network."""
        return ResNeXt29(self.classes, self.channels, self.normalize)
