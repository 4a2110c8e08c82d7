"""Predictions of the source for some images of a stream, in one pass: a second opinion that does not adapt.

Of every so many valid images of a batch, one is a probe. The pass normalises with the source's statistics, and looks at
those that the probes have: how far they are from the source's tells how much the images have changed, whatever the
network predicts.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.rules import Frozen, pool_batch
from tribe.core.state import Stats
from tribe.health.changes import DEPTHS, moves_by_depth

SPAN = 16  # probes over which their statistics are averaged, about


@dataclass(frozen=True)
class ReturnBatchStats:
    """Normalise with the stored statistics, or with those of the batch, and return those of the batch."""

    stored: bool

    classes: ClassVar[int] = 1
    observes: ClassVar[bool] = True

    def __call__(
        self, mean: Tensor, var: Tensor, count: int, stats: Stats, labels: Tensor | None, valid: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Stats]:
        """Return the mean and variance to normalise with, and the batch's statistics."""
        own = Stats(*pool_batch(mean, var, valid))
        return *(stats if self.stored else own), own


class ShiftState(NamedTuple):
    """The statistics of the last probes of each stream: exponential means times `weight`."""

    mean: Tensor  # (S, C)
    square: Tensor  # (S, C) of the values, not of their distance from the mean
    weight: Tensor  # (S,) 0 before the first image, then up to 1


class Answers(NamedTuple):
    """The source's predictions of the probes among the images of a batch."""

    logits: Tensor  # (S, B, K), the source's logits of the probes, float32; zero for other images
    known: Tensor  # (S, B), which images are probes
    shift: Tensor  # (S, 3), distance of the statistics of the last probes by depth: see `measure_shift`


def start_shift(net: Backbone, streams: int) -> ShiftState:
    """The state before the first image."""
    stats = net.source(streams)[1]
    none = torch.zeros_like(stats.mean[:, 0], dtype=torch.float32)
    return ShiftState(none, none.clone(), torch.zeros(streams, device=none.device))


@torch.no_grad()
def ask(
    net: Backbone, state: ShiftState, x: Tensor, valid: Tensor, every: int, measures: bool = True
) -> tuple[Answers, ShiftState]:
    """Pass one in ``every`` of the valid images (S, B, ...) of a batch through the source.

    Without ``measures`` it only predicts, which is half the work: statistics tell something with a calibration only.
    """
    place = (~valid).byte().argsort(dim=1, stable=True)[:, ::every]  # (S, n), valid images first
    real = valid.gather(1, place)
    row = torch.arange(len(x), device=x.device).unsqueeze(1)
    probes = x[row, place].masked_fill(~real.view(*real.shape, *[1] * (x.dim() - 2)), 0)  # others may be NaN
    affine, stats = net.origin.state if len(x) == 1 else net.source(len(x))
    output = net(probes, affine, stats, ReturnBatchStats(stored=True) if measures else Frozen(), valid=real)
    some = output.logits.float()
    fine = real & some.isfinite().all(2)
    none = some.new_zeros(*valid.shape, some.shape[2])
    logits = none.scatter(1, place.unsqueeze(2).expand_as(some), torch.where(fine.unsqueeze(2), some, 0))
    known = torch.zeros_like(valid).scatter(1, place, fine)
    if not measures:
        return Answers(logits, known, state.weight.new_zeros(len(x), DEPTHS)), state
    state = _remember(state, output.stats, fine.sum(1))
    return Answers(logits, known, measure_shift(net, state)), state


def _remember(state: ShiftState, stats: Stats, probes: Tensor) -> ShiftState:
    """Add the statistics (S, 1, C) of so many probes (S,)."""
    keep = torch.exp(-probes / SPAN)
    add = torch.where(probes > 0, 1 - keep, 0).unsqueeze(1)
    mean, var = (t[:, 0].float().nan_to_num() for t in stats)
    kept = [t * keep.unsqueeze(1) for t in (state.mean, state.square)]
    return ShiftState(kept[0] + add * mean, kept[1] + add * (var + mean.square()), state.weight * keep + add[:, 0])


def measure_shift(net: Backbone, state: ShiftState) -> Tensor:
    """Return the distance of the last probes' statistics from the source's, in deviations (S, 3); 0: no probe yet."""
    if not state.mean.shape[1]:
        return state.weight.new_zeros(len(state.weight), DEPTHS)
    weight = state.weight.clamp_min(1e-6).unsqueeze(1)
    mean = state.mean / weight
    now = Stats(mean.unsqueeze(1), (state.square / weight - mean.square()).clamp_min(0).unsqueeze(1))
    far = moves_by_depth(net, Stats(*(t.float() for t in net.origin.state.stats)), now)
    return torch.where(state.weight.unsqueeze(1) > 0, far, 0)
