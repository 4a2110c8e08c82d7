"""Keep statistics per class and pool them evenly, so that no class owns the normalisation: Balanced BN (AAAI-24).

Equation numbers are the paper's. F_bhw enters only through each sample's mean and variance over its pixels, because
(1/HW) sum_hw (F_bhw - mu)^2 = var_b + (mean_b - mu)^2. Every sum over classes is written as a sum over samples: each
sample knows the totals of its own class, and the first sample of a class (`lead`) speaks for it. So the cost grows
with the batch and not with K, except for the pooling of the past, which needs no gradient.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from tribe.norms import register
from tribe.state import Stats

Convention = Literal["released", "paper"]

# Where the released implementation and the paper part. NOTE: the paper prints sigma_k, not sigma_k', inside the sum
# over k' of Eq. 4; "paper" computes it as printed.
CONVENTIONS: dict[str, dict[str, Any]] = {
    "released": {"pooled_ddof": 1, "rate_cap": True, "gamma_over": "present"},
    "paper": {"pooled_ddof": 0, "rate_cap": False, "gamma_over": "all"},
}


def settle(config: Any, conventions: dict[str, dict[str, Any]]) -> None:
    """Fill the fields a dataclass left open (None) from its convention, so that what is used is what is shown."""
    if config.convention not in conventions:
        raise ValueError(f"convention is one of {', '.join(conventions)}; got {config.convention!r}")
    for field, value in conventions[config.convention].items():
        if getattr(config, field) is None:
            object.__setattr__(config, field, value)


@register("balanced")
@dataclass(frozen=True)
class Balanced:
    """Balanced BN. Without labels (None) it normalises with the pooled statistics as they stand."""

    classes: int = 10
    eta: float = 0.01  # momentum of one instance
    gamma: float = 0.0  # share of the class-agnostic update: 0 is per class, 1 is Robust BN
    convention: Convention = "released"
    pooled_ddof: int | None = None  # the spread of the class means is divided by K - pooled_ddof
    rate_cap: bool | None = None  # let n_k samples of one class weigh at most 1 in all: rate min(eta, 1 / n_k)
    gamma_over: Literal["present", "all"] | None = None  # classes that share the class-agnostic update
    observes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        settle(self, CONVENTIONS)
        if self.classes < 1:
            raise ValueError(f"classes must be at least 1; got {self.classes}")
        if not (0 < self.eta <= 1 and 0 <= self.gamma <= 1):
            raise ValueError(f"eta lies in (0, 1] and gamma in [0, 1]; got eta {self.eta}, gamma {self.gamma}")
        if self.pooled_ddof not in (0, 1) or self.gamma_over not in ("present", "all"):
            raise ValueError(
                f"pooled_ddof is 0 or 1 and gamma_over 'present' or 'all'; got {self.pooled_ddof}, {self.gamma_over!r}"
            )

    def pool(self, stats: Stats) -> Stats:
        """Eq. 2: the statistics of a population in which every class is equally frequent. (R, K, C) -> (R, 1, C)."""
        centre, within, between = _over_classes(stats)
        return Stats(centre, within + between / self._freedom)

    @property
    def _freedom(self) -> int:
        return max(self.classes - (self.pooled_ddof or 0), 1)

    def __call__(
        self, mean: Tensor, var: Tensor, count: int, stats: Stats, labels: Tensor | None, valid: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Stats]:
        """Update the statistics of the classes in the batch (Eqs. 1, 3, 4), pool them (Eq. 2), normalise with that."""
        if labels is None:
            return *self.pool(stats), stats
        classes, gamma = self.classes, self.gamma
        same, lead, n = _groups(labels, valid, mean.dtype)  # (R, B, B), (R, B, 1), (R, B, 1)
        rate = torch.full_like(n, self.eta)
        if self.rate_cap:
            rate = torch.minimum(rate, 1 / n.clamp_min(1))
        own = labels.unsqueeze(-1).expand(mean.shape)  # (R, B, C)
        mu, sigma2 = stats.mean.gather(1, own), stats.var.gather(1, own)  # of each sample's class, before this batch

        # Eq. 1: what each class sees in this batch, told to every sample of it.
        d = mean - mu
        delta = rate * _class_sum(same, d)  # delta_k
        square = rate * _class_sum(same, var + d.square())
        growth = square - delta.square() - rate * n * sigma2

        # Eqs. 3 and 4: a share gamma goes to all classes alike. The sums run over the classes present.
        over = lead.sum(1, keepdim=True).clamp_min(1) if self.gamma_over == "present" else classes
        step = (1 - gamma) * delta
        shared_step = gamma * (lead * delta).sum(1, keepdim=True) / over  # (R, 1, C)
        shared_square = gamma * (lead * (square - delta.square())).sum(1, keepdim=True) / over
        shared_rate = gamma * (lead * rate * n).sum(1, keepdim=True) / over  # (R, 1, 1)
        shrinks_last = self.gamma_over == "present"  # released: the shared part shrinks variances already updated

        def share(after: Tensor, before: Tensor) -> Tensor:
            return after + shared_square - shared_rate * (after if shrinks_last else before)

        # Eq. 2, from the past's pooled moments and this batch's increments; only the latter carry a gradient.
        centre, within, between = _over_classes(stats)  # (R, 1, C)
        pooled_step = (lead * step).sum(1, keepdim=True) / classes
        pooled_mean = centre + pooled_step + shared_step
        pooled_within = share(within + (1 - gamma) * (lead * growth).sum(1, keepdim=True) / classes, within)
        spread = (lead * step * (2 * (mu - centre) + step)).sum(1, keepdim=True) - classes * pooled_step.square()
        pooled_var = pooled_within + (between + spread) / self._freedom

        with torch.no_grad():
            kept_mean = stats.mean.scatter_add(1, own, lead * step)
            kept_var = stats.var.scatter_add(1, own, (1 - gamma) * lead * growth)
            if gamma:
                kept_mean, kept_var = kept_mean.add_(shared_step), share(kept_var, stats.var)
        # NOTE: in no equation. Without the cap (as printed) a class with n_k > 1 / eta can drive its variance below 0.
        return pooled_mean, pooled_var.clamp_min(0), Stats(kept_mean, kept_var)


def _over_classes(stats: Stats) -> tuple[Tensor, Tensor, Tensor]:
    """Mean of the class means, mean of the class variances, and the class means' summed squared spread; (R, 1, C)."""
    centre = stats.mean.mean(1, keepdim=True)
    return centre, stats.var.mean(1, keepdim=True), (stats.mean - centre).square_().sum(1, keepdim=True)


def _groups(labels: Tensor, valid: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Which samples share a class (R, B, B), which is the first of its class (R, B, 1), and n_k (R, B, 1)."""
    same = (labels.unsqueeze(2) == labels.unsqueeze(1)) & valid.unsqueeze(2) & valid.unsqueeze(1)
    lead = valid & ~same.tril(-1).any(2)
    return same, lead.unsqueeze(-1).to(dtype), same.sum(2, keepdim=True).to(dtype)


def _class_sum(same: Tensor, t: Tensor) -> Tensor:
    """Sum (R, B, C) over the samples of each sample's class."""
    # In float64 where there is one: the sums are small, and neither TF32 nor autocast reaches them there.
    exact = t.dtype if t.device.type == "mps" else torch.float64
    return (same.to(exact) @ t.to(exact)).to(t.dtype)
