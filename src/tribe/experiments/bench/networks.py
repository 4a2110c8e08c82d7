"""Networks to time: those of `tribe.models`, with random weights and matching BatchNorm statistics."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tribe.data import models

PASSES, BATCH = 3, 8  # to estimate the statistics of BatchNorm


def build(name: str, classes: int = 10, device: str | torch.device = "cpu") -> nn.Module:
    """A network by name in evaluation mode; its weights are always the same."""
    design = models.architecture(name, classes=classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = design.build()
    return estimate_statistics(net.to(device), noise((PASSES, BATCH, *design.shape), device))


def noise(shape: tuple[int, ...], device: str | torch.device = "cpu") -> Tensor:
    """Images in [0, 1], always the same."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device)


@torch.no_grad()
def estimate_statistics(net: nn.Module, batches: Tensor) -> nn.Module:
    """Estimate BatchNorm's statistics from a few batches: with the initial ones activations double at every block."""
    norms = {layer: layer.momentum for layer in net.modules() if isinstance(layer, _BatchNorm)}
    for norm in norms:
        norm.momentum = None  # a plain average over the passes
    net.train()
    for x in batches:
        net(x)
    for norm, momentum in norms.items():
        norm.momentum = momentum
    return net.eval()
