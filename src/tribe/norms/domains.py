"""Keep statistics per domain and class, and normalise each image with its domain's: balanced domain normalisation.

BDN, of UniTTA (Du et al., 2024), is Balanced BN (see `tribe.norms.balanced`) within each domain: the statistics of a
class in a domain follow its images, and those of a domain are the ones of a population in which all its classes are
equally frequent. A label is a domain and a class in one number: domain * K + class.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tribe.fields import Count, PositiveShare
from tribe.norms import NormRule, Stats, register


class DomainGroups(NamedTuple):
    """The same for all layers: the labels, and how much each image counts."""

    labels: Tensor  # (R, B) domain * K + class
    rate: Tensor  # (R, B, 1), 0 for images that do not count


Labels = Tensor | DomainGroups | None


@register("domains")
@dataclass(frozen=True)
class Domains(NormRule):
    """Statistics for ``domains`` x ``per_domain``. Without labels (None) it normalises with those of the first domain.

    NOTE: a class with more than 1 / eta images in the batch moves by their mean and no further, as in TRIBE's released
    Balanced BN. BDN's release has no such limit; it matters from 100 images of a class in a batch (CIFAR-10's eta) on.
    """

    per_domain: Count = 10  # K, classes
    domains: Count = 4  # D
    eta: PositiveShare = 0.01  # momentum of one image

    @property
    def classes(self) -> int:
        """Return D K, the number of statistics that are kept per channel."""
        return self.domains * self.per_domain

    def pool(self, stats: Stats) -> Stats:
        """Return the statistics of each domain: (R, D K, C) -> (R, D, C)."""
        mean, var = (t.unflatten(1, (self.domains, self.per_domain)) for t in stats)
        centre = mean.mean(2, keepdim=True)
        spread = (mean - centre).square().sum(2) / max(self.per_domain - 1, 1)
        return Stats(centre.squeeze(2), var.mean(2) + spread)

    def group(self, labels: Tensor, valid: Tensor, dtype: torch.dtype) -> DomainGroups:
        """Return the weight of each image, from (R, B) labels and valid marks: eta, or less if its class has many."""
        counts = torch.zeros(len(labels), self.classes, dtype=dtype, device=labels.device)
        counts = counts.scatter_add_(1, labels, valid.to(dtype)).gather(1, labels)
        rate = valid.to(dtype) * torch.clamp(1 / counts.clamp_min(1), max=self.eta)
        return DomainGroups(labels, rate.unsqueeze(2))

    def __call__(
        self, mean: Tensor, var: Tensor, count: int, stats: Stats, labels: Labels, valid: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Stats]:
        """Update the statistics of the classes in the batch, and return those of each image's domain."""
        if labels is None:
            pooled = self.pool(stats)
            return pooled.mean[:, :1], pooled.var[:, :1], stats
        labels, rate = labels if isinstance(labels, DomainGroups) else self.group(labels, valid, mean.dtype)
        index = labels.unsqueeze(2).expand(mean.shape)  # (R, B, C)
        mu, sigma2 = (t.gather(1, index) for t in stats)  # of each image's class in its domain, before this batch
        d = mean - mu
        nothing = torch.zeros_like(stats.mean)
        delta = nothing.scatter_add(1, index, rate * d)
        growth = nothing.scatter_add(1, index, rate * (var + d.square() - sigma2))
        new = Stats(stats.mean + delta, (stats.var + growth - delta.square()).clamp_min(0))
        own = (labels // self.per_domain).unsqueeze(2).expand(mean.shape)
        pooled_mean, pooled_var = (t.gather(1, own) for t in self.pool(new))
        return pooled_mean, pooled_var, Stats(new.mean.detach(), new.var.detach())
