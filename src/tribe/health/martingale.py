"""A sequential test of whether predictions are as certain as on the source's own images: betting on ranks of entropies.

The rank u of an entropy among the calibration images that got the same prediction is uniform as long as nothing has
changed. Two e-processes test it, one against larger entropies and one against smaller ones: each multiplies its
wealth by 1 + bet * (u - 1/2) for every image, as a gambler does in a fair game. Ville's inequality bounds the chance
that the wealth ever reaches 1 / alpha by alpha, at any time and for any bet that depends on the past only. `Reference`
holds the tolerance within which ranks count as unchanged.

An e-process restarts at 1 whenever it falls below. So a change is found as fast after a year as after a day, and
false alarms come at most once in 1 / alpha images on average (Shin, Ramdas and Rinaldo, E-detectors, 2024).

After an alarm another gambler bets that the change is over: against ranks that are still half as far from 1/2, in the
same direction, as they were at the alarm. When he has won, the test begins anew. So an alarm ends as soon as the ranks
say so, and does not wait for a mean over the past to become normal again.
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
TINY = 1e-6  # the least level of a change
MAX_LOSS = 0.9  # greatest share of the wealth that one image may cost


class Reference(NamedTuple):
    """Entropies of the unchanged source."""

    quantiles: Tensor  # (K, 64) of the entropy for every predicted class, in the middle of equal shares
    tolerance: Tensor  # () how far the mean rank of the images of one true class may be from 1/2 without any change


class MartingaleState(NamedTuple):
    """The two e-processes of every stream, against larger and smaller entropies, and one that a change is over."""

    log_wealth: Tensor  # (S, 2) at least 0 before a batch
    bet: Tensor  # (S, 2)
    scale: Annotated[Tensor, NOT_NEGATIVE]  # (S, 2) squared gradients, discounted
    since: Annotated[Tensor, COUNT]  # (S, 2) int64, the image after which an e-process last restarted
    excess: Tensor  # (S, 2) sum of the ranks since then, less 1/2 each; as it was at the alarm while a change lasts
    ranks: Annotated[Tensor, NOT_NEGATIVE]  # (S, 2) how many these are
    level: Tensor  # (S,) the mean rank at the alarm, less 1/2; 0: no change
    over: Tensor  # (S,) logarithm of the wealth of the gambler that the change is over; at least 0 before a batch
    changed: Tensor  # (S,) bool, from an alarm until the change is over


@dataclass(frozen=True)
class Martingale:
    """The settings of the test."""

    alpha: float = 1e-6  # at most one false alarm in 1 / alpha images, on average
    end: float = 0.01  # how seldom a change that is half as large, and no less than the tolerance, counts as over
    memory: int = 200  # images over which squared gradients are discounted
    rate: float = 1.0  # of the updates of the bet; with 0.5 alarms come a quarter later

    def init(self, streams: int, device: torch.device | str | None = None) -> MartingaleState:
        """The state before the first image."""
        two, one = torch.zeros(streams, 2, device=device), torch.zeros(streams, device=device)
        since, changed = two.to(torch.int64), one.to(torch.bool)
        bets, sums = (two + MIN_BET, two.clone()), (two.clone(), two.clone())
        return MartingaleState(two, *bets, since, *sums, one, one.clone(), changed)

    @torch.no_grad()
    def step(
        self, reference: Reference, state: MartingaleState, ranks: Tensor, valid: Tensor, images: Tensor
    ) -> tuple[Tensor, MartingaleState]:
        """Update with the ranks (S, B) of a batch, after ``images`` (S,) earlier ones; return which streams alarm.

        The bet stays the same within a batch. A stream that alarms starts again when the change is over.
        """
        count, was = valid.sum(1), state.changed.unsqueeze(1)
        excess = torch.where(valid, ranks - 0.5, 0.0)
        gain = torch.stack((excess, -excess), 1) - reference.tolerance  # (S, 2, B)
        gain = torch.where(valid.unsqueeze(1), gain, 0.0)
        restarts = (state.log_wealth <= 0) & ~was
        odds = 1 + state.bet.unsqueeze(2) * gain
        log_wealth = state.log_wealth.clamp_min(0) + odds.log().sum(2)
        slope = (gain / odds).sum(2)
        scale = state.scale * torch.exp(-count / self.memory).unsqueeze(1) + slope.square()
        most = MAX_LOSS / (0.5 + reference.tolerance)
        bet = (state.bet + self.rate * slope / scale.clamp_min(1e-12).sqrt()).clamp_min(MIN_BET).minimum(most)
        sums, counts = (torch.where(restarts, 0.0, t) for t in (state.excess, state.ranks))
        sums, counts = sums + excess.sum(1, keepdim=True) * ~was, counts + count.unsqueeze(1) * ~was
        significant = torch.logaddexp(log_wealth[:, 0], log_wealth[:, 1]) - math.log(2) >= -math.log(self.alpha)
        alarm = significant & ~state.changed
        larger, means = log_wealth[:, 0] >= log_wealth[:, 1], sums / counts.clamp_min(1)
        at_least = reference.tolerance.clamp_min(TINY)
        level = torch.where(larger, means[:, 0].maximum(at_least), means[:, 1].minimum(-at_least))
        over = state.over + self._bet_that_it_is_over(reference, state.level, excess, valid)
        changed = alarm | (state.changed & (over < -math.log(self.end)))
        after = MartingaleState(
            log_wealth=torch.where(was | changed.unsqueeze(1), 0.0, log_wealth),
            bet=bet,
            scale=scale,
            since=torch.where(restarts, images.unsqueeze(1), state.since),
            excess=sums,
            ranks=counts,
            level=torch.where(alarm, level, torch.where(changed, state.level, 0.0)),
            over=torch.where(changed & ~alarm, over.clamp_min(0), 0.0),
            changed=changed,
        )
        return alarm, after

    def _bet_that_it_is_over(self, reference: Reference, level: Tensor, excess: Tensor, valid: Tensor) -> Tensor:
        """The logarithm of what a gambler wins (S,) from ranks less 1/2 (S, B) after a change of this level (S,).

        The bet is the best one if ranks are uniform again, to second order: gain over variance and squared gain.
        """
        least = (level.abs() / 2).maximum(reference.tolerance).clamp_max(0.5).unsqueeze(1)
        gain = least - level.sign().unsqueeze(1) * excess
        won: Tensor = torch.where(valid, (least / (1 / 12 + least.square()) * gain).log1p(), 0.0).sum(1)
        return won


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
