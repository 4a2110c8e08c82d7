"""Lower the entropy of reliable predictions only, and only where it is flat: SAR (ICLR 2023).

A gradient step can leave a flat valley for a trivial answer, one class for everything. So the slope is taken not where
the parameters are but where, within a small ball around them, the entropy is highest; and where it falls so low that
the network must have collapsed, the source's parameters come back.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tribe.engine.backbone import Backbone
from tribe.engine.losses import entropy, mean_over
from tribe.engine.optim import sgd_step
from tribe.engine.rng import Key
from tribe.engine.state import Affine, Info, select, tree_map
from tribe.fields import is_number
from tribe.methods.base import Deployed, Method, finish, new_info, new_key, register, screen
from tribe.norms.batch import PerBatch

NONE_YET = -1.0  # a moving mean of entropies that has no first value


class SarState(NamedTuple):
    """Affine parameters, their velocity, and how low the loss has been of late."""

    affine: Affine  # (S, C)
    velocity: Affine  # (S, C)
    mean: Tensor  # (S,) moving mean of the loss; below zero: none yet
    key: Key
    info: Info


@register("sar")
@dataclass(frozen=True)
class Sar(Method):
    """Batch statistics where there is BatchNorm; LayerNorm and GroupNorm, which the paper recommends, as they are.

    NOTE: the paper counts layers by name: it leaves layer4 of ResNets, and blocks 9 to 11 and the last norm of ViT-B,
    as they were. Other networks have other names, so that here the last quarter of the normalisation layers stays;
    ``frozen_tail=("layer4",)`` or ``("blocks.9", "blocks.10", "blocks.11", "norm")`` is the paper's choice.
    """

    e0: float = 0.4  # share of log K below which an entropy is reliable
    rho: float = 0.05  # radius of the ball
    e_m: float = 0.2  # moving mean of the loss, in nats, below which the network has collapsed
    lr: float = 0.00025  # of SGD, for batches of 64
    momentum: float = 0.9
    frozen_tail: float | tuple[str, ...] = 0.25  # layers that stay: a share of them, from the end, or their names

    paper = "Niu et al., Towards stable test-time adaptation in dynamic wild world, ICLR 2023"
    works_on = ("affine",)
    presets = {  # noqa: RUF012  ImageNet's from the paper, CIFAR's from the comparison in ROID's repository
        "mnist": {"classes": 10, "lr": 1e-3},
        "cifar10": {"classes": 10, "lr": 1e-3},
        "cifar100": {"classes": 100, "lr": 1e-3},
        "imagenet": {"classes": 1000, "lr": 0.00025},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.frozen_tail, list):
            object.__setattr__(self, "frozen_tail", tuple(self.frozen_tail))
        if min(self.e0, self.rho, self.e_m, self.lr) < 0 or not 0 <= self.momentum < 1:
            raise ValueError(
                f"e0, rho, e_m and lr are not negative and momentum is at least 0 and below 1; got {self.e0}, "
                f"{self.rho}, {self.e_m}, {self.lr} and {self.momentum}"
            )
        tail = self.frozen_tail
        names = isinstance(tail, tuple) and all(isinstance(name, str) for name in tail)
        if not names and not (is_number(tail) and 0 <= tail < 1):
            raise ValueError(
                "frozen_tail is a share of the normalisation layers, at least 0 and below 1, or a tuple of names of "
                f"layers or blocks; got {tail!r}"
            )

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> SarState:
        """Start at the source, at rest."""
        self._adapted(net)  # its complaints
        affine, _ = net.source(streams)
        mean = affine.weight.new_full((streams,), NONE_YET)
        velocity = tree_map(torch.zeros_like, affine)
        return SarState(affine, velocity, mean, new_key(net, streams, seed), new_info(net, streams))

    def deployed(self, net: Backbone, state: SarState) -> Deployed:
        """The adapted parameters, the batch's statistics."""
        return Deployed(state.affine, net.source(len(state.key.seed))[1], PerBatch())

    def step(self, net: Backbone, state: SarState, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, SarState]:
        """Predict; climb to the worst place nearby; step from here along the slope found there."""
        x, valid, rejected = screen(x, valid)
        adapted = self._adapted(net)
        logits, reliable, slope, _ = self._slope(net, state, state.affine, x, valid, valid)
        slope = tree_map(adapted.mul, slope)
        worst = tree_map(lambda p, g: p + g * (self.rho / (_norm(slope) + 1e-12)), state.affine, slope)
        _, still, slope, loss = self._slope(net, state, worst, x, valid, reliable)
        # NOTE: where nothing is reliable the gradient is zero and the momentum still moves on, as released.
        moved, velocity = sgd_step(state.affine, tree_map(adapted.mul, slope), state.velocity, self.lr, self.momentum)

        some = still.any(1)
        mean = torch.where(state.mean < 0, loss, 0.9 * state.mean + 0.1 * loss)
        mean = torch.where(some, mean, state.mean)
        new = state._replace(affine=moved, velocity=velocity, mean=mean)
        # NOTE: the moving mean starts afresh, as the paper has it; its code goes on with the old one.
        recovered = state._replace(
            affine=net.source(len(x))[0],
            velocity=tree_map(torch.zeros_like, velocity),
            mean=torch.full_like(mean, NONE_YET),
        )
        new = select((mean < 0) | (mean >= self.e_m), new, recovered)
        return finish(net, state, new, logits, valid, rejected, reliable, new.affine)

    def _slope(
        self, net: Backbone, state: SarState, at: Affine, x: Tensor, valid: Tensor, among: Tensor
    ) -> tuple[Tensor, Tensor, Affine, Tensor]:
        """Logits, which images ``among`` those given are reliable, and gradient and value (S,) of their entropy."""
        _, stats, norm = self.deployed(net, state)
        with torch.enable_grad():
            affine = at.leaf()
            logits = net(x, affine, stats, norm, valid=valid).logits
            doubt = entropy(logits)
            reliable = among & (doubt.detach() < self.e0 * math.log(logits.shape[-1]))
            loss = mean_over(doubt, reliable)
            slope = Affine(*torch.autograd.grad(loss.sum(), affine))
        return logits, reliable, slope, loss.detach().to(at.weight.dtype)

    def _adapted(self, net: Backbone) -> Tensor:
        """One for each channel that adapts, zero for those of the frozen tail: (C,)."""
        names = [slot.name for slot in net.slots]
        if isinstance(self.frozen_tail, tuple):
            frozen = [any(name == part or name.startswith(f"{part}.") for part in self.frozen_tail) for name in names]
            if self.frozen_tail and not any(frozen):
                raise ValueError(
                    f"none of frozen_tail {self.frozen_tail} names a normalisation layer or a block with one; the "
                    f"network has {', '.join(names)}"
                )
            if all(frozen):
                raise ValueError(f"frozen_tail {self.frozen_tail} names every normalisation layer: none is left")
        else:
            tail = len(names) - int(self.frozen_tail * len(names))
            frozen = [i >= tail for i in range(len(names))]
        adapted, start = torch.ones(net.channels, dtype=net.origin.get().affine.weight.dtype, device=net.device), 0
        for slot, stays in zip(net.slots, frozen, strict=True):
            if stays:
                adapted[start : start + slot.channels] = 0
            start += slot.channels
        return adapted


def _norm(affine: Affine) -> Tensor:
    """Length of each stream's row over both parameters: (S, 1)."""
    length: Tensor = torch.linalg.vector_norm(torch.cat(affine, 1), dim=1, keepdim=True)
    return length
