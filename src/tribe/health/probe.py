"""The source beside a stream: its predictions of some images, and how far statistics are from its own.

Of every so many valid images of a batch, one is a probe: in one pass the source predicts it, a second opinion that does
not adapt. The pass normalises with the source's statistics, and looks at those that the probes have: how far they are
from the source's tells how much the images have changed, whatever the network predicts.

A guard leans on the source by the distance of the adapted statistics. Adapting costs accuracy where nothing has
changed; where much has changed, statistics are what helps most.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.bounds import NOT_NEGATIVE
from tribe.core.rules import Frozen, Recorded, pool_batch
from tribe.core.state import Stats
from tribe.core.validation import good_images
from tribe.health.changes import DEPTHS, constants, moves_by_depth
from tribe.norms.balanced import Balanced

OFTEN = 4  # after a hint of a change, one image in so many is a probe
SPAN = 16  # probes over which their statistics are averaged, about
POWER = 4  # how sharply the share rises around `midpoint`
RATIO = 1.4  # of a fitted `midpoint` to the distance that clean images have: 0.06 to 0.043 for ResNet-20 on CIFAR-10
LEAST = 200  # images that tell this distance
BATCH = 64  # the most images that pass at once: a large image takes megabytes in every layer


@dataclass(frozen=True)
class ReturnBatchStats:
    """Normalise with the statistics of the batch, and return them."""

    classes: ClassVar[int] = 1
    observes: ClassVar[bool] = True

    def __call__(
        self, mean: Tensor, var: Tensor, count: int, stats: Stats, labels: Tensor | None, valid: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Stats]:
        """Return the batch's statistics, to normalise with and to keep."""
        own = Stats(*pool_batch(mean, var, valid))
        return *own, own


class ShiftState(NamedTuple):
    """The statistics of the last probes of each stream: exponential means times `weight`."""

    mean: Tensor  # (S, C)
    square: Annotated[Tensor, NOT_NEGATIVE]  # (S, C) of the values, not of their distance from the mean
    weight: Annotated[Tensor, NOT_NEGATIVE]  # (S,) 0 before the first image, then up to 1


class Answers(NamedTuple):
    """The source's predictions of the probes among the images of a batch."""

    logits: Tensor  # (S, B, K), the source's logits of the probes, float32; zero for other images
    known: Tensor  # (S, B), which images are probes
    shift: Tensor  # (S, 3), distance of the statistics of the last probes by depth: see `measure_shift`
    weight: Tensor | None = None  # (S,) how many images a probe stands for, relative to the usual; None: 1


def start_shift(net: Backbone, streams: int) -> ShiftState:
    """The state before the first image."""
    stats = net.source(streams)[1]
    none = torch.zeros_like(stats.mean[:, 0], dtype=torch.float32)
    return ShiftState(none, none.clone(), torch.zeros(streams, device=none.device))


@torch.no_grad()
def ask(
    net: Backbone,
    state: ShiftState,
    x: Tensor,
    valid: Tensor,
    every: int,
    measures: bool = True,
    often: Tensor | None = None,
) -> tuple[Answers, ShiftState]:
    """Pass one in ``every`` of the valid images (S, B, ...) of a batch through the source.

    Of the streams that are marked in ``often`` (S,) it is one in `OFTEN`, which divides ``every``; None: of none.
    Without ``measures`` it only predicts, which is half the work: statistics tell something with a calibration only.
    """
    step = every if often is None else OFTEN
    place = (~valid).byte().argsort(dim=1, stable=True)[:, ::step]  # (S, n), valid images first
    real = valid.gather(1, place)
    if often is not None:
        real &= often.unsqueeze(1) | (torch.arange(place.shape[1], device=x.device) % (every // OFTEN) == 0)
    row = torch.arange(len(x), device=x.device).unsqueeze(1)
    probes = x[row, place].masked_fill(~real.view(*real.shape, *[1] * (x.dim() - 2)), 0)  # others may be NaN
    affine, stats = net.origin.state if len(x) == 1 else net.source(len(x))
    output = net(probes, affine, stats, Recorded() if measures else Frozen(), valid=real)
    some = output.logits.float()
    fine = real & some.isfinite().all(2)
    none = some.new_zeros(*valid.shape, some.shape[2])
    logits = none.scatter(1, place.unsqueeze(2).expand_as(some), torch.where(fine.unsqueeze(2), some, 0))
    known = torch.zeros_like(valid).scatter(1, place, fine)
    if not measures:
        return Answers(logits, known, state.weight.new_zeros(len(x), DEPTHS)), state
    state = _remember(state, Stats(*pool_batch(output.stats.mean, output.stats.var, real)), fine.sum(1))
    weight = None if often is None else torch.where(often, OFTEN / every, 1.0)
    return Answers(logits, known, measure_shift(net, state), weight), state


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


@torch.no_grad()
def source_logits(net: Backbone, images: Tensor) -> Tensor:
    """The source network's logits (N, K)."""
    affine, stats = net.source()
    batches = (batch.to(net.device).unsqueeze(0) for batch in images.split(BATCH))
    return torch.cat([net(batch, affine, stats, Frozen()).logits[0].cpu().float() for batch in batches])


# -- the distance of statistics, by which a guard leans ----------------------------------------------------------------


@torch.no_grad()
def shift_weight(net: Backbone, stats: Stats, squared: float | Tensor) -> Tensor:
    """From 0, where nothing has changed, to 1 (S,); 1/2 where the squared distance of statistics is ``squared``."""
    far = distance_of_statistics(net, stats) ** POWER
    return far / (far + squared ** (POWER // 2)).clamp_min(torch.finfo(far.dtype).tiny)


@torch.no_grad()
def distance_of_statistics(net: Backbone, stats: Stats) -> Tensor:
    """Return the distance of statistics (S, 1, C) from the source's, (S,): standard deviations, middle layers.

    The first layers see what differs between augmented and plain images, the last ones which classes are there; the
    middle third sees the world in front of the camera. Each layer counts the same: sqrt(dmean^2 + dstd^2).
    """
    source = constants(net, stats.mean)
    apart = torch.hypot(stats.mean - source.mean, (stats.var + source.eps).sqrt_() - source.std)
    distance: Tensor = torch.linalg.vector_norm(apart * source.scale, dim=(1, 2))
    return distance


@torch.no_grad()
def distance_of_images(net: Backbone, images: Tensor) -> float:
    """Return the distance of the statistics of images (N, ...) of all classes from the source's.

    Images pass in equal batches of at most `BATCH`, and their statistics are averaged. A batch has images from
    everywhere, because they may be sorted by class.
    """
    if not isinstance(images, Tensor) or images.dim() < 2 or not images.is_floating_point():
        kind = f"{images.dtype} {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"clean images are a floating point tensor (N, ...) in [0, 1]; got {kind}")
    if len(images) < LEAST:
        raise ValueError(f"the distance of clean images needs at least {LEAST} of them; got {len(images)}")
    if bad := int((~good_images(images, 1)).sum()):
        raise ValueError(f"{bad} of {len(images)} clean images are not finite; leave them out")
    affine, stats = net.source()
    if not stats.mean.shape[-1]:
        raise ValueError("the network keeps no statistics, so there is nothing to lean by: use a guard as it is")
    mean, square = torch.zeros_like(stats.mean), torch.zeros_like(stats.var)
    batches = -(-len(images) // BATCH)
    for first in range(batches):
        part = images[first::batches]
        valid = torch.ones(1, len(part), dtype=torch.bool, device=net.device)
        own = net(part.unsqueeze(0).to(net.device), affine, stats, ReturnBatchStats(), valid=valid).stats
        mean += own.mean * (len(part) / len(images))
        square += (own.var + own.mean.square()) * (len(part) / len(images))
    return float(distance_of_statistics(net, Stats(mean, square - mean.square())))


@torch.no_grad()
def distance_in_single_images(net: Backbone, images: Tensor, norm: Balanced) -> float:
    """Return the greatest distance of Balanced BN's statistics from the source's while images (N, ...) come one by one.

    `LEAST` images from everywhere come in bursts, ordered by the class that the source predicts. The last half counts.
    """
    some = images[:: len(images) // LEAST][:LEAST]
    labels = source_logits(net, some).argmax(-1)
    affine, stats = net.source()[0], net.source(1, norm.classes)[1]
    valid = torch.ones(1, 1, dtype=torch.bool, device=net.device)
    far = []
    for i in labels.argsort(stable=True):
        x, label = some[None, None, i].to(net.device), labels[None, None, i].to(net.device)
        stats = net(x, affine, stats, norm, label, valid).stats
        far.append(distance_of_statistics(net, norm.pool(stats)))
    return float(torch.cat(far[len(far) // 2 :]).amax())
