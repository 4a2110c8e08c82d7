"""Input normalisation as a layer of the model, so that callers neither forget it nor apply it twice."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Normalize(nn.Module):
    """(x - mean) / std per channel, for images in [0, 1]. torch.jit.script, torch.fx and torch.export take it.

    >>> net = nn.Sequential(Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]), nn.Conv2d(3, 8, 3))
    >>> net(torch.rand(2, 3, 8, 8)).shape
    torch.Size([2, 8, 6, 6])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std) or not all(s > 0 for s in std):
            raise ValueError(f"mean and std need one entry a channel, std above 0; got {list(mean)} and {list(std)}")
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (N, C, ...)."""
        return ((x.movedim(1, -1) - self.mean) / self.std).movedim(-1, 1)
