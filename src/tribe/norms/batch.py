"""Rules that use a batch's pooled statistics, alone or together with the stored ones: robust, training, mixed."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tribe.core.rules import PerBatch, move_towards, pool_batch, unbiased_variance
from tribe.fields import Share
from tribe.norms import NormRule, Stats, register


@register("robust")
@dataclass(frozen=True)
class Robust(NormRule):
    """stats <- (1 - alpha) stats + alpha batch normalise the batch: Robust BN (RoTTA, Yuan et al., CVPR 2023).

    Gradients flow through the batch's share.
    """

    alpha: Share = 0.05  # share of the newest batch
    classes: ClassVar[int] = 1

    def __call__(
        self, mean: Tensor, var: Tensor, count: int, stats: Stats, labels: Tensor | None, valid: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Stats]:
        """Move the statistics towards the batch and return them; a row with no valid sample stays."""
        new = move_towards(stats, *pool_batch(mean, var, valid), self.alpha, valid)
        return *new, new.detach()


@register("training")
@dataclass(frozen=True)
class Training(NormRule):
    """`torch.nn.BatchNorm2d` in training mode: running variances are unbiased. A single value has no such variance."""

    momentum: Share = 0.1  # share of the newest batch in the running statistics
    classes: ClassVar[int] = 1

    def __call__(
        self, mean: Tensor, var: Tensor, count: int, stats: Stats, labels: Tensor | None, valid: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Stats]:
        """Return the batch's statistics, and move the running ones; a row with no valid sample keeps them."""
        mean, var = pool_batch(mean, var, valid)
        return mean, var, move_towards(stats, mean, unbiased_variance(var, count, valid), self.momentum, valid).detach()


@register("mixed")
@dataclass(frozen=True)
class MixedBatch(NormRule, PerBatch):
    """Normalise with the mean and variance of a mixture, and keep the stored ones: alpha-BN (You et al., 2021).

    A small batch, or one of few classes, says little about its world: its own statistics alone would normalise the
    classes away. Here the batch is a share of a population whose rest has the stored statistics.
    """

    share: Share = 0.3  # of the batch; 1: its own statistics alone

    def __call__(
        self, mean: Tensor, var: Tensor, count: int, stats: Stats, labels: Tensor | None, valid: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Stats]:
        """Return the statistics of the mixture."""
        batch_mean, batch_var = pool_batch(mean, var, valid)
        share = self.share * valid.any(1).to(mean.dtype).view(-1, 1, 1)  # a row with no valid sample has none
        apart = batch_mean - stats.mean
        spread = share * (1 - share) * apart.square()
        return stats.mean + share * apart, stats.var + share * (batch_var - stats.var) + spread, stats
