"""How far a stream follows its adapted network, and how far the source: little where little has changed.

Adapting costs accuracy where nothing has changed: a network was trained with statistics of augmented images, those of
clean test images are not the same, and parameters wander. Where much has changed, statistics are what helps most. So
the network that predicts leans on the source by how far the adapted statistics are from the source's.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from tribe.engine.backbone import Backbone
from tribe.engine.rules import PerBatch, pool_batch
from tribe.engine.state import Affine, Stats
from tribe.health.changes import DEPTHS, moves_by_depth
from tribe.methods import Deployed
from tribe.norms.mixed import Mixed

POWER = 4  # how sharply the share rises around `half`
RATIO = 1.4  # of a fitted `half` to the distance that clean images have: 0.06 to 0.043 for ResNet-20 on CIFAR-10
LEAST = 200  # images that tell this distance


def lean(net: Backbone, deployed: Deployed, half: float | None, most: float, of_batch: float) -> Deployed:
    """The network that predicts, between the source and the adapted one, or with the statistics of a batch.

    Without ``half`` nothing is known of the network's scale, and the adapted one predicts.
    """
    if not deployed.stats.mean.shape[-1] or deployed.weights is not None:
        return deployed  # it has no statistics, or weights that were adapted together with them
    if isinstance(deployed.norm, PerBatch):
        return replace(deployed, norm=Mixed(of_batch)) if type(deployed.norm) is PerBatch else deployed
    if half is None:
        return deployed
    affine, stats = net.source()
    far = farness(net, deployed.stats, half)
    return replace(
        deployed,
        affine=Affine(*(_between(s, t, far) for s, t in zip(affine, deployed.affine, strict=True))),
        stats=Stats(*(_between(s, t, most * far) for s, t in zip(stats, deployed.stats, strict=True))),
    )


def _between(source: Tensor, adapted: Tensor, share: Tensor) -> Tensor:
    """``share`` (S,) of the way from the source's numbers (1, ...) to adapted ones (S, ...)."""
    weight = share.to(adapted.dtype).view(-1, *[1] * (adapted.dim() - 1))
    return torch.lerp(source, adapted, weight)


@torch.no_grad()
def farness(net: Backbone, stats: Stats, half: float) -> Tensor:
    """From 0, where nothing has changed, to 1 (S,); 1/2 where statistics are at a distance of ``half``."""
    far = distance_of_statistics(net, stats) ** POWER
    return far / (far + half**POWER).clamp_min(torch.finfo(far.dtype).tiny)


@torch.no_grad()
def distance_of_statistics(net: Backbone, stats: Stats) -> Tensor:
    """How far statistics (S, 1, C) are from the source's, (S,): in standard deviations, over the middle layers.

    The first layers see what differs between augmented and plain images, the last ones which classes are there; the
    middle third sees the world in front of the camera. Each layer counts the same: sqrt(dmean^2 + dstd^2).
    """
    return moves_by_depth(net, net.source()[1], stats)[:, DEPTHS // 2]


@dataclass(frozen=True)
class Taking:
    """Normalise each batch with its own statistics, and return them: where statistics end that adapt to it."""

    classes: ClassVar[int] = 1
    observes: ClassVar[bool] = True

    def __call__(
        self, mean: Tensor, var: Tensor, count: int, stats: Stats, labels: Tensor | None, valid: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Stats]:
        """The batch's statistics, twice."""
        own = Stats(*pool_batch(mean, var, valid))
        return *own, own


@torch.no_grad()
def distance_of_images(net: Backbone, images: Tensor) -> float:
    """How far the statistics of images (N, ...) of all classes are from the source's: of clean ones, what is normal."""
    if len(images) < LEAST:
        raise ValueError(f"the distance of clean images needs at least {LEAST} of them; got {len(images)}")
    affine, stats = net.source()
    if not stats.mean.shape[-1]:
        raise ValueError("the network keeps no statistics, so there is nothing to lean by: use a guard as it is")
    x = images.unsqueeze(0).to(net.device)
    valid = torch.ones(1, len(images), dtype=torch.bool, device=net.device)
    return float(distance_of_statistics(net, net(x, affine, stats, Taking(), valid=valid).stats))
