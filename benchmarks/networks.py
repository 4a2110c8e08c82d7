"""The networks that benchmarks run on: `tribe.models` with random weights and statistics that fit them."""

import re
from collections import OrderedDict

import torch
from torch import nn

from tribe import models


def image_size(name: str) -> int:
    """Rows and columns of the images a network is for."""
    return _design(name, 2).shape[1]


def check(name: str) -> None:
    """Raise if there is no network of this name."""
    _design(name, 2)


def build(name: str, classes: int = 10, device: str | torch.device = "cpu") -> nn.Module:
    """A network by name (resnet20 and other 6n + 2, wrn28_10 and other 6n + 4, resnext29, resnet50), evaluating.

    Its head is called ``fc`` whatever the network calls it, so that a head with more classes can take its place.
    """
    design = _design(name, classes)
    torch.manual_seed(0)
    with torch.device(device):
        net = _settled(design.build(), image_size(name))
    head = net.get_submodule(design.head)
    setattr(net, design.head, nn.Identity())
    return nn.Sequential(OrderedDict(body=net, fc=head)).eval()


def _design(name: str, classes: int) -> models.Architecture:
    if name != "resnet50" and (found := re.fullmatch(r"resnet(\d+)", name)) and int(found[1]) % 6 == 2:
        return models.architecture("resnet_cifar", depth=int(found[1]), classes=classes)
    if name in ("resnet50", "resnext29") or re.fullmatch(r"wrn\d+_\d+", name):
        return models.architecture(name, classes=classes)
    raise ValueError(
        f"unknown network {name!r}: known are resnet50, resnext29, resnet20 (any 6n + 2), wrn28_10 (any 6n + 4)"
    )


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
