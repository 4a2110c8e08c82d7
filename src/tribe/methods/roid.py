"""Learn from certain and diverse predictions, stay near the source, correct for the classes of a batch: ROID (2024).

Per batch:

    predict    batch statistics; the mean prediction, smoothed, is the prior of the classes and reweights the outputs
    learn      soft likelihood ratio + agreement with an augmented view, each image weighted by certainty and diversity
    ensemble   the parameters move a small step back towards the source's
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from tribe.core import losses
from tribe.core.augment import Augment, View, view
from tribe.core.backbone import Output
from tribe.core.moments import accumulation_dtype
from tribe.core.state import tree_map
from tribe.fields import Positive, Share
from tribe.methods import Affine, Backbone, EntropyMethod, ScreenedBatch, Update, register
from tribe.methods.base import MeanState, mean_prediction

# NOTE: the paper's view has neither blur nor noise. It pads by reflection; `Augment` pads with edge values.
VIEW = Augment(sigma=(0.001, 0.001), noise=0.0)


@register("roid")
@dataclass(frozen=True)
class Roid(EntropyMethod):
    """Batch statistics; one step a batch on the affine parameters, which stay near the source's."""

    beta: Share = 0.9  # of the moving mean of the predictions
    tau: Positive = 1 / 3  # temperature of the weights
    alpha: Share = 0.99  # share of the adapted parameters in the ensemble with the source's
    optimizer: Literal["adam", "sgd"] = "adam"  # sgd: Nesterov's, with momentum 0.9
    consistency: bool = True  # whether an augmented view has to agree
    prior: Literal["logits", "posteriors", "none"] = "logits"  # what the prior multiplies
    augment: View = VIEW  # a callable gets (B, ...)

    # NOTE: the paper derives the correction for posteriors; the code behind its numbers multiplies logits.
    paper = "Marsden et al., Universal test-time adaptation through weight ensembling, diversity weighting, and prior \
correction, WACV 2024"
    per_class = "a mean prediction"
    nesterov = True
    not_exportable_because = "the prior of each batch corrects its predictions"
    presets = {"imagenet": {"lr": 0.00025, "optimizer": "sgd"}}

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> Any:
        """Start at the source; every class is equally likely."""
        affine, adam, *clocks = super().init(net, streams, seed)
        mean = affine.weight.new_full((streams, self.class_count), 1 / self.class_count)
        return MeanState(affine, adam, mean, *clocks)

    def logits(self, net: Backbone, state: Any, batch: ScreenedBatch) -> Tensor:
        """Predict without adapting; the prior is the batch's own."""
        return self._corrected(super().logits(net, state, batch), batch.valid)

    def adapt(self, net: Backbone, state: Any, batch: ScreenedBatch) -> Update:
        """Predict, learn, and step back towards the source."""
        update = super().adapt(net, state, batch)
        return update._replace(logits=self._corrected(update.logits, batch.valid))

    def objective(
        self, net: Backbone, state: Any, batch: ScreenedBatch, affine: Affine, logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted losses of the diverse predictions, and of their agreement with a view."""
        weight, chosen = self._weights(logits.detach(), state.mean, batch.valid)  # (S, B)
        each = losses.soft_likelihood_ratio(logits)  # (S, B)
        if self.consistency:
            stats, norm = self.normalisation(net, state, batch)
            seen = net(view(self.augment, batch.x, state.key), affine, stats, norm, valid=chosen).logits
            each = each + losses.symmetric_cross_entropy(seen, logits)  # the gradient flows through both
        return losses.mean_over(torch.where(chosen, weight * each, 0), batch.valid), chosen

    def follow(self, net: Backbone, state: Any, output: Output, batch: ScreenedBatch, trusted: Tensor | None) -> Any:
        """Move the mean prediction, and the parameters a little back towards the source's."""
        seen = mean_prediction(output.logits, batch.valid).to(state.mean)
        return self.ensemble(net, state._replace(mean=self.beta * state.mean + (1 - self.beta) * seen))

    def ensemble(self, net: Backbone, state: Any) -> Any:
        """Move the parameters, after a step, a little back towards the source's."""
        mixed = tree_map(lambda p, s: self.alpha * p + (1 - self.alpha) * s, state.affine, net.source()[0])
        return state._replace(affine=mixed)

    def _weights(self, logits: Tensor, mean: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight of each prediction (S, B), and which ones have one at all: the more diverse ones."""
        p = losses.probabilities(logits)
        diversity = _spread(1 - cosine_similarity(mean.unsqueeze(1), p, dim=-1), valid)
        certainty = _spread(-losses.entropy(logits), valid)
        chosen = valid & (diversity >= losses.mean_over(diversity, valid).unsqueeze(1))
        return (diversity * certainty / self.tau).exp(), chosen

    def _corrected(self, logits: Tensor, valid: Tensor) -> Tensor:
        """Return log-probabilities under the prior of the batch's classes, smoothed more for few images or classes."""
        logits = logits.detach().to(accumulation_dtype(logits.dtype))
        if self.prior == "none":
            return logits.log_softmax(-1)
        prior = mean_prediction(logits, valid)  # (S, K)
        images, classes = valid.sum(1, keepdim=True).clamp_min(1), prior.shape[-1]
        gamma = (1 / images).clamp_min(1 / classes) / prior.amax(-1, keepdim=True).clamp_min(1 / classes)
        prior = ((prior + gamma) / (1 + gamma * classes)).unsqueeze(1)
        return (logits * prior if self.prior == "logits" else logits + prior.log()).log_softmax(-1)


def _spread(values: Tensor, valid: Tensor) -> Tensor:
    """Scale the valid values of each row to [0, 1]; 0 if they are all equal, so that none is left out."""
    low = values.masked_fill(~valid, torch.inf).amin(1, keepdim=True)
    high = values.masked_fill(~valid, -torch.inf).amax(1, keepdim=True)
    width = high - low
    spread = (values - low) / torch.where(width > 0, width, 1)
    return torch.where(valid & (width > 0), spread, 0)
