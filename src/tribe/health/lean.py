"""How far a stream follows its adapted statistics, and how far the source's: little where little has changed.

Statistics that adapt cost accuracy where nothing has changed: a network was trained with statistics of augmented
images, and those of clean test images are not the same. Where much has changed, they are what helps most. So the
network that predicts leans on the source by how far the adapted statistics are from the source's.
"""

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tribe.engine.backbone import Backbone
from tribe.engine.rules import PerBatch
from tribe.engine.state import Stats
from tribe.health.changes import squared_moves
from tribe.methods import Deployed
from tribe.norms.mixed import Mixed

POWER = 4  # how sharply the share rises around `half`


def lean(net: Backbone, deployed: Deployed, half: float, most: float, of_batch: float) -> Deployed:
    """The network that predicts, its statistics between the source's and the adapted ones, or those of a batch."""
    if not deployed.stats.mean.shape[-1] or deployed.weights is not None:
        return deployed  # it has no statistics, or weights that were adapted together with them
    if isinstance(deployed.norm, PerBatch):
        return replace(deployed, norm=Mixed(of_batch)) if type(deployed.norm) is PerBatch else deployed
    source = net.source()[1]
    share = share_of_adapted(net, deployed.stats, half, most).view(-1, 1, 1)
    return replace(deployed, stats=Stats(*(s + share * (t - s) for s, t in zip(source, deployed.stats, strict=True))))


@torch.no_grad()
def share_of_adapted(net: Backbone, stats: Stats, half: float, most: float) -> Tensor:
    """The share (S,) of the adapted statistics: ``most / 2`` at a distance of ``half``, nothing at none."""
    far = distance_of_statistics(net, stats) ** POWER
    return most * far / (far + half**POWER).clamp_min(torch.finfo(far.dtype).tiny)


@torch.no_grad()
def distance_of_statistics(net: Backbone, stats: Stats) -> Tensor:
    """How far statistics (S, 1, C) are from the source's, (S,): in standard deviations, over the middle layers.

    The first layers see what differs between augmented and plain images, the last ones which classes are there; the
    middle third sees the world in front of the camera. Each layer counts the same: sqrt(dmean^2 + dstd^2).
    """
    squares = squared_moves(net, net.source()[1], stats)[:, 0]
    return (squares * _weight(net, squares)).sum(1).sqrt()


_known: WeakKeyDictionary[Backbone, dict[Any, Tensor]] = WeakKeyDictionary()  # by type and device


def _weight(net: Backbone, like: Tensor) -> Tensor:
    """How much each channel counts in the mean over the middle layers, (C,); made once."""
    made = _known.setdefault(net, {})
    place = like.dtype, like.device
    if place not in made:
        slots = [slot for slot in net.slots if slot.columns.stop > slot.columns.start]
        middle = slots[len(slots) // 3 : len(slots) - len(slots) // 3] or slots
        weight = like.new_zeros(like.shape[1])
        for slot in middle:
            weight[slot.columns] = 1 / (len(middle) * (slot.columns.stop - slot.columns.start))
        made[place] = weight
    return made[place]
