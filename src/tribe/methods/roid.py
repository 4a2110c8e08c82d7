"""Learn from sure and unusual predictions, lean back on the source, correct for the classes at hand: ROID (2024).

Per batch:

    predict    batch statistics; the mean prediction, smoothed, is the prior of the classes and reweights the outputs
    learn      soft likelihood ratio + agreement with an augmented view, each image weighted by certainty and diversity
    ensemble   the parameters move a small step back towards the source's
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from tribe.engine.augment import Augment, View, check_view, view
from tribe.engine.backbone import Backbone
from tribe.engine.losses import entropy, mean_over, soft_likelihood_ratio, symmetric_cross_entropy
from tribe.engine.moments import wide
from tribe.engine.optim import Adam, adam_init, adam_step, sgd_step
from tribe.engine.rng import Key
from tribe.engine.state import Affine, Info, tree_map
from tribe.methods.base import Deployed, Method, finish, finite, new_info, new_key, quiet, register, screen
from tribe.norms.batch import PerBatch

# NOTE: the paper's view has neither blur nor noise. It pads by reflection; `Augment` pads with edge values.
VIEW = Augment(sigma=(0.001, 0.001), noise=0.0)


class RoidState(NamedTuple):
    """Affine parameters, what the optimiser remembers, and what predictions look like on average."""

    affine: Affine  # (S, C)
    adam: Adam  # with SGD its first moment is the velocity
    mean: Tensor  # (S, K) moving mean of the predictions, uniform at first
    key: Key
    info: Info


@register("roid")
@dataclass(frozen=True)
class Roid(Method):
    """Batch statistics; one step a batch on the affine parameters, which stay near the source's."""

    beta: float = 0.9  # of the moving mean of the predictions
    tau: float = 1 / 3  # temperature of the weights
    alpha: float = 0.99  # share of the adapted parameters in the ensemble with the source's
    lr: float = 1e-3  # learning rate
    optimizer: Literal["adam", "sgd"] = "adam"  # sgd: Nesterov's, with momentum 0.9
    consistency: bool = True  # whether an augmented view has to agree
    prior: Literal["logits", "posteriors", "none"] = "logits"  # what the prior multiplies
    augment: View = VIEW  # a callable gets (B, ...)

    # NOTE: the paper derives the correction for posteriors; the code behind its numbers multiplies logits.
    paper = "Marsden et al., Universal test-time adaptation through weight ensembling, diversity weighting, and prior \
correction, WACV 2024"
    works_on = ("affine",)
    output = "probabilities"
    more_than_a_pass = "the prior of each batch corrects its predictions"
    presets = {  # noqa: RUF012
        "mnist": {"classes": 10},
        "cifar10": {"classes": 10},
        "cifar100": {"classes": 100},
        "imagenet": {"classes": 1000, "lr": 0.00025, "optimizer": "sgd"},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes is None:
            raise ValueError("ROID keeps a mean prediction and needs the number of classes: classes=")
        if not (0 <= self.beta <= 1 and 0 <= self.alpha <= 1):
            raise ValueError(f"beta and alpha are shares between 0 and 1; got {self.beta} and {self.alpha}")
        if self.tau <= 0 or self.lr < 0:
            raise ValueError(f"tau is positive and lr not negative; got {self.tau} and {self.lr}")
        for field, known in (("optimizer", ("adam", "sgd")), ("prior", ("logits", "posteriors", "none"))):
            if getattr(self, field) not in known:
                raise ValueError(f"{field} is one of {', '.join(known)}; got {getattr(self, field)!r}")
        check_view(self.augment)

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> RoidState:
        """Start at the source; every class is as likely."""
        affine, _ = net.source(streams)
        classes = self.classes or 0
        mean = affine.weight.new_full((streams, classes), 1 / classes)
        return RoidState(affine, adam_init(affine), mean, new_key(net, streams, seed), new_info(net, streams))

    def deployed(self, net: Backbone, state: RoidState) -> Deployed:
        """The adapted parameters, the batch's statistics."""
        return Deployed(state.affine, net.source(len(state.key.seed))[1], PerBatch())

    def predict(self, net: Backbone, state: RoidState, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Predict without adapting; the prior is the batch's own."""
        x, valid, _ = screen(x, valid)
        with torch.no_grad():
            affine, stats, norm = self.deployed(net, state)
            logits = net(x, affine, stats, norm, valid=valid).logits
            said = self._corrected(logits, valid)
            return quiet(said, valid & finite(said)).softmax(-1)

    def step(self, net: Backbone, state: RoidState, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, RoidState]:
        """Predict, learn, and step back towards the source."""
        x, valid, rejected = screen(x, valid)
        _, stats, norm = self.deployed(net, state)
        with torch.enable_grad():
            affine = state.affine.leaf()
            logits = net(x, affine, stats, norm, valid=valid).logits
            weight, kept = self._weights(logits.detach(), state.mean, valid)  # (S, B)
            losses = soft_likelihood_ratio(logits)
            if self.consistency:
                seen = net(view(self.augment, x, state.key), affine, stats, norm, valid=kept).logits
                losses = losses + symmetric_cross_entropy(seen, logits)  # the gradient goes through both
            loss = mean_over(torch.where(kept, weight * losses, 0), valid)  # (S,)
            grads = Affine(*torch.autograd.grad(loss.sum(), affine))
        moved, moments = self._moved(state, grads)
        source, _ = net.source()
        moved = tree_map(lambda p, s: self.alpha * p + (1 - self.alpha) * s, moved, source)
        mean = self.beta * state.mean + (1 - self.beta) * _mean_prediction(logits, valid).to(state.mean)
        new = state._replace(affine=moved, adam=moments, mean=mean)
        corrected, new = finish(net, state, new, self._corrected(logits, valid), valid, rejected, kept, moved)
        return corrected.softmax(-1), new

    def _weights(self, logits: Tensor, mean: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """How much each prediction counts (S, B), and which count at all: the more diverse ones."""
        p = logits.to(wide(logits.dtype)).softmax(-1)
        diversity = _spread(1 - cosine_similarity(mean.unsqueeze(1), p, dim=-1), valid)
        certainty = _spread(-entropy(logits), valid)
        kept = valid & (diversity >= mean_over(diversity, valid).unsqueeze(1))
        return (diversity * certainty / self.tau).exp(), kept

    def _moved(self, state: RoidState, grads: Affine) -> tuple[Affine, Adam]:
        if self.optimizer == "adam":
            return adam_step(state.affine, grads, state.adam, self.lr)
        moved, velocity = sgd_step(state.affine, grads, state.adam.first, self.lr, nesterov=True)
        return moved, state.adam._replace(first=velocity, steps=state.adam.steps + 1)

    def _corrected(self, logits: Tensor, valid: Tensor) -> Tensor:
        """Logits with the prior of the classes at hand, smoothed the more the fewer images or classes there are."""
        logits = logits.detach().to(wide(logits.dtype))
        if self.prior == "none":
            return logits
        prior = _mean_prediction(logits, valid)  # (S, K)
        images, classes = valid.sum(1, keepdim=True).clamp_min(1), prior.shape[-1]
        gamma = (1 / images).clamp_min(1 / classes) / prior.amax(-1, keepdim=True).clamp_min(1 / classes)
        prior = ((prior + gamma) / (1 + gamma * classes)).unsqueeze(1)
        return logits * prior if self.prior == "logits" else logits + prior.log()


def _spread(values: Tensor, valid: Tensor) -> Tensor:
    """Stretch the valid values of each row to [0, 1]; 0 where they are all alike, so that none is left out."""
    low = values.masked_fill(~valid, torch.inf).amin(1, keepdim=True)
    high = values.masked_fill(~valid, -torch.inf).amax(1, keepdim=True)
    width = high - low
    spread = (values - low) / torch.where(width > 0, width, 1)
    return torch.where(valid & (width > 0), spread, 0)


def _mean_prediction(logits: Tensor, valid: Tensor) -> Tensor:
    """Mean over the valid images: (S, K)."""
    p = logits.detach().to(wide(logits.dtype)).softmax(-1)
    return mean_over(p.transpose(1, 2), valid.unsqueeze(1))
