"""Say, without labels, whether adapting helps: pass a few images through the source too, and compare the predictions.

Predictions that are certain of each image and spread over the classes say much about the images. That is their mutual
information, the entropy of the mean prediction less the mean entropy. On the images that pass both networks,

    benefit = information of the adapted network's predictions - information of the source's.

It had the sign of the gain in accuracy in 58 of 60 comparisons on three networks (docs/budget.md).
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from tribe.core.bounds import NOT_NEGATIVE

MEMORY = 128.0  # images over which predictions are averaged
FIRST = 8.0  # images that the even predictions before the first image weigh
MARGIN = 0.02  # of benefit: near the source, adapting must be better by twice as much
DEVIATIONS = 1.0  # standard errors that the benefit of the doubt is worth
NEAR, FAR = 0.02, 0.04  # divergence from the source: who gets it
SCALE = 0.02  # of benefit: how softly the source takes over
SPREAD = 0.1  # of an image's benefit, the variance before any image
MOST = 0.5  # nats of benefit that an image may have: single images must not decide
SMALL = 1e-9


class Probes(NamedTuple):
    """Averages over the images that passed both networks."""

    posterior: Tensor  # (S, 2, K), of the source and of the adapted network
    benefit: Tensor  # (S,), in nats
    spread: Annotated[Tensor, NOT_NEGATIVE]  # (S,), the variance of an image's benefit
    images: Annotated[Tensor, NOT_NEGATIVE]  # (S,), how many, at most `MEMORY`


def first_probes(like: Tensor, streams: int, classes: int) -> Probes:
    """Return averages of no image: both networks say nothing."""
    even, zero = like.new_full((streams, 2, classes), 1 / classes), like.new_zeros(streams)
    return Probes(even, zero, torch.full_like(zero, SPREAD), zero.clone())


def source_share(probes: Probes, distance: Tensor) -> Tensor:
    """Return how much of the normalisation the source should take over, (S,).

    In a world near to the source's (``distance``, (S,)) the source gets the benefit of the doubt; far away, adapting.
    """
    images = probes.images
    known = probes.benefit * images / (images + FIRST)
    doubt = DEVIATIONS * (probes.spread / (images + 4)).sqrt()
    side = ((distance - (NEAR + FAR) / 2) * (2 / (FAR - NEAR))).clamp(-1, 1)
    share: Tensor = ((MARGIN * (1 - side) - known - side * doubt) / SCALE).sigmoid()
    return share


def add_probes(probes: Probes, source: Tensor, adapted: Tensor, weight: Tensor) -> Probes:
    """Average the logits (S, B, K) of both networks over the images of weight 1, (S, B)."""
    posterior = torch.stack((source, adapted), 1).to(probes.posterior).softmax(-1)  # (S, 2, B, K)
    added = weight.sum(1)
    mean = weight / added.clamp_min(1).unsqueeze(1)  # (S, B)
    rate = torch.maximum(added / MEMORY, added / (probes.images + added + FIRST)).clamp_max(1)
    average = probes.posterior.lerp((mean.view(len(mean), 1, -1, 1) * posterior).sum(2), rate.view(-1, 1, 1))
    average = torch.where(added.view(-1, 1, 1) > 0, average, probes.posterior)
    # What an image's prediction says: its divergence from the average one.
    says = (posterior * (posterior.clamp_min(SMALL) / average.unsqueeze(2).clamp_min(SMALL)).log()).sum(-1)
    by_image = (says[:, 1] - says[:, 0]).clamp(-MOST, MOST)
    apart = by_image - probes.benefit.unsqueeze(1)
    return Probes(
        average,
        probes.benefit + rate * (mean * apart).sum(1),
        torch.where(added > 0, probes.spread.lerp((mean * apart.square()).sum(1), rate), probes.spread),
        (probes.images + added).clamp_max(MEMORY),
    )
