"""Validate a network, the images that go in and the logits that come out, for everything that adapts a network.

A bad image has a value that is not finite, or too large for the precision of the network. A value far outside [0, 1] is
a fault of the camera, like NaN, and does the same damage: its square overflows in a variance, and every statistic that
it enters is lost. `good_images` alone decides which images are good.
"""

import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.placement import by_reason

MOST_UNIT = 2  # an image without negative values that exceeds it was not meant to lie in [0, 1]
MOST_COUNTED = 2**16  # values above it were not counted by a camera
TOLERANCE = 1e-3  # how far values may leave [0, 1] without a warning
LIMIT = 1e6  # far above any image, 0 to 255 included; far below where sums of squares overflow in float32
PROBABILITIES = (
    "the network returns probabilities, rows in [0, 1] that sum to 1: methods expect logits, and learn little or "
    "nothing from probabilities. Remove its Softmax"
)


class Checks:
    """Checks of images and of logits; each warns once.

    ``classes`` is None for ``dense`` networks; ``guarded``: a guard skips frames of a camera that fails.
    """

    any_range = False  # whether images that look like 0 to 255 are taken

    def __init__(self, net: Backbone, classes: int | None, guarded: bool = False) -> None:
        self.classes, self._dense = classes, net.dense
        self._classifier = net.classifier
        self._range_checked, self._output_checked = False, False
        self._guarded, self._proper = guarded, False  # whether a batch was in [0, 1]

    def find_bad(self, x: Tensor, valid: Tensor | None) -> Tensor | None:
        """Return which images (S, B) are bad, or None if all are good. Warn once of images outside [0, 1].

        Raise if most images of a stream look like 0 to 255: they were not meant to lie in [0, 1]. Where a guard skips
        such frames and proper ones came before, it is the camera that fails.

        A step screens its images itself. If the extremes of a batch lie in [0, 1], no image is bad, so a batch is
        screened here only if they do not, or on a GPU, where reading them would wait for the device.
        """
        gpu = x.device.type != "cpu"
        if not (gpu and self._range_checked) and in_range(x):
            self._range_checked |= gpu
            self._proper = True
            return None
        good = good_images(x)
        if not (gpu and self._range_checked):
            counted = good if valid is None else good & valid
            if not (self.any_range or (self._guarded and self._proper)):
                refuse_bytes(x, counted)
            if not self._range_checked:
                self._range_checked = warn_of_range(x[counted]) or gpu
        return ~good

    def check_logits(self, logits: Tensor, bad: Tensor | None) -> None:
        """Raise if logits have another number of classes; warn once of probabilities in place of logits."""
        if self._dense and (logits.dim() != 3 or logits.shape[-1] != self.classes):
            return  # the output is something else than logits
        if logits.shape[-1] != self.classes:
            raise wrong_count(logits, self.classes, self._classifier)
        if self._output_checked:
            return
        if (finite := logits if bad is None else logits[~bad]).numel():
            self._output_checked = True  # once: reading the values waits for the device
            if are_probabilities(finite):
                warn(PROBABILITIES)


def check_source(net: Backbone) -> None:
    """Raise if the network's normalisation holds numbers that are not finite."""
    if names := net.not_finite():
        raise ValueError(
            f"the network's normalisation holds numbers that are not finite ({', '.join(names[:4])}), so nothing can "
            "be learned. Load its weights again; replace a layer that it never calls by nn.Identity()"
        )


def warn_of_layers_left_alone(net: Backbone) -> None:
    """Warn if fewer normalisation layers adapt than stay as they are."""
    if len(net.left_alone) > len(net.slots):
        warn(
            f"only {len(net.slots)} of {len(net.slots) + len(net.left_alone)} normalisation layers adapt; the others "
            f"are left alone ({'; '.join(by_reason(net.left_alone))}). The network will adapt little. Replace them by "
            "BatchNorm, LayerNorm or GroupNorm of torch, which compute the same, before the call"
        )


def as_mask(valid: Tensor, x: Tensor, added: bool) -> Tensor:
    """Bring the mask of images (S, B, ...) into (S, B)."""
    return _per_image(valid, x, added, "valid is a tensor of booleans", lambda dtype: dtype == torch.bool)


def as_order(order: Tensor, x: Tensor, added: bool, valid: Tensor | None = None) -> Tensor:
    """Turn times of images (S, B, ...) into the positions (S, B) that sort them; ties keep their order.

    Images that are not ``valid`` (S, B) have no time, whatever ``order`` says, and stay where they are.

    >>> as_order(torch.tensor([0.3, 0.1, 0.2]), torch.zeros(1, 3, 4), added=True)
    tensor([[1, 2, 0]])
    """
    order = _per_image(order, x, added, "order is a tensor of numbers", _can_sort)
    if order.is_floating_point() and bool((order.isnan() if valid is None else order.isnan() & valid).any()):
        raise ValueError("order holds NaN; expected a time, or a position in time, for each image")
    if valid is None:
        return torch.argsort(order, dim=1, stable=True)
    places = _valid_first(torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]), valid)
    images = _valid_first(torch.argsort(torch.where(valid, order, 0), dim=1, stable=True), valid)
    return torch.empty_like(images).scatter_(1, places, images)


def _per_image(values: Tensor, x: Tensor, added: bool, what: str, fits: Callable[[torch.dtype], bool]) -> Tensor:
    """Bring values, one for each image of x (S, B, ...), into (S, B); raise if their shape or type does not fit."""
    expected = tuple(x.shape[added:2])
    if not isinstance(values, Tensor) or tuple(values.shape) != expected or not fits(values.dtype):
        got = f"{values.dtype} of shape {tuple(values.shape)}" if isinstance(values, Tensor) else repr(values)
        raise ValueError(f"{what}, one for each image, of shape {expected}; got {got}")
    values = values.to(x.device)
    return values.unsqueeze(0) if added else values


def _valid_first(positions: Tensor, valid: Tensor) -> Tensor:
    """Put the positions (S, B) of valid images first; otherwise they keep their order."""
    return in_order(positions, torch.argsort((~in_order(valid, positions)).byte(), dim=1, stable=True))


def _can_sort(dtype: torch.dtype) -> bool:
    """Return whether torch sorts numbers of a type: no booleans, no complex numbers, no floating point of 8 bits."""
    return not (dtype == torch.bool or dtype.is_complex or (dtype.is_floating_point and dtype.itemsize < 2))


def in_order(values: Tensor, positions: Tensor) -> Tensor:
    """Reorder values (S, B, ...) by positions (S, B) of each stream."""
    index = positions.view(*positions.shape, *[1] * (values.dim() - 2))
    return torch.take_along_dim(values, index, 1)


def good_images(x: Tensor, axes: int = 2) -> Tensor:
    """Return which images are good: a mark for each position of the leading ``axes``, usually (S, B).

    It does not synchronise.

    >>> good_images(torch.tensor([[[0.5, 255.0], [0.5, torch.nan], [-torch.inf, 0.5], [0.5, 3e19]]]))
    tensor([[ True, False, False, False]])
    """
    kind, precisions, pixels = x.device.type, {x.dtype}, tuple(range(axes, x.dim()))
    if not x.shape[axes:].numel():
        return torch.ones(x.shape[:axes], dtype=torch.bool, device=x.device)
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        precisions.add(torch.get_autocast_dtype(kind))
    # The square of the limit is finite in the network's precision. In float16 the limit is just above 255.
    limit = min(LIMIT, *(math.sqrt(torch.finfo(precision).max) for precision in precisions))
    return (x.amin(pixels) >= -limit) & (x.amax(pixels) <= limit)  # NaN stays, and no comparison with it is true


def in_range(x: Tensor) -> bool:
    """Return whether all values lie in [0, 1]; NaN does not. Waits for the device."""
    if not x.numel():
        return True
    low, high = x.amin().item(), x.amax().item()  # aminmax copies images that are channels-last
    return low >= -TOLERANCE and high <= 1 + TOLERANCE


def looks_like_bytes(low: Any, high: Any) -> Any:
    """Return whether images of floating point with these least and largest values look like 0 to 255, or to 65,535."""
    return (low >= 0) & (high > MOST_UNIT) & (high <= MOST_COUNTED)


def refuse_bytes(x: Tensor, counted: Tensor) -> None:
    """Raise if more than half of the images (S, B, ...) of a stream that count look like 0 to 255."""
    pixels = tuple(range(2, x.dim()))
    if not x.numel() or float(x.amin()) < 0:
        return
    high = x.amax(pixels)
    wrong = looks_like_bytes(x.amin(pixels), high) & counted
    if bool((2 * wrong.sum(1) > counted.sum(1)).any()):
        raise ValueError(
            f"images of floating point reach up to {high[wrong].max().item():.4g}; expected [0, 1]: divide by 255, or "
            "give uint8. Nothing was learned. For a network that takes 0 to 255 itself: torch.nn.Sequential("
            "tribe.Normalize([0.0] * channels, [1 / 255] * channels), net)"
        )


def warn_of_range(x: Tensor) -> bool:
    """Warn of finite values outside [0, 1]; return whether there were any."""
    if in_range(x):
        return False
    low, high = (v.item() for v in x.aminmax())
    if looks_like_bytes(low, high):
        cause = "they look like 0 to 255: divide by 255"
    elif low < 0:
        cause = (
            "they look normalised already: give images in [0, 1] and put the normalisation into the network, "
            "torch.nn.Sequential(tribe.Normalize(mean, std), net), because augmentation works on [0, 1]"
        )
    else:
        cause = "check how they are scaled"
    warn(f"images reach from {low:.3g} to {high:.3g}, outside [0, 1]; {cause}")
    return True


def wrong_count(logits: Tensor, classes: int | None, classifier: str | None) -> ValueError:
    """Return the error for logits (..., K) with another number of classes than the outputs of the classifier layer."""
    return ValueError(
        f"the network gives {logits.shape[-1]} classes; the adapter was made for {classes}, the outputs of its layer "
        f"{classifier!r}. Name the layer that classifies: tribe.adapt(tribe.Backbone(model, classifier=...))"
    )


def are_probabilities(logits: Tensor) -> bool:
    """Return whether rows (..., K) look like probabilities instead of logits.

    >>> are_probabilities(torch.tensor([[0.25, 0.75]])), are_probabilities(torch.tensor([[0.25, 0.5]]))
    (True, False)
    """
    return bool(logits.min() >= 0) and bool((logits.sum(-1) - 1).abs().max() < 1e-2)  # bfloat16 sums are no better


def warn(message: str) -> None:
    """Warn at the caller's line, outside tribe and torch (`skip_file_prefixes` needs Python 3.12)."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("tribe", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
