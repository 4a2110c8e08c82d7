"""Make the network more certain of its own predictions, one step a batch: TENT (Wang et al., ICLR 2021)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tribe.methods import Affine, Backbone, Deployed, Info, Key, Method, commit_step, losses, optim, register, screen


class TentState(NamedTuple):
    """Affine parameters, and Adam's moments of their gradients."""

    affine: Affine  # (S, C)
    adam: optim.Adam
    key: Key
    info: Info


@register("tent")
@dataclass(frozen=True)
class Tent(Method):
    """Batch statistics everywhere; the affine parameters follow the gradient of the mean entropy."""

    lr: float = 1e-3  # Adam's learning rate

    paper = "Wang et al., Tent: fully test-time adaptation by entropy minimization, ICLR 2021"
    works_on = ("affine",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_range("lr")

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> TentState:
        """Start at the source."""
        affine, _ = net.source(streams)
        return TentState(affine, optim.adam_init(affine), *self.new_key_and_info(net, streams, seed))

    def deployed(self, net: Backbone, state: TentState) -> Deployed:
        """The adapted parameters, the batch's statistics."""
        return Deployed.per_batch(net, state.affine)

    def loss(self, logits: Tensor, valid: Tensor) -> Tensor:
        """The loss of each prediction (S, B, K): (S, B). Those that are not ``valid`` (S, B) do not count."""
        return losses.entropy(logits)

    def step(self, net: Backbone, state: TentState, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, TentState]:
        """Predict, then take one Adam step down the loss of these predictions."""
        x, valid, rejected = screen(x, valid)
        _, stats, norm = self.deployed(net, state)
        with torch.enable_grad():
            affine = state.affine.leaf()
            logits = net(x, affine, stats, norm, valid=valid).logits
            grads = affine.gradient(losses.mean_over(self.loss(logits, valid), valid))
        moved, moments = optim.adam_step(state.affine, grads, state.adam, self.lr)
        new = state._replace(affine=moved, adam=moments)
        return commit_step(net, state, new, logits, valid, rejected, affine=moved)
