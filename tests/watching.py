"""Images that a guard lets pass."""

import torch
from torch import nn

from tribe.testing import images


def pictures(streams, batch, seed=0):
    """Images (S, B, 3, 8, 8) with structure: noise, smoothed, over a gradient."""
    x = nn.functional.avg_pool2d(images(streams, batch, seed).flatten(0, 1), 3, 1, 1).unflatten(0, (streams, batch))
    return (x + torch.linspace(0, 0.4, x.shape[-1])).clamp(0, 1)
