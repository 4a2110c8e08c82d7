"""Say, without labels, whether adapting helps: pass a few images through the source too, and compare the predictions.

Predictions that are certain of each image and spread over the classes say much about the images. That is their mutual
information, the entropy of the mean prediction less the mean entropy. On the images that pass both networks,

    benefit = information of the adapted network's predictions - information of the source's.

It had the sign of the gain in accuracy in 58 of 60 comparisons on three networks (docs/bank.md).
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from tribe.core.bounds import NOT_NEGATIVE

MEMORY = 128.0  # images over which predictions are averaged
FIRST = 8.0  # images that the even predictions before the first image weigh
MARGIN = 0.01  # of benefit: adapting must be better by so much
DEVIATIONS = 1.0  # standard errors by which adapting gets the benefit of the doubt
SCALE = 0.02  # of benefit: how softly the source takes over
SPREAD = 0.1  # of an image's benefit, the variance before any image
SMALL = 1e-9


class Probes(NamedTuple):
    """Averages over the images that passed both networks."""

    posterior: Tensor  # (S, 2, K), of the source and of the adapted network
    entropy: Tensor  # (S, 2)
    spread: Annotated[Tensor, NOT_NEGATIVE]  # (S,), the variance of an image's benefit
    images: Annotated[Tensor, NOT_NEGATIVE]  # (S,), how many, at most `MEMORY`


def first_probes(like: Tensor, streams: int, classes: int) -> Probes:
    """Return averages of no image: both networks say nothing."""
    even = like.new_full((streams, 2, classes), 1 / classes)
    return Probes(even, _entropy(even), like.new_full((streams,), SPREAD), like.new_zeros(streams))


def benefit(probes: Probes) -> Tensor:
    """Return the information of the adapted network less that of the source, in nats: (S,)."""
    source, adapted = (_entropy(probes.posterior) - probes.entropy).unbind(1)
    return adapted - source


def source_share(probes: Probes) -> Tensor:
    """Return how much of the normalisation the source should take over, (S,): 0 unless it is known to be better."""
    images = probes.images
    known = benefit(probes) * images / (images + FIRST)
    doubt = DEVIATIONS * (probes.spread / (images + 4)).sqrt()
    return ((MARGIN - known - doubt) / SCALE).sigmoid()


def add_probes(probes: Probes, source: Tensor, adapted: Tensor, weight: Tensor) -> Probes:
    """Average the logits (S, B, K) of both networks over the images of weight 1, (S, B)."""
    posterior = torch.stack((source, adapted), 1).softmax(-1)  # (S, 2, B, K)
    added = weight.sum(1)
    mean = weight.unsqueeze(1).unsqueeze(3) / added.clamp_min(1).view(-1, 1, 1, 1)  # (S, 1, B, 1)
    rate = torch.maximum(added / MEMORY, added / (probes.images + added + FIRST)).clamp_max(1)
    entropy = _entropy(posterior)  # (S, 2, B)
    surprise = -(posterior * probes.posterior.unsqueeze(2).clamp_min(SMALL).log()).sum(-1) - entropy
    by_image = surprise[:, 1] - surprise[:, 0] - benefit(probes).unsqueeze(1)
    spread = (mean[:, 0, :, 0] * by_image.square()).sum(1)
    each = rate.unsqueeze(1)
    return Probes(
        torch.lerp(probes.posterior, (mean * posterior).sum(2), torch.where(added > 0, rate, 0).view(-1, 1, 1)),
        torch.lerp(probes.entropy, (mean[..., 0] * entropy).sum(2), each),
        torch.lerp(probes.spread, spread, rate),
        (probes.images + added).clamp_max(MEMORY),
    )


def _entropy(posterior: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(posterior).sum(-1)
    return entropy
