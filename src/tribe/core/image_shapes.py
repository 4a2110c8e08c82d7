"""Find which images a network takes, with a copy without numbers, and say it in the words of images.

The copy has the network's code and tensors of torch's meta device, which have a shape and no content. A pass of it
costs no arithmetic and changes nothing, so that every size can be tried when an error has to be explained.
"""

import copy
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from tribe.core.slots import AffineSlot, Slot

Shape = tuple[int, ...]
IMAGES = 7  # in a pass: not a usual number of channels, because a convolution also takes one image (C, H, W)
MOST_SHAPES = 256  # whose answers are remembered
SIDES = (*range(1, 65), 72, 80, 96, 112, 120, 128, 160, 192, 224, 227, 240, 256, 288, 299, 320, 331, 380, 384, 448, 512)
AXES = {1: "L", 2: "H, W", 3: "T, H, W"}  # of an image, beside its channels


def first_convolution(model: nn.Module) -> nn.Conv1d | nn.Conv2d | nn.Conv3d | None:
    """Return the first convolution of a model that is not a gate of attention, as in ECA; None if there is none."""
    layers = [m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    gates = [layer for layer in layers if layer.in_channels == layer.out_channels == 1]
    return next((layer for layer in layers if layer not in gates), next(iter(layers), None))


class ShapeModel:
    """A copy of a network that takes shapes: it has no numbers, and normalisation keeps its input."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        layers = [slot.layer for slot in model.modules() if isinstance(slot, Slot)]
        tensors = (t for m in (model, *layers) for t in itertools.chain(m.parameters(), m.buffers()))
        self._model, self._dtype = copy.deepcopy(model, {id(t): _without_numbers(t) for t in tensors}), dtype
        for slot in self._model.modules():
            if isinstance(slot, Slot):
                vars(slot)["forward"] = _Kept(slot)

    def takes(self, shape: Shape) -> bool:
        """Return whether an image of this shape passes. False may also mean that the network cannot be asked."""
        try:
            with torch.no_grad():
                self._model(torch.empty(IMAGES, *shape, dtype=self._dtype, device="meta"))
        except Exception:  # a network may fail in any way
            return False
        return True


class KnownShapes:
    """The answers for the last shapes that were asked for; a copy has the same."""

    def __init__(self) -> None:
        self._known: dict[Shape, bool] = {}

    def takes(self, model: nn.Module, dtype: torch.dtype, shape: Shape) -> bool:
        """Return whether an image of this shape passes the model."""
        if shape not in self._known:
            if len(self._known) >= MOST_SHAPES:
                self._known.clear()
            self._known[shape] = ShapeModel(model, dtype).takes(shape)
        return self._known[shape]


class _Kept:
    """In place of a slot's forward: check the shape of the input and return it."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self._slot, AffineSlot):
            self._slot.standardise(x)
        elif x.dim() < 2 or x.shape[1] != self._slot.channels:
            raise ValueError(f"{tuple(x.shape)} for {self._slot.channels} channels")
        return x


def _without_numbers(t: Tensor) -> Tensor:
    """A tensor of the same shape on the meta device."""
    empty = torch.empty_like(t, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(t, nn.Parameter) else empty


def explain_shape(model: nn.Module, dtype: torch.dtype, shape: Shape) -> str | None:
    """Return what is wrong with the shape of an image, and what to do; None if that is not known to be the reason."""
    if 0 in shape:
        return "an image without pixels"
    asked, first = ShapeModel(model, dtype), first_convolution(model)
    if asked.takes(shape):
        return None
    if first is None:
        return _of_another_size(asked, shape, (), len(shape))
    channels, spatial = first.in_channels, len(first.kernel_size)
    layout = f"({channels}, {AXES[spatial]})"
    if len(shape) != spatial + 1:
        return f"an image has {spatial + 1} axes, {layout}; got {len(shape)}{_missing_axis(shape, channels, spatial)}"
    if shape[0] != channels:
        words = f"the network takes {channels} channel{'s' if channels > 1 else ''}, {layout}; got {shape[0]}"
        return f"{words}. {_other_channels(shape, channels)}"
    return _of_another_size(asked, shape, (channels,), spatial)


def _missing_axis(shape: Shape, channels: int, spatial: int) -> str:
    if len(shape) == spatial + 2:
        return ". For frames of a video: images.flatten(0, 1)"
    if len(shape) == spatial and channels == 1:
        return ". For grey images without an axis of channels: images.unsqueeze(-3)" if spatial == 2 else ""
    return ""


def _other_channels(shape: Shape, channels: int) -> str:
    """Say what to do with images of another number of channels."""
    if shape[-1] == channels:
        return f"They look channels last: images.movedim(-1, {-len(shape)})"
    rest = ", 1" * (len(shape) - 1)
    if (shape[0], channels) == (1, 3):
        return f"For grey images: images.repeat(1, 3{rest})"
    if (shape[0], channels) == (3, 1):
        return "For a network of grey images: images.mean(1, keepdim=True)"
    if (shape[0], channels) == (4, 3):
        return "Without the channel of transparency: images[:, :3]"
    return "Give the channels that it was trained on"


def _of_another_size(asked: ShapeModel, shape: Shape, lead: Shape, spatial: int) -> str | None:
    """Return which sizes the network takes instead of this one; None if none is found."""
    fine = list(itertools.islice((s for s in SIDES if asked.takes((*lead, *[s] * spatial))), 2))
    if not fine:
        return None
    got, least = _size(shape[len(lead) :]), _size((fine[0],) * spatial)
    how = "Resize them to the size of the images that it was trained on"
    if len(fine) == 1:
        return f"the network takes images of {least} pixels only; got {got}. Resize them"
    if min(shape[len(lead) :]) < fine[0]:
        return f"too small: the network takes images from {least} pixels; got {got}. {how}"
    return f"the network takes images of {least}, {_size((fine[1],) * spatial)} and more pixels; got {got}. {how}"


def _size(sides: Any) -> str:
    return " x ".join(map(str, sides))
