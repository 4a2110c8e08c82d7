"""A network for a model file: BatchNorm layers whose scale and shift are values of the pass, and which record moments.

A layer sees z = x - m0, its input less the source's mean, which runtimes fold into the convolution before. So the mean
of z and of z * z over the pixels of an image are, without cancellation, what `Balanced.sum_classes` adds up, and the
layer returns scale * z + shift.
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tribe.core.backbone import Backbone
from tribe.core.context import hold
from tribe.core.placement import replace_module
from tribe.core.slots import StatisticsSlot
from tribe.onnx.states import ModelFileError


class Values(NamedTuple):
    """The arguments of the layers in a pass, and what they record."""

    images: int
    scale: tuple[Tensor, ...]  # of each layer, (c,)
    shift: tuple[Tensor, ...]
    chosen: Tensor | None  # the images to record, by their index; None: all
    recorded: dict[int, tuple[Tensor, ...]]  # by layer, the means of z and of z * z, (images, c)


_values: ContextVar[Values] = ContextVar("tribe_onnx_values")


class RecordingNorm(nn.Module):
    """A BatchNorm layer in a model file."""

    origin: Tensor
    zero: Tensor
    one: Tensor

    def __init__(self, slot: StatisticsSlot, index: int, mean: Tensor) -> None:
        super().__init__()
        self.name, self.index, self.channels = slot.name, index, slot.channels
        self.register_buffer("origin", -mean)
        self.register_buffer("zero", torch.zeros_like(mean))
        self.register_buffer("one", torch.ones_like(mean))
        self.after = nn.ReLU() if slot.relu else slot.after

    def forward(self, x: Tensor) -> Tensor:
        """Record the moments of (N, c, ...) and normalise it."""
        values = _values.get()
        if x.shape[0] != values.images:
            raise ModelFileError(
                f"layer {self.name!r} receives several samples of an image, as of crops or frames: a model file takes "
                "networks in which each image stays one"
            )
        pixels = list(range(2, x.dim()))
        z = x + self.origin.view(-1, *[1] * len(pixels))
        seen = z if values.chosen is None else z.index_select(0, values.chosen)
        means = tuple(t.mean(pixels) if pixels else t for t in (seen, seen * seen))
        values.recorded[self.index] = means
        # A batch norm whose mean is 0 and variance 1 is one pass over the pixels; a product and a sum are two.
        scale, shift = values.scale[self.index], values.shift[self.index]
        y = torch.batch_norm(z, scale, shift, self.zero, self.one, False, 0.0, 0.0, False)
        return y if self.after is None else self.after(y)


class RecordingNetwork(nn.Module):
    """A classifier whose BatchNorm layers take their scale and shift as arguments."""

    def __init__(self, net: Backbone) -> None:
        super().__init__()
        affine, stats = net.source()
        model = net.plain(affine, stats)
        placed = {id(model.get_submodule(slot.name)): slot for slot in net.slots if slot.tracked}
        self.widths: list[int] = []
        self.names: list[str] = []
        norms: dict[int, nn.Module] = {}
        for name, layer in list(model.named_modules(remove_duplicate=False)):
            slot: Any = placed.get(id(layer))
            if slot is None:
                continue
            if slot.index not in norms:
                norms[slot.index] = RecordingNorm(slot, len(norms), stats.mean[0, 0, slot.columns])
                self.widths.append(slot.channels)
                self.names.append(slot.name)
            model = replace_module(model, name, norms[slot.index])
        self.model = model
        self.register_buffer("outputs", net.outputs)

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor, chosen: Tensor | None) -> tuple[Tensor, Any]:
        """Return the logits (N, K), and by layer what was recorded; scale and shift (C,)."""
        values = Values(x.shape[0], scale.split(self.widths), shift.split(self.widths), chosen, {})
        with hold(_values, values):
            result = self.model(x)
        logits = getattr(result, "logits", result)
        return logits if self.outputs is None else logits.index_select(1, self.outputs), values.recorded


def constant_values(network: RecordingNetwork, images: int = 0) -> AbstractContextManager[None]:
    """Set scales of 1 and shifts of 0, for a layer that is tried alone."""
    ones = tuple(torch.ones(width) for width in network.widths)
    return hold(_values, Values(images, ones, tuple(t - 1 for t in ones), None, {}))
