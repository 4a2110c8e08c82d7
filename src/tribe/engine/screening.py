"""What a bad image is: one with a value that is not finite, or so large that the network's numbers do not hold it.

A value far outside [0, 1] is a fault of the camera as NaN is, and as deadly: its square overflows in a variance, and
every statistic it enters is lost for good. This is the one place that says which images are sound.
"""

import math

import torch
from torch import Tensor

PROBABILITIES = (
    "the network gives probabilities, rows in [0, 1] that sum to 1: methods expect logits, and learn little or nothing "
    "from these. Take off its Softmax"
)
LIMIT = 1e6  # far above any image, 0 to 255 included, and far below where sums of squares of float32 overflow


def sound(x: Tensor, axes: int = 2) -> Tensor:
    """Which images are good; the leading ``axes`` of x, (S, B) as a rule, count them. It waits for no device.

    >>> sound(torch.tensor([[[0.5, 255.0], [0.5, torch.nan], [-torch.inf, 0.5], [0.5, 3e19]]]))
    tensor([[ True, False, False, False]])
    """
    return (x.abs() <= _limit(x)).flatten(axes).all(axes)  # no comparison with NaN is true


def are_probabilities(logits: Tensor) -> bool:
    """Whether rows (..., K) look like probabilities instead of logits.

    >>> are_probabilities(torch.tensor([[0.25, 0.75]])), are_probabilities(torch.tensor([[0.25, 0.5]]))
    (True, False)
    """
    return bool(logits.min() >= 0) and bool((logits.sum(-1) - 1).abs().max() < 1e-2)  # bf16 sums up to no better


def _limit(x: Tensor) -> float:
    """The largest value allowed: one whose square the network's precision holds, in float16 just above 255."""
    kind = x.device.type
    precisions = {x.dtype}
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        precisions.add(torch.get_autocast_dtype(kind))
    return min(LIMIT, *(math.sqrt(torch.finfo(precision).max) for precision in precisions))
