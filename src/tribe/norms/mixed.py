"""Normalise each batch with its own statistics and the stored ones, mixed: alpha-BN (You et al., 2021).

A small batch, or one of few classes, says little about its world: its own statistics alone would normalise the classes
away. Here the batch is a share of a population whose rest has the stored statistics.
"""

from dataclasses import dataclass

from torch import Tensor

from tribe.core.rules import PerBatch
from tribe.norms import Stats, pool_batch, register, require


@register("mixed")
@dataclass(frozen=True)
class MixedBatch(PerBatch):
    """The mean and variance of a mixture: ``share`` of the batch, the rest as stored. The stored ones stay."""

    share: float = 0.3  # of the batch; 1: its own statistics alone

    def __post_init__(self) -> None:
        require(0 <= self.share <= 1, "share is the batch's share of the statistics, 0 to 1", self.share)

    def __call__(
        self, mean: Tensor, var: Tensor, count: int, stats: Stats, labels: Tensor | None, valid: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Stats]:
        """Return the statistics of the mixture."""
        batch_mean, batch_var = pool_batch(mean, var, valid)
        share = self.share * valid.any(1).to(mean.dtype).view(-1, 1, 1)  # a row with no valid sample has none
        apart = batch_mean - stats.mean
        spread = share * (1 - share) * apart.square()
        return stats.mean + share * apart, stats.var + share * (batch_var - stats.var) + spread, stats
