"""The networks that benchmarks run on: plain modules with random weights and statistics that fit them."""

import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions; where the shape changes the shortcut is a slice padded with zeros (option A)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.stride, self.padding = stride, (width - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.padding:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(x + y)


class CifarResNet(nn.Module):
    """ResNet-(6n + 2) for small images (He et al., CVPR 2016): 16-32-64 channels, n blocks a stage."""

    def __init__(self, depth: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.blocks = _stages(BasicBlock, 16, (16, 32, 64), (depth - 2) // 6)
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn1(self.conv1(x))))
        return self.fc(x.mean((2, 3)))


class WideBlock(nn.Module):
    """Normalise, activate, convolve, twice; the shortcut is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.shortcut = None if inputs == width else nn.Conv2d(inputs, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(x))
        if self.shortcut is not None:
            x = self.shortcut(y)
        return x + self.conv2(F.relu(self.bn2(self.conv1(y))))


class WideResNet(nn.Module):
    """WRN-depth-width (Zagoruyko and Komodakis, BMVC 2016)."""

    def __init__(self, depth: int, width: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.blocks = _stages(WideBlock, 16, (16 * width, 32 * width, 64 * width), (depth - 4) // 6)
        self.bn = nn.BatchNorm2d(64 * width)
        self.fc = nn.Linear(64 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.blocks(self.conv1(x))))
        return self.fc(x.mean((2, 3)))


class Bottleneck(nn.Module):
    """1x1, 3x3 (which has the stride), 1x1; four times as many channels come out as are inside."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        width = outputs // 4
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet50(nn.Module):
    """ResNet-50 as everyone deploys it."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks = _stages(Bottleneck, 64, (256, 512, 1024, 2048), (3, 4, 6, 3))
        self.fc = nn.Linear(2048, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.pool(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(x.mean((2, 3)))


def _stages(
    block: type[nn.Module], inputs: int, widths: tuple[int, ...], blocks: int | tuple[int, ...]
) -> nn.Sequential:
    """Stages of blocks, each stage but the first halving the image."""
    layers: list[nn.Module] = []
    for stage, width in enumerate(widths):
        for i in range(blocks if isinstance(blocks, int) else blocks[stage]):
            layers.append(block(inputs, width, 2 if stage and not i else 1))
            inputs = width
    return nn.Sequential(*layers)


def image_size(name: str) -> int:
    """Rows and columns of the images a network is for."""
    return 224 if name == "resnet50" else 32


def check(name: str) -> None:
    """Raise if there is no network of this name."""
    with torch.device("meta"):
        _network(name, 2)


def build(name: str, classes: int = 10, device: str | torch.device = "cpu") -> nn.Module:
    """A network by name (resnet20 and other 6n + 2, wrn28_10 and other 6n + 4, resnet50), in evaluation mode."""
    torch.manual_seed(0)
    with torch.device(device):
        net = _network(name, classes)
        for layer in net.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        return _settled(net, image_size(name))


def _network(name: str, classes: int) -> nn.Module:
    if name == "resnet50":
        return ResNet50(classes)
    if (found := re.fullmatch(r"resnet(\d+)", name)) and int(found[1]) % 6 == 2:
        return CifarResNet(int(found[1]), classes)
    if (found := re.fullmatch(r"wrn(\d+)_(\d+)", name)) and int(found[1]) % 6 == 4:
        return WideResNet(int(found[1]), int(found[2]), classes)
    raise ValueError(f"unknown network {name!r}: known are resnet50, resnet20 (any 6n + 2), wrn28_10 (any 6n + 4)")


@torch.no_grad()
def _settled(net: nn.Module, size: int, passes: int = 3, batch: int = 8) -> nn.Module:
    """Let BatchNorm meet a few batches: with untouched statistics activations would double at every block."""
    norms = [layer for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # a plain average over the passes
    net.train()
    for _ in range(passes):
        net(torch.rand(batch, 3, size, size))
    for norm in norms:
        norm.momentum = 0.1
    return net.eval()
