"""A sequential test of whether predictions are as certain as on the source's own images: betting on ranks of entropies.

The rank u of an entropy among the calibration images that got the same prediction is uniform as long as nothing has
changed. Two e-processes test it, one against larger entropies and one against smaller ones: each multiplies its
wealth by 1 + bet * (u - 1/2) for every image, as a gambler does in a fair game. Ville's inequality bounds the chance
that the wealth ever reaches 1 / alpha by alpha, at any time and for any bet that depends on the past only. `Reference`
holds the tolerance within which ranks count as unchanged.

An e-process restarts at 1 whenever it falls below. So a change is found as fast after a year as after a day, and
false alarms come at most once in 1 / alpha images on average (Shin, Ramdas and Rinaldo, E-detectors, 2024).
"""

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from tribe.core.bounds import COUNT, NOT_NEGATIVE

LEVELS = 64  # quantiles kept for each class
MIN_IMAGES_PER_CLASS = 20  # calibration images of a predicted class below which it uses the quantiles of all classes
TOLERANCE_ERRORS = 3.0  # standard errors that are added to the tolerance: the calibration images are a sample, too
MIN_BET = 0.02  # so that the first surprising batch counts
MAX_LOSS = 0.9  # greatest share of the wealth that one image may cost


class Reference(NamedTuple):
    """Entropies of the unchanged source."""

    quantiles: Tensor  # (K, 64) of the entropy for every predicted class, in the middle of equal shares
    tolerance: Tensor  # () how far the mean rank of the images of one true class may be from 1/2 without any change


class MartingaleState(NamedTuple):
    """The two e-processes of every stream, against larger and smaller entropies, and the mean rank."""

    log_wealth: Tensor  # (S, 2) at least 0 before a batch
    bet: Tensor  # (S, 2)
    scale: Annotated[Tensor, NOT_NEGATIVE]  # (S, 2) squared gradients, discounted
    since: Annotated[Tensor, COUNT]  # (S, 2) int64, the image after which an e-process last restarted
    mean: Tensor  # (S,) mean rank of about the last `window` images, times `weight`
    weight: Annotated[Tensor, NOT_NEGATIVE]  # (S,) how full the window is, at most 1
    changed: Tensor  # (S,) bool, from an alarm until the mean rank is normal again


@dataclass(frozen=True)
class Martingale:
    """The settings of the test."""

    alpha: float = 1e-6  # at most one false alarm in 1 / alpha images, on average
    window: int = 500  # images of the mean rank, which says how much changed
    memory: int = 200  # images over which squared gradients are discounted
    rate: float = 0.5  # of the updates of the bet

    def init(self, streams: int, device: torch.device | str | None = None) -> MartingaleState:
        """The state before the first image."""
        two, one = torch.zeros(streams, 2, device=device), torch.zeros(streams, device=device)
        since, changed = two.to(torch.int64), one.to(torch.bool)
        return MartingaleState(two, two + MIN_BET, two.clone(), since, one, one.clone(), changed)

    @torch.no_grad()
    def step(
        self, reference: Reference, state: MartingaleState, ranks: Tensor, valid: Tensor, images: Tensor
    ) -> tuple[Tensor, MartingaleState]:
        """Update with the ranks (S, B) of a batch, after ``images`` (S,) earlier ones; return which streams alarm.

        The bet stays the same within a batch. A stream that alarms starts again when its mean rank is normal.
        """
        count = valid.sum(1)
        excess = ranks - 0.5
        gain = torch.stack((excess, -excess), 1) - reference.tolerance  # (S, 2, B)
        gain = torch.where(valid.unsqueeze(1), gain, 0.0)
        restarts = state.log_wealth <= 0
        odds = 1 + state.bet.unsqueeze(2) * gain
        log_wealth = state.log_wealth.clamp_min(0) + odds.log().sum(2)
        slope = (gain / odds).sum(2)
        scale = state.scale * torch.exp(-count / self.memory).unsqueeze(1) + slope.square()
        most = MAX_LOSS / (0.5 + reference.tolerance)
        bet = (state.bet + self.rate * slope / scale.clamp_min(1e-12).sqrt()).clamp_min(MIN_BET).minimum(most)
        keep = torch.exp(-count / self.window)
        share = (1 - keep) / count.clamp_min(1)
        mean = state.mean * keep + torch.where(valid, ranks, 0.0).sum(1) * share
        weight = state.weight * keep + (1 - keep)
        normal = (mean / weight.clamp_min(1e-12) - 0.5).abs() <= reference.tolerance
        significant = torch.logaddexp(log_wealth[:, 0], log_wealth[:, 1]) - math.log(2) >= -math.log(self.alpha)
        alarm = significant & ~state.changed
        changed = (state.changed | alarm) & ~(normal & ~alarm)
        after = MartingaleState(
            log_wealth=torch.where(changed.unsqueeze(1), 0.0, log_wealth),
            bet=bet,
            scale=scale,
            since=torch.where(restarts & ~state.changed.unsqueeze(1), images.unsqueeze(1), state.since),
            mean=mean,
            weight=weight,
            changed=changed,
        )
        return alarm, after


def rank(reference: Reference, entropy: Tensor, predicted: Tensor) -> Tensor:
    """The ranks in [0, 1] of entropies (S, B) among those of the same predicted class (S, B).

    The rank of a tie is its middle. The bets are linear in the rank, so that only its mean counts, and drawing a random
    number for a tie would only add noise.
    """
    quantiles, value = reference.quantiles[predicted], entropy.unsqueeze(-1)
    return ((quantiles < value).sum(-1) + (quantiles <= value).sum(-1)) / (2 * quantiles.shape[-1])


@torch.no_grad()
def fit_reference(entropy: Tensor, predicted: Tensor, labels: Tensor, classes: int) -> Reference:
    """Fit the reference to labelled source images: entropies, predictions and labels (N,).

    A stream may show its classes in any order, in bursts of any length. The test stays valid: for images that are drawn
    at random given their class, the mean rank of every class is within the tolerance.
    """
    entropy = entropy.float()
    levels = (torch.arange(LEVELS, device=entropy.device) + 0.5) / LEVELS
    pooled = torch.quantile(entropy, levels)
    unknown = torch.where(levels < 0.5, -1.0, 2.0)  # every entropy, a share of log K, has the rank 1/2
    counts = torch.bincount(labels, minlength=classes)
    shown = counts > 0
    rows = []
    for label in range(classes):
        own = entropy[predicted == label]
        few = pooled if shown[label] else unknown
        rows.append(torch.quantile(own, levels) if len(own) >= MIN_IMAGES_PER_CLASS else few)
    reference = Reference(torch.stack(rows), torch.zeros((), device=entropy.device))
    ranks = rank(reference, entropy, predicted)
    means = torch.bincount(labels, ranks, minlength=classes) / counts.clamp_min(1)
    error = TOLERANCE_ERRORS / (12 * counts.clamp_min(1)).sqrt()  # a uniform rank has variance 1/12
    off = torch.where(shown, (means - 0.5).abs() + error, 0.0).amax()
    return reference._replace(tolerance=off.clamp_max(0.4).float())
