"""Normalise each batch with its own mean and variance, and keep nothing (Schneider et al., NeurIPS 2020)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tribe import kernels
from tribe.norms import register
from tribe.state import Stats


def pool_batch(mean: Tensor, var: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Pool per-sample moments (R, B, C) over the valid samples: (R, 1, C) mean and biased variance."""
    if kernels.pools(mean):
        return _Pool.apply(mean, var, valid)  # type: ignore[no-any-return,no-untyped-call]
    share = valid.to(mean.dtype)
    share = (share / share.sum(1, keepdim=True).clamp_min(1)).unsqueeze(-1)  # (R, B, 1)
    centre = (share * mean).sum(1, keepdim=True)
    return centre, (share * (var + (mean - centre).square())).sum(1, keepdim=True)


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, var: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        centre, spread, count = kernels.pool(mean, var, valid)
        ctx.save_for_backward(mean, valid, centre, count)
        return centre, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_centre: Tensor, by_spread: Tensor) -> tuple[Tensor, Tensor, None]:
        return *kernels.pool_backward(by_centre, by_spread, *ctx.saved_tensors), None


@register("batch")
@dataclass(frozen=True)
class Batch:
    """The batch's own statistics. A batch of one sample without pixels normalises to the bias."""

    classes: ClassVar[int] = 1
    observes: ClassVar[bool] = True

    def __call__(
        self, mean: Tensor, var: Tensor, count: int, stats: Stats, labels: Tensor | None, valid: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Stats]:
        """Return the batch's statistics; the stored ones stay."""
        return *pool_batch(mean, var, valid), stats
