"""The networks that are timed: those of `tribe.models`, with random weights and statistics that fit them."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tribe import models

PASSES, BATCH = 3, 8  # that BatchNorm meets


def build(name: str, classes: int = 10, device: str | torch.device = "cpu") -> nn.Module:
    """A network by name, always the same, evaluating."""
    design = models.architecture(name, classes=classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = design.build()
    return settled(net.to(device), noise((PASSES, BATCH, *design.shape), device))


def noise(shape: tuple[int, ...], device: str | torch.device = "cpu") -> Tensor:
    """Images in [0, 1], always the same."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device)


@torch.no_grad()
def settled(net: nn.Module, batches: Tensor) -> nn.Module:
    """Let BatchNorm meet a few batches: with untouched statistics activations would double at every block."""
    norms = {layer: layer.momentum for layer in net.modules() if isinstance(layer, _BatchNorm)}
    for norm in norms:
        norm.momentum = None  # a plain average over the passes
    net.train()
    for x in batches:
        net(x)
    for norm, momentum in norms.items():
        norm.momentum = momentum
    return net.eval()
