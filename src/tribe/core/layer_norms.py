"""LayerNorm as networks write it: over channels that come before pixels, or in a class of their own.

ConvNeXt normalises the channels of (N, C, H, W). timm, Hugging Face and the authors each have a class for it, some of
them without nn.LayerNorm as a base. No library is imported: a layer that is called a norm and has the parameters of a
LayerNorm is tried on random numbers (`tribe.core.placement`).
"""

import re

import torch.nn.functional as F
from torch import Tensor, nn

from tribe.core.slots import AffineSlot


class ChannelSlot(AffineSlot):
    """LayerNorm over the channels of each pixel, (N, C, H, W)."""

    def standardise(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Normalise over axis 1."""
        if x.dim() != 4:
            raise RuntimeError(f"layer {self.name!r} normalises the channels of (N, C, H, W); got {tuple(x.shape)}")
        y = F.layer_norm(x.movedim(1, -1), (self.channels,), eps=self.layer_eps).movedim(-1, 1)
        return y, (self.channels, 1, 1)


def resembles_layer_norm(layer: nn.Module) -> bool:
    """Whether a layer that is no nn.LayerNorm has what one has: ``eps``, ``weight`` and ``bias`` of one size, no more.

    >>> layer = nn.Module()
    >>> layer.eps, layer.weight, layer.bias = 1e-6, nn.Parameter(Tensor(4)), nn.Parameter(Tensor(4))
    >>> resembles_layer_norm(layer), resembles_layer_norm(nn.Linear(4, 1))
    (True, False)
    """
    own = layer._parameters
    if set(own) != {"weight", "bias"} or layer._modules or layer._buffers or not isinstance(_eps(layer), float):
        return False
    weight, bias = own["weight"], own["bias"]
    if weight is None or bias is None or not weight.dim():
        return False
    return weight.shape == bias.shape and weight.numel() == max(weight.shape)


def is_called_norm(layer: nn.Module) -> bool:
    """Whether a layer without layers of its own is named as a norm: RMSNorm, but not Normalize.

    Private classes, such as torch's parametrization by the spectral norm, belong to other layers.
    """
    named = re.search("^[^_].*norm(?!al)|^norm(?!al)", type(layer).__name__, re.IGNORECASE) is not None
    return named and not layer._modules


def has_tensors(layer: nn.Module) -> bool:
    """Whether a layer has parameters or buffers of its own."""
    return any(t is not None for t in (*layer._parameters.values(), *layer._buffers.values()))


def _eps(layer: nn.Module) -> object:
    return vars(layer).get("eps")
