"""Make the network surer of its own predictions, one step a batch: TENT (Wang et al., ICLR 2021)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tribe.engine.backbone import Backbone
from tribe.engine.losses import entropy, mean_over
from tribe.engine.optim import Adam, adam_init, adam_step
from tribe.engine.rng import Key
from tribe.engine.state import Affine, Info, Stats
from tribe.methods.base import Deployed, Method, finish, new_info, new_key, register, screen
from tribe.norms.batch import PerBatch


class TentState(NamedTuple):
    """Affine parameters, and what Adam remembers of their gradients."""

    affine: Affine  # (S, C)
    adam: Adam
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
        if self.lr < 0:
            raise ValueError(f"lr, Adam's learning rate, is not negative; got {self.lr}")

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> TentState:
        """Start at the source."""
        affine, _ = net.source(streams)
        return TentState(affine, adam_init(affine), new_key(net, streams, seed), new_info(net, streams))

    def deployed(self, net: Backbone, state: TentState) -> Deployed:
        """The adapted parameters, the batch's statistics."""
        return Deployed(state.affine, _statistics(net, state), PerBatch())

    def loss(self, logits: Tensor) -> Tensor:
        """What every prediction (S, B, K) is to lose: (S, B)."""
        return entropy(logits)

    def step(self, net: Backbone, state: TentState, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, TentState]:
        """Predict, then take one Adam step down the loss of these predictions."""
        x, valid, rejected = screen(x, valid)
        with torch.enable_grad():
            affine = state.affine.leaf()
            logits = net(x, affine, _statistics(net, state), PerBatch(), valid=valid).logits
            loss = mean_over(self.loss(logits), valid)  # (S,)
            grads = Affine(*torch.autograd.grad(loss.sum(), affine))
        moved, moments = adam_step(state.affine, grads, state.adam, self.lr)
        new = state._replace(affine=moved, adam=moments)
        return finish(net, state, new, logits, valid, rejected, affine=moved)


def _statistics(net: Backbone, state: TentState) -> Stats:
    """Batch statistics need no stored ones; a row each keeps the shapes right."""
    return net.source(len(state.key.seed))[1]
