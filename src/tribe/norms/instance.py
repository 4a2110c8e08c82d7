"""Correct shared statistics where an image deviates beyond chance: instance-aware BN (NOTE, Gong et al., NeurIPS 2022).

The mean and variance of one image over L pixels scatter around the true ones by sqrt(var / L) and var sqrt(2 / (L-1)).
Deviations of up to k such standard errors count as chance and are ignored; larger ones count by their excess.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tribe.core.rules import move_towards, unbiased_variance
from tribe.fields import NotNegative, Share
from tribe.norms import NormRule, Stats, pool_batch, register


@register("instance")
@dataclass(frozen=True)
class Instance(NormRule):
    """IABN. Variances are unbiased; a channel with one pixel has no instance variance, and no correction.

    It corrects the running statistics and leaves them (evaluation). With ``observing`` it corrects the batch's
    statistics, and the running ones follow the batch (training). The ablation "IABN" predicts without ``observing`` and
    learns with it. Gradients flow through instance and batch.
    """

    k: NotNegative = 4.0  # standard errors of an instance's deviation that count as chance
    momentum: Share = 0.01  # share of the newest batch in the running statistics
    observing: bool = False  # correct the batch's statistics, and let the running ones follow
    classes: ClassVar[int] = 1

    def __call__(
        self, mean: Tensor, var: Tensor, count: int, stats: Stats, labels: Tensor | None, valid: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Stats]:
        """Return the statistics of each sample (R, B, C); a row with no valid sample keeps its running ones."""
        shared_mean, shared_var = stats
        if self.observing:
            shared_mean, shared_var = pool_batch(mean, var, valid)
            shared_var = unbiased_variance(shared_var, count, valid)
            stats = move_towards(stats, shared_mean, shared_var, self.momentum, valid).detach()
        if count <= 1:
            return shared_mean, shared_var, stats
        error = (shared_var + eps) / count
        unbiased = var * (count / (count - 1))
        mean = shared_mean + _shrink(mean - shared_mean, self.k * error.sqrt())
        var = shared_var + _shrink(unbiased - shared_var, self.k * (shared_var + eps) * math.sqrt(2 / (count - 1)))
        return mean, var.relu(), stats


def _shrink(deviation: Tensor, chance: Tensor) -> Tensor:
    """Return the excess of a deviation over chance, in either direction."""
    return (deviation - chance).relu() - (-deviation - chance).relu()
