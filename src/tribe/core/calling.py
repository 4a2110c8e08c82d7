"""The interface of a network for its callers: input normalisation, types, and what a Hugging Face pipeline reads.

A pipeline reads ``device``, ``dtype`` and ``config``, gives images by name (``pixel_values=``) and expects an output
with ``.logits``: ``pipe.model = tribe.adapt(pipe.model)``. No library is imported for it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from tribe.core.backbone import Backbone


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


class NetworkInterface(nn.Module):
    """A module around a `Backbone` that has what callers of the network itself expect."""

    net: Backbone

    if TYPE_CHECKING:  # torch says nothing of what a module takes and returns

        @overload
        def __call__(self, x: Tensor, valid: Tensor | None = None, order: Tensor | None = None) -> Tensor: ...

        @overload
        def __call__(self, *, pixel_values: Tensor) -> LogitsOutput: ...

        def __call__(self, *args: Any, **named: Any) -> Any:
            """Call `forward`."""

    @property
    def device(self) -> torch.device:
        """Return the device of the network, which images must be on."""
        return self.net.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the precision of the network's weights; images may have another."""
        return self.net.dtype

    @property
    def config(self) -> Any:
        """Return the configuration of a Hugging Face model, also inside a wrapper; None if the network has none."""
        return next((m.config for m in self.net.model.modules() if hasattr(m, "config")), None)
