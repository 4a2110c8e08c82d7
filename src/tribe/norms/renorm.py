"""Normalise as moving statistics do, with the gradient of batch statistics: test-time batch renormalisation (DELTA).

A batch's own statistics are inaccurate where it has few images or few classes; moving ones are not, but no gradient
flows through them. Batch renormalisation (Ioffe, NeurIPS 2017; Zhao et al., ICLR 2023, at test time) normalises with
the batch's and corrects the result with two numbers a channel that count as constants:

    y = (x - mu_batch) / sigma_batch * r + d,   r = sigma_batch / sigma,   d = (mu_batch - mu) / sigma

So y = (x - mu) / sigma. Then mu and sigma move: mu <- alpha mu + (1 - alpha) mu_batch, and sigma alike.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tribe.fields import Share
from tribe.norms import NormRule, Stats, pool_batch, register

NONE_YET = -1.0  # a variance without a first batch


@register("renorm")
@dataclass(frozen=True)
class Renorm(NormRule):
    """Standard deviations are averaged, not variances. The first batch of a row gives its first statistics.

    A negative variance, as in `none_yet`, says that there has been no batch. Then the batch normalises itself.
    """

    alpha: Share = 0.95  # share of the past in the moving statistics
    classes: ClassVar[int] = 1
    stops_gradient: ClassVar[str] = "r and d count as constants"

    @staticmethod
    def none_yet(stats: Stats) -> Stats:
        """Return statistics of this shape that say: no batch yet."""
        return Stats(torch.zeros_like(stats.mean), torch.full_like(stats.var, NONE_YET))

    def __call__(
        self, mean: Tensor, var: Tensor, count: int, stats: Stats, labels: Tensor | None, valid: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Stats]:
        """Return the statistics from before this batch, and move them; a row with no valid sample stays."""
        batch_mean, batch_var = pool_batch(mean, var, valid)
        batch_sigma = (batch_var + eps).sqrt()
        mu, sigma = batch_mean.detach(), batch_sigma.detach()
        first = stats.var < 0
        past_mu = torch.where(first, mu, stats.mean)
        past_sigma = torch.where(first, sigma, (stats.var.clamp_min(0) + eps).sqrt())

        # (x - m) / s = (x - mu_batch) / sigma_batch r + d, with s = sigma_batch / r and m = mu_batch - d s.
        s = batch_sigma * (past_sigma / sigma)
        m = batch_mean - (mu - past_mu) / past_sigma * s

        share = (1 - self.alpha) * valid.any(1).to(mu.dtype).view(-1, 1, 1)
        kept_sigma = past_sigma + share * (sigma - past_sigma)
        any_valid = valid.any(1).view(-1, 1, 1)
        kept = Stats(
            torch.where(any_valid, past_mu + share * (mu - past_mu), stats.mean),
            torch.where(any_valid, (kept_sigma.square() - eps).clamp_min(0), stats.var),
        )
        return m, s.square() - eps, kept
