"""Signs that adapting goes wrong, in what a method predicts and how far it moved; each is compared with a cause.

drift        the affine parameters moved further than the number of steps explains
collapse     nearly all predictions are one class, while the source's predictions of the same images are not
scatter      neighbours share their class according to the source, but not according to the adapted network: batches of
             few classes are normalised with their own statistics, and answers spread over classes that are not there

A stream may show one class for a thousand images, so that one class alone is no sign. Without the source's predictions
`scatter` cannot be measured, and `collapse` needs longer. Thresholds were chosen on CIFAR-10-C; see docs/health.md.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tribe.fields import is_number, is_whole, require

NEAR, MIDDLE, FAR = 32, 256, 2000  # images: neighbours, a burst, the mixture of bursts
WINDOWS = (NEAR, MIDDLE, FAR, NEAR, MIDDLE)  # of the rows of `CollapseState.shares`: three adapted, two of the source
PAIRS = 16  # weight of pairs with earlier images; a batch of n has (n - 1) / 2 pairs of its own for each image


@dataclass(frozen=True)
class CollapseRules:
    """The thresholds, each with what healthy streams reach."""

    drift: float = 0.012  # distance / sqrt(steps): TRIBE 0.0015, TENT 0.003; learning rate x 30 starts at 0.047
    steps: int = 4  # steps before the distance counts
    share: float = 0.93  # of one class in about 250 predictions; TRIBE reaches 0.855 where the source is spread
    spread: float = 0.22  # the source's predictions are spread below: 0 if uniform, 1 if one class
    alone: float = 0.995  # of one class without the source's predictions: 1,300 images in a row
    follow: float = 0.5  # part of the source's order that predictions must follow
    margin: float = 0.03  # of order that they may lack besides
    evidence: float = 16.0  # images without any order; healthy streams reach 14

    def __post_init__(self) -> None:
        for name in ("drift", "share", "spread", "alone", "follow", "margin", "evidence"):
            value = getattr(self, name)
            require(is_number(value) and value > 0, f"{name} of CollapseRules is a number above 0", value)
        require(is_whole(self.steps, least=1), "steps of CollapseRules is a whole number, at least 1", self.steps)


class CollapseState(NamedTuple):
    """Histograms of predictions over windows of several lengths, and sums."""

    shares: Tensor  # (S, 5, K) exponential means times `weight`
    weight: Tensor  # (S, 5) how full each window is
    steps: Tensor  # (S,) int64
    evidence: Tensor  # (S,) of scatter, in images
    length: Tensor  # (S,) int64, images since there was no evidence


class Signs(NamedTuple):
    """Which signs each stream shows, and their numbers, (S,) each."""

    drift: Tensor
    collapse: Tensor
    scatter: Tensor
    distance: Tensor
    top: Tensor
    top_share: Tensor
    order: Tensor
    source_order: Tensor


def start_collapse(streams: int, classes: int, device: torch.device | str | None = None) -> CollapseState:
    """The state before the first image."""
    one = torch.zeros(streams, device=device)
    shares = torch.zeros(streams, len(WINDOWS), classes, device=device)
    count = one.to(torch.int64)
    return CollapseState(shares, shares[..., 0].clone(), count, one, count.clone())


@torch.no_grad()
def look_for_collapse(
    rules: CollapseRules,
    state: CollapseState,
    predicted: Tensor,
    valid: Tensor,
    distance: Tensor,
    source: Tensor | None = None,
    known: Tensor | None = None,
) -> tuple[Signs, CollapseState]:
    """Add a batch: the signs, and the next state.

    Args:
        rules: the thresholds.
        state: what came before.
        predicted: the adapted network's classes (S, B).
        valid: which images count (S, B).
        distance: how far the affine parameters have moved (S,), as in `Info`.
        source: the source's classes (S, B), if they were computed.
        known: for which images (S, B) they were; None: all.
    """
    classes = state.shares.shape[2]
    other = torch.zeros_like(valid) if source is None else valid if known is None else valid & known
    own, own_count = _histogram(predicted, valid, classes)
    theirs, their_count = _histogram(predicted if source is None else source, other, classes)
    means = state.shares / state.weight.unsqueeze(2).clamp_min(1e-6)
    order = _order(own, own_count, means[:, 0], means[:, 2])
    source_order = _order(theirs, their_count, means[:, 3], means[:, 4])
    started = (state.weight[:, 0] > 0) & (state.weight[:, 3] > 0) & (their_count > 0)
    lack = torch.where(started, own_count * (rules.follow * source_order - order - rules.margin), 0.0)
    evidence = (state.evidence + lack).clamp(0, 2 * rules.evidence)

    passed = torch.where(their_count > 0, own_count, 0)  # images, also where the source saw a part of them
    counts = torch.stack((own_count, own_count, own_count, passed, passed), 1)
    keep = torch.stack([torch.exp(-counts[:, i] / window) for i, window in enumerate(WINDOWS)], 1)
    batch = torch.stack((own, own, own, theirs, theirs), 1)
    shares = state.shares * keep.unsqueeze(2) + batch * (1 - keep).unsqueeze(2)
    weight = state.weight * keep + (1 - keep)

    steps = state.steps + (own_count > 0)
    top_share, top = shares[:, 1].max(1)  # not divided by the weight: a short stream is no collapse
    their_mean = shares[:, 4] / weight[:, 4:].clamp_min(1e-6)
    spread = (their_mean.square().sum(1) - 1 / classes) / (1 - 1 / classes)
    compared = weight[:, 4] > 0.5
    alone = (top_share >= rules.alone) & ~compared
    signs = Signs(
        drift=(distance > rules.drift * steps.sqrt()) & (steps >= rules.steps),
        collapse=alone | ((top_share >= rules.share) & compared & (spread <= rules.spread)),
        scatter=evidence >= rules.evidence,
        distance=distance,
        top=top,
        top_share=top_share,
        order=_kept(shares, weight, 0, 2),
        source_order=_kept(shares, weight, 3, 4),
    )
    length = torch.where(evidence > 0, state.length + own_count, 0)
    return signs, CollapseState(shares, weight, steps, evidence, length)


def _histogram(classes_of: Tensor, counted: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The share of each class (S, K) among the images that count, and their number (S,)."""
    numbers = torch.arange(classes, device=classes_of.device)
    hits = ((classes_of.unsqueeze(2) == numbers) & counted.unsqueeze(2)).sum(1)
    count = counted.sum(1)
    return hits / count.clamp_min(1).unsqueeze(1), count


def _order(batch: Tensor, count: Tensor, near: Tensor, far: Tensor) -> Tensor:
    """How much more often neighbours share their class than images far apart do (S,)."""
    own = (count * batch.square().sum(1) - 1) / (count - 1).clamp_min(1)  # pairs of different images of the batch
    pairs = (count - 1).clamp_min(0) / 2
    earlier = (batch * near).sum(1)
    return (own * pairs + earlier * PAIRS) / (pairs + PAIRS) - (batch * far).sum(1)


def _kept(shares: Tensor, weight: Tensor, near: int, far: int) -> Tensor:
    """The order between two windows (S,): for people; `_order` decides."""
    a, b = (shares[:, i] / weight[:, i, None].clamp_min(1e-6) for i in (near, far))
    return (a * (a - b)).sum(1)
