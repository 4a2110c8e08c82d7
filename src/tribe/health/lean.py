"""Measure how far statistics are from the source's: by that a guard leans on the source.

Adapting costs accuracy where nothing has changed. Where much has changed, statistics are what helps most.
"""

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.state import Stats
from tribe.core.validation import good_images
from tribe.health.calibration import source_logits
from tribe.health.changes import constants
from tribe.health.probe import ReturnBatchStats
from tribe.norms.balanced import Balanced

POWER = 4  # how sharply the share rises around `midpoint`
RATIO = 1.4  # of a fitted `midpoint` to the distance that clean images have: 0.06 to 0.043 for ResNet-20 on CIFAR-10
LEAST = 200  # images that tell this distance
BATCH = 64  # the most images that pass at once: a large image takes megabytes in every layer


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
        own = net(part.unsqueeze(0).to(net.device), affine, stats, ReturnBatchStats(stored=False), valid=valid).stats
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
