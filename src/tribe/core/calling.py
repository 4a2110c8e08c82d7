"""The interface of a network for its callers: with types, and as a Hugging Face pipeline does.

A pipeline reads ``device``, ``dtype`` and ``config``, gives images by name (``pixel_values=``) and expects an output
with ``.logits``: ``pipe.model = tribe.adapt(pipe.model)``. No library is imported for it.
"""

from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from tribe.core.backbone import Backbone


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
