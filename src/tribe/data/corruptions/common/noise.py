"""Noise: each value of an image changes by itself."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from tribe.data.corruptions.families import Draw, Params, corruption


@corruption(
    "gaussian_noise", family="common", table=(0.04, 0.06, 0.08, 0.09, 0.10), large=(0.08, 0.12, 0.18, 0.26, 0.38)
)
def gaussian_noise(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Add normal noise."""
    (sd,) = params
    return draw.normal(x.shape[1:]).mul_(sd).add_(x)


@corruption("shot_noise", family="common", table=(500, 250, 100, 75, 50), large=(60, 25, 12, 5, 3))
def shot_noise(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Poisson(c x) / c, by inversion: one sorted table holds the quantiles of all brightnesses."""
    (c,) = params
    table, first = (t.to(x.device) for t in _poisson_table(float(c)))
    width = len(table) // len(first)
    level = (x * (255 * FINE)).round_().to(torch.int64)  # brightness in steps of an eighth of a grey level
    place = torch.searchsorted(table, draw.uniform(x.shape[1:]).to(torch.float64).add_(level), right=True)
    counts = place.sub_(level * width).clamp_(max=width - 1).add_(first[level])
    return counts.to(x.dtype).div_(c)


FINE = 8  # steps a grey level


@lru_cache(8)
def _poisson_table(c: float) -> tuple[Tensor, Tensor]:
    """Return `level + P(X <= k)` for each brightness, flat in one row, and the first k of each brightness."""
    rate = torch.arange(255 * FINE + 1, dtype=torch.float64) * (c / (255 * FINE))  # (levels,)
    reach = 7 * rate.sqrt()
    first = (rate - reach - 3).floor().clamp(min=0)
    k = first[:, None] + torch.arange(int(14 * math.sqrt(c)) + 20)  # (levels, width)
    mass = (torch.xlogy(k, rate[:, None]) - rate[:, None] - torch.lgamma(k + 1)).exp()
    total = mass.cumsum(1).clamp(max=1)
    return (total + torch.arange(len(rate))[:, None]).flatten(), first.to(torch.int64)


@corruption(
    "impulse_noise", family="common", table=(0.01, 0.02, 0.03, 0.05, 0.07), large=(0.03, 0.06, 0.09, 0.17, 0.27)
)
def impulse_noise(x: Tensor, params: Params, draw: Draw) -> Tensor:
    """Salt and pepper: make a share of the values white or black."""
    (amount,) = params
    u = draw.uniform(x.shape[1:])
    return torch.where(u < amount, (u < amount / 2).to(x.dtype), x)
