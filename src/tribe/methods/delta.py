"""Normalise with moving statistics and give rare classes more weight: DELTA (Zhao et al., ICLR 2023).

Two parts that go with any loss on the predictions of a batch:

    TBR   test-time batch renormalisation, see `tribe.norms.renorm`: the statistics of one batch are inaccurate
    DOT   dynamic online re-weighting: z, a moving mean of the predictions, says how frequent each class is; an image
          counts 1 / z of its predicted class, relative to the mean over the batch

Affine parameters learn, one step a batch.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tribe.core import losses, optim
from tribe.core.backbone import Output
from tribe.core.state import select
from tribe.fields import Share
from tribe.methods import Affine, Backbone, Deployed, EntropyMethod, Frozen, Info, Key, ScreenedBatch, Stats, register
from tribe.methods.base import mean_prediction
from tribe.norms.renorm import Renorm


class DeltaState(NamedTuple):
    """Parameters, moving statistics, the optimiser's moments, and the frequency of each class."""

    affine: Affine  # (S, C)
    stats: Stats  # (S, 1, C)
    adam: optim.Adam  # with SGD its first moment is the velocity
    mean: Tensor  # (S, K) z, moving mean of the predictions, uniform at first
    key: Key
    info: Info


@register("delta")
@dataclass(frozen=True)
class Delta(EntropyMethod):
    """DELTA with one of the paper's three losses; the paper calls the default Ent-W + DELTA.

    Published settings: alpha and lambda_ 0.95, SGD with 0.00025 and momentum 0.9 for ImageNet-C, batches of 64 (the
    released configurations). Released is ImageNet-C alone: for CIFAR, Adam with 0.001, the setting of TENT, is our
    reading. The moving statistics start with those of the first batch, as released, not with the source's.
    """

    alpha: Share = 0.95  # share of the past in the statistics of TBR
    lambda_: Share = 0.95  # share of the past in z
    # Ent-W: entropies below half of log K, weighted by exp(log K / 2 - entropy); TENT: all, alike; PL: cross-entropy
    # with the predicted class, where its probability exceeds 0.4.
    loss: Literal["weighted entropy", "entropy", "pseudo labels"] = "weighted entropy"
    optimizer: Literal["adam", "sgd"] = "adam"  # sgd: with momentum 0.9

    paper = "Zhao et al., DELTA: degradation-free fully test-time adaptation, ICLR 2023"
    not_exportable_because = None
    per_class = "the frequency of each class"
    presets = {"imagenet": {"lr": 0.00025, "optimizer": "sgd"}}

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> DeltaState:
        """Start at the source; every class is equally frequent."""
        affine, adam, *clocks = super().init(net, streams, seed)
        mean = affine.weight.new_full((streams, self.class_count), 1 / self.class_count)
        return DeltaState(affine, net.source(streams)[1], adam, mean, *clocks)

    def deployed(self, net: Backbone, state: DeltaState) -> Deployed:
        """Return the adapted parameters and the moving statistics; the source's before the first batch."""
        return Deployed(state.affine, state.stats, Frozen())

    def normalisation(self, net: Backbone, state: DeltaState, batch: ScreenedBatch) -> tuple[Stats, Renorm]:
        """Return the moving statistics, which the batch updates; of a stream's first batch, its own."""
        return self._moving(state), Renorm(self.alpha)

    def logits(self, net: Backbone, state: DeltaState, batch: ScreenedBatch) -> Tensor:
        """Predict: a pass of `deployed`; in a stream without a batch yet, the images have their own statistics."""
        logits: Tensor = net(batch.x, state.affine, self._moving(state), Renorm(self.alpha), valid=batch.valid).logits
        return logits

    def objective(
        self, net: Backbone, state: DeltaState, batch: ScreenedBatch, affine: Affine, logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of the predictions that it trusts, weighted by how rare their classes are."""
        each, trusted = self._losses(logits, batch.valid)
        weight = self._weights(logits.detach(), state.mean, batch.valid)
        return losses.mean_over(weight * each, trusted), trusted

    def follow(self, net: Backbone, state: Any, output: Output, batch: ScreenedBatch, trusted: Tensor | None) -> Any:
        """Let statistics and frequencies follow the batch."""
        seen = mean_prediction(output.logits, batch.valid).to(state.mean)
        return state._replace(stats=output.stats, mean=self.lambda_ * state.mean + (1 - self.lambda_) * seen)

    def _moving(self, state: DeltaState) -> Stats:
        """Return the moving statistics; those of streams without a batch yet are marked."""
        return select(state.key.clock == 0, Renorm.none_yet(state.stats), state.stats)

    def _losses(self, logits: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        if self.loss == "pseudo labels":
            confident = losses.probabilities(logits.detach()).amax(-1) > 0.4
            return losses.cross_entropy(logits, logits.argmax(-1)), valid & confident
        each = losses.entropy(logits)
        if self.loss == "entropy":
            return each, valid
        margin = math.log(logits.shape[-1]) / 2 - each.detach()
        return margin.exp() * each, valid & (margin > 0)

    def _weights(self, logits: Tensor, mean: Tensor, valid: Tensor) -> Tensor:
        """DOT: one over the frequency of the predicted class, divided by its mean over the batch: (S, B)."""
        inverse = (1 / mean.clamp_min(torch.finfo(mean.dtype).tiny)).gather(1, logits.argmax(-1))
        return inverse / losses.mean_over(inverse, valid).unsqueeze(1).clamp_min(torch.finfo(mean.dtype).tiny)
