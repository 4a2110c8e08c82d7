"""Normalise each batch with its own statistics, and let the running ones follow: BatchNorm as in training."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tribe.norms import Stats, pool_batch, register, require


@register("training")
@dataclass(frozen=True)
class Training:
    """`torch.nn.BatchNorm2d` in training mode: running variances are unbiased. A single value has no such variance."""

    momentum: float = 0.1  # share of the newest batch in the running statistics
    classes: ClassVar[int] = 1
    observes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        momentum = self.momentum
        require(0 <= momentum <= 1, "momentum is the newest batch's share of the statistics, 0 to 1", momentum)

    def __call__(
        self, mean: Tensor, var: Tensor, count: int, stats: Stats, labels: Tensor | None, valid: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Stats]:
        """Return the batch's statistics, and move the running ones; a row with no valid sample keeps them."""
        batch_mean, batch_var = pool_batch(mean, var, valid)
        values = count * valid.sum(1).to(var.dtype).view(-1, 1, 1)  # (R, 1, 1)
        unbiased = batch_var * (values / (values - 1).clamp_min(1))
        share = self.momentum * valid.any(1).to(mean.dtype).view(-1, 1, 1)
        kept_mean = stats.mean + share * (batch_mean - stats.mean)
        kept_var = stats.var + share * (unbiased - stats.var)
        return batch_mean, batch_var, Stats(kept_mean.detach(), kept_var.detach())
