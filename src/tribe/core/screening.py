"""Which images are bad: those with a value that is not finite, or too large for the precision of the network.

A value far outside [0, 1] is a fault of the camera, like NaN, and does the same damage: its square overflows in a
variance, and every statistic that it enters is lost. This module alone decides which images are sound.
"""

import math

import torch
from torch import Tensor

PROBABILITIES = (
    "the network returns probabilities, rows in [0, 1] that sum to 1: methods expect logits, and learn little or "
    "nothing from probabilities. Remove its Softmax"
)
LIMIT = 1e6  # far above any image, 0 to 255 included; far below where sums of squares overflow in float32


def sound(x: Tensor, axes: int = 2) -> Tensor:
    """Which images are good: a mark for each position of the leading ``axes``, usually (S, B). Does not synchronise.

    >>> sound(torch.tensor([[[0.5, 255.0], [0.5, torch.nan], [-torch.inf, 0.5], [0.5, 3e19]]]))
    tensor([[ True, False, False, False]])
    """
    values, limit = x.flatten(axes), _limit(x)
    if not values.shape[axes:].numel():
        return torch.ones(x.shape[:axes], dtype=torch.bool, device=x.device)
    return (values.amin(axes) >= -limit) & (values.amax(axes) <= limit)  # NaN stays, and no comparison with it is true


def are_probabilities(logits: Tensor) -> bool:
    """Whether rows (..., K) look like probabilities instead of logits.

    >>> are_probabilities(torch.tensor([[0.25, 0.75]])), are_probabilities(torch.tensor([[0.25, 0.5]]))
    (True, False)
    """
    return bool(logits.min() >= 0) and bool((logits.sum(-1) - 1).abs().max() < 1e-2)  # bfloat16 sums are no better


def _limit(x: Tensor) -> float:
    """The largest value allowed: its square is finite in the network's precision. In float16 it is just above 255."""
    kind = x.device.type
    precisions = {x.dtype}
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        precisions.add(torch.get_autocast_dtype(kind))
    return min(LIMIT, *(math.sqrt(torch.finfo(precision).max) for precision in precisions))
