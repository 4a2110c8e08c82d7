"""Normalise with a moving average that includes this batch: Robust BN (RoTTA, Yuan et al., CVPR 2023)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tribe.norms import Stats, pool_batch, register, require


@register("robust")
@dataclass(frozen=True)
class Robust:
    """stats <- (1 - alpha) stats + alpha batch, which normalise the batch; gradients flow through the batch's share."""

    alpha: float = 0.05  # share of the newest batch
    classes: ClassVar[int] = 1
    observes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(0 <= self.alpha <= 1, "alpha is the newest batch's share of the statistics, 0 to 1", self.alpha)

    def __call__(
        self, mean: Tensor, var: Tensor, count: int, stats: Stats, labels: Tensor | None, valid: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Stats]:
        """Move the statistics towards the batch and return them; a row with no valid sample stays."""
        batch_mean, batch_var = pool_batch(mean, var, valid)
        alpha = self.alpha * valid.any(1).to(mean.dtype).view(-1, 1, 1)  # (R, 1, 1)
        new_mean = stats.mean + alpha * (batch_mean - stats.mean)
        new_var = stats.var + alpha * (batch_var - stats.var)
        return new_mean, new_var, Stats(new_mean.detach(), new_var.detach())
