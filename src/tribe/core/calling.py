"""Input normalisation as a layer, and the output that a Hugging Face pipeline reads. No library is imported for it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Normalize(nn.Module):
    """(x - mean) / std per channel, for images in [0, 1]. torch.jit.script, torch.fx and torch.export take it.

    With ``persistent=False`` the numbers are constants of the network, which its state dict leaves out.

    >>> net = nn.Sequential(Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]), nn.Conv2d(3, 8, 3))
    >>> net(torch.rand(2, 3, 8, 8)).shape
    torch.Size([2, 8, 6, 6])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], persistent: bool = True) -> None:
        super().__init__()
        if len(mean) != len(std) or not all(s > 0 for s in std):
            raise ValueError(f"mean and std need one entry a channel, std above 0; got {list(mean)} and {list(std)}")
        self.register_buffer("mean", torch.tensor(mean), persistent)
        self.register_buffer("std", torch.tensor(std), persistent)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (N, C, ...)."""
        return ((x.movedim(1, -1) - self.mean) / self.std).movedim(-1, 1)


class LogitsOutput(dict[str, Tensor]):
    """The output for images that were given as ``pixel_values=``: a dict with one entry, also as an attribute.

    >>> LogitsOutput(logits=torch.zeros(2, 4)).logits.shape
    torch.Size([2, 4])
    """

    @property
    def logits(self) -> Tensor:
        """Return the logits of each image."""
        return self["logits"]
