"""Lower the entropy of reliable predictions only, and only where it is flat: SAR (ICLR 2023).

A gradient step can leave a flat minimum for a trivial solution, one class for all images. So the gradient is taken not
at the parameters, but where the entropy is highest in a small ball around them. If the loss falls so low that the
network must have collapsed, the parameters go back to the source's.
"""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

from tribe.core import losses, optim
from tribe.core.state import select, tree_map
from tribe.fields import Momentum, NotNegative, Range
from tribe.methods import Affine, Backbone, EntropyMethod, Info, Key, ScreenedBatch, Update, register

# A share of the layers, or names of layers or blocks, or those that the authors freeze, where they have such names.
Tail = Annotated[float, Range(below=1)] | tuple[str, ...] | Literal["published"]
SHARE = 0.25  # of the layers, in networks with other names
PUBLISHED = r"(\w+\.)?layer4\..+", r"(\w+\.)?(blocks\.(9|10|11)\..+|norm)"  # of ResNets; of ViT-B, in timm's names
NONE_YET = -1.0  # a moving mean of entropies without a first value


class SarState(NamedTuple):
    """Affine parameters, their velocity, and a moving mean of the loss."""

    affine: Affine  # (S, C)
    velocity: Affine  # (S, C)
    mean: Tensor  # (S,) moving mean of the loss; below zero: none yet
    key: Key
    info: Info


@register("sar")
@dataclass(frozen=True)
class Sar(EntropyMethod):
    """Batch statistics in BatchNorm; the paper recommends LayerNorm and GroupNorm, which have none.

    NOTE: the paper freezes layers by name: layer4 of ResNets, and blocks 9 to 11 and the last norm of ViT-B.
    ``frozen_tail="published"`` does so, and the preset of ImageNet has it; in networks with other names, and by
    default, the last quarter of the normalisation layers is frozen. The repository that CIFAR's presets are from
    freezes nothing in its networks, and these presets do not, either.
    """

    e0: NotNegative = 0.4  # share of log K below which an entropy is reliable
    rho: NotNegative = 0.05  # radius of the ball
    e_m: NotNegative = 0.2  # moving mean of the loss, in nats, below which the network has collapsed
    lr: NotNegative = 0.00025  # of SGD, for batches of 64
    momentum: Momentum = 0.9
    frozen_tail: Tail = 0.25  # frozen layers: a share of all layers, from the end, or names, or "published"
    mean_after_reset: Literal["new", "kept"] = "new"  # kept: as in the authors' code

    paper = "Niu et al., Towards stable test-time adaptation in dynamic wild world, ICLR 2023"
    presets = {  # ImageNet's from the paper, CIFAR's from the comparison in ROID's repository
        "mnist": {"lr": 1e-3, "frozen_tail": 0.0},
        "cifar10": {"lr": 1e-3, "frozen_tail": 0.0},
        "cifar100": {"lr": 1e-3, "frozen_tail": 0.0},
        "imagenet": {"lr": 0.00025, "frozen_tail": "published"},
    }

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> SarState:
        """Start at the source, with velocity zero."""
        adapted_channels(net, self.frozen_tail)  # checks frozen_tail
        affine, _ = net.source(streams)
        mean = affine.weight.new_full((streams,), NONE_YET)
        velocity = tree_map(torch.zeros_like, affine)
        return SarState(affine, velocity, mean, *self.new_key_and_info(net, streams, seed))

    def adapt(self, net: Backbone, state: SarState, batch: ScreenedBatch) -> Update:
        """Predict; find the worst point nearby; step along the gradient at that point."""
        adapted = adapted_channels(net, self.frozen_tail)
        logits, reliable, grads, _ = self._gradient(net, state, state.affine, batch, batch.valid)
        grads = tree_map(adapted.mul, grads)
        worst = worst_nearby(state.affine, grads, self.rho)
        _, still, grads, loss = self._gradient(net, state, worst, batch, reliable)
        # NOTE: where nothing is reliable the gradient is zero and the momentum still moves on, as released.
        moved, velocity = optim.sgd_step(
            state.affine, tree_map(adapted.mul, grads), state.velocity, self.lr, self.momentum
        )

        mean = torch.where(state.mean < 0, loss, 0.9 * state.mean + 0.1 * loss)
        mean = torch.where(still.any(1), mean, state.mean)
        new = state._replace(affine=moved, velocity=velocity, mean=mean)
        # NOTE: the moving mean starts anew after a reset, as in the paper; the released code keeps it.
        recovered = state._replace(
            affine=net.source(len(batch.x))[0],
            velocity=tree_map(torch.zeros_like, velocity),
            mean=torch.full_like(mean, NONE_YET) if self.mean_after_reset == "new" else mean,
        )
        new = select((mean < 0) | (mean >= self.e_m), new, recovered)
        return Update(logits, new, reliable, new.affine)

    def _gradient(
        self, net: Backbone, state: SarState, at: Affine, batch: ScreenedBatch, among: Tensor
    ) -> tuple[Tensor, Tensor, Affine, Tensor]:
        """Logits; which images (of those ``among``) are reliable; gradient and value (S,) of their entropy."""
        stats, norm = self.normalisation(net, state, batch)
        with torch.enable_grad():
            affine = at.leaf()
            logits = net(batch.x, affine, stats, norm, valid=batch.valid).logits
            uncertainty = losses.entropy(logits)
            reliable = among & (uncertainty.detach() < self.e0 * math.log(logits.shape[-1]))
            loss = losses.mean_over(uncertainty, reliable)
            grads = affine.gradient(loss)
        return logits, reliable, grads, loss.detach().to(at.weight.dtype)


def adapted_channels(net: Backbone, tail: Tail) -> Tensor:
    """Return one for each channel that adapts, zero for those of the frozen tail: (C,)."""
    names = [slot.name for slot in net.slots]
    if tail == "published":
        found = [[re.fullmatch(pattern, name) is not None for name in names] for pattern in PUBLISHED]
        # One layer alone is no stage of a ResNet and no block of a ViT, whatever its name.
        frozen = next((those for those in found if 1 < sum(those) < len(names)), [])
        tail = tail if frozen else SHARE
    if isinstance(tail, tuple):
        frozen = [any(name == block or name.startswith(f"{block}.") for block in tail) for name in names]
        if tail and not any(frozen):
            raise ValueError(
                f"none of frozen_tail {tail} names a normalisation layer or a block with one; the network has "
                f"{', '.join(names)}"
            )
        if all(frozen):
            raise ValueError(f"frozen_tail {tail} names every normalisation layer: none can adapt")
    elif not isinstance(tail, str):
        first = len(names) - int(tail * len(names))
        frozen = [i >= first for i in range(len(names))]
    like = net.origin.state.affine.weight
    layers = zip(net.slots, frozen, strict=True)
    return torch.cat([like.new_full((slot.channels,), not is_frozen) for slot, is_frozen in layers])


def worst_nearby(affine: Affine, grads: Affine, rho: float) -> Affine:
    """Return the point at the distance rho along each stream's gradient, where the loss is about highest."""
    length = torch.linalg.vector_norm(torch.cat(grads, 1), dim=1, keepdim=True)  # (S, 1)
    return tree_map(lambda p, g: p + g * (rho / (length + 1e-12)), affine, grads)
