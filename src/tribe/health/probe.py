"""What the source network says of some images of a stream, in one pass: a second opinion that does not adapt.

Every so many images of a batch, one is a probe. The pass normalises with the source's statistics, and looks at those
that the probes have: how far they are from the source's tells how much the images have changed, whatever the network
predicts. Passes with dropout before the classifier tell how fragile the source's predictions are.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from tribe.engine.backbone import Backbone
from tribe.engine.rules import pool_batch
from tribe.engine.state import Stats
from tribe.fields import document
from tribe.health.changes import squared_moves

DEPTHS = 3  # parts of the network, by depth: the first, middle and last third of the normalised layers
SPAN = 64  # images of a stream over which the statistics of probes are averaged, about
PASSES, RATE = 8, 0.4  # with dropout: how many, and the share of features that each leaves out
_masks: WeakKeyDictionary[Backbone, Tensor] = WeakKeyDictionary()


@dataclass(frozen=True)
class Looking:
    """Normalise with the stored statistics, and return those of the batch."""

    classes: ClassVar[int] = 1
    observes: ClassVar[bool] = True

    def __call__(
        self, mean: Tensor, var: Tensor, count: int, stats: Stats, labels: Tensor | None, valid: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Stats]:
        """The stored statistics, and the batch's."""
        return stats.mean, stats.var, Stats(*pool_batch(mean, var, valid))


class ShiftState(NamedTuple):
    """The statistics of the last probes of each stream: exponential means times `weight`."""

    mean: Tensor  # (S, C)
    square: Tensor  # (S, C) of the values, not of their distance from the mean
    weight: Tensor  # (S,) 0 before the first image, then up to 1


class Probed(NamedTuple):
    """What one pass says of the probes."""

    logits: Tensor
    steady: Tensor
    shift: Tensor


document(
    Probed,
    logits="(S, P, K), the source's, float32.",
    steady="(S, P), the share of passes with dropout that predict the same class.",
    shift="(S, 3), how far the statistics of the last probes are from the source's, by depth, in standard deviations.",
)


def start_shift(net: Backbone, streams: int) -> ShiftState:
    """The state before the first image."""
    stats = net.source(streams)[1]
    none = torch.zeros_like(stats.mean[:, 0], dtype=torch.float32)
    return ShiftState(none, none.clone(), torch.zeros(streams, device=none.device))


@torch.no_grad()
def probe(net: Backbone, state: ShiftState, x: Tensor, valid: Tensor, images: Tensor) -> tuple[Probed, ShiftState]:
    """Pass the probes (S, P, ...) of a batch that had so many ``images`` (S,) in each stream."""
    affine, stats = net.source(len(x))
    output = net(x, affine, stats, Looking(), valid=valid)
    logits = output.logits.float()
    seen = torch.where(valid.any(1), images, 0)
    state = _remember(state, output.stats, seen)
    features = output.features
    steady = torch.ones_like(logits[..., 0]) if features is None else _steady(net, features, logits)
    return Probed(logits, steady, measure_shift(net, state)), state


def _remember(state: ShiftState, stats: Stats, images: Tensor) -> ShiftState:
    keep = torch.exp(-images / SPAN)
    add = (1 - keep).unsqueeze(1)
    mean, var = stats.mean[:, 0].float(), stats.var[:, 0].float()
    kept = [t * keep.unsqueeze(1) for t in (state.mean, state.square)]
    return ShiftState(kept[0] + add * mean, kept[1] + add * (var + mean.square()), state.weight * keep + (1 - keep))


def measure_shift(net: Backbone, state: ShiftState) -> Tensor:
    """How far the statistics of the last probes are from the source's (S, 3); 0 for networks without statistics."""
    slots = [slot for slot in net.slots if slot.columns.stop > slot.columns.start]
    if not state.mean.shape[1] or not slots:
        return state.weight.new_zeros(len(state.weight), DEPTHS)
    weight = state.weight.clamp_min(1e-6).unsqueeze(1)
    mean = state.mean / weight
    now = Stats(mean.unsqueeze(1), (state.square / weight - mean.square()).clamp_min(0).unsqueeze(1))
    squares = squared_moves(net, Stats(*(t.float() for t in net.source()[1])), now)[:, 0]
    layers = torch.stack([squares[:, slot.columns].mean(1) for slot in slots], 1)  # (S, layers)
    third = max(len(slots) // DEPTHS, 1)
    parts = layers[:, :third], layers[:, third : len(slots) - third], layers[:, len(slots) - third :]
    far = torch.stack([(part if part.shape[1] else layers).mean(1).sqrt() for part in parts], 1)
    return torch.where(state.weight.unsqueeze(1) > 0, far, 0)


def _steady(net: Backbone, features: Tensor, logits: Tensor) -> Tensor:
    """The share of passes with dropout (S, P) that predict the same class; all images and calls use the same masks."""
    layer = dict(net.model.named_modules())[str(net.classifier)]
    if net not in _masks or _masks[net].device != features.device:
        draw = torch.Generator().manual_seed(0)
        kept = torch.rand(PASSES, features.shape[-1], generator=draw) >= RATE
        _masks[net] = (kept / (1 - RATE)).to(features.device)
    dropped = features.unsqueeze(2) * _masks[net].to(features.dtype)  # (S, P, passes, F)
    other = functional.linear(dropped, layer.weight, layer.bias)
    return (other.argmax(-1) == logits.argmax(-1, keepdim=True)).float().mean(-1)
