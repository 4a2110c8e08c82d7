"""CoTTA with a posterior of the weights from source training: PETAL (Brahma & Rai, CVPR 2023).

Two things differ from CoTTA. The loss has a second term, the distance from the posterior of source training, a Gaussian
for each weight (SWAG-diagonal; Maddox et al., NeurIPS 2019): spw / 2 sum (theta - mean)^2 / (var + eps). And the
weights to reset are not drawn at random: they are those with the smallest squared gradient.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tribe.core import all_weights, losses
from tribe.core.all_weights import Parameters, WeightLayout
from tribe.core.state import tree_map
from tribe.fields import Count, Momentum, NotNegative, Share
from tribe.knowledge import Knowledge, KnowledgeLike, checked_tensors, require_labels, study_batches
from tribe.methods import Backbone, PerBatch, register
from tribe.methods.cotta import AveragedTeacher, CottaState

EPS = 1e-6  # added to the posterior's variance, as released


@register("petal")
@dataclass(frozen=True)
class Petal(AveragedTeacher):
    """PETAL: the loss has a term from the posterior of source training; weights with small gradients are reset."""

    spw: NotNegative = 1e-9  # weight of the posterior's term
    delta: Share = 0.03  # the share of weights, those of smallest squared gradient, that is reset to the source
    swag_lr: NotNegative = 0.01  # `study`: the constant learning rate of SGD
    swag_momentum: Momentum = 0.9  # `study`: SGD's momentum
    swag_every: Count = 1  # `study`: batches between two snapshots of the weights
    knowledge: KnowledgeLike = None

    paper = "Brahma & Rai, A probabilistic framework for lifelong test-time adaptation, CVPR 2023"
    needs = "the mean and variance of every weight under source training (SWAG-diagonal)"

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> CottaState:
        """Student and teacher start at the source."""
        names = WeightLayout(net).names().items()
        checked_tensors(self, net, {f"{kind}/{name}": shape for kind in ("mean", "var") for name, shape in names})
        return super().init(net, streams, seed)

    def regularised(self, layout: WeightLayout, state: CottaState, grads: Parameters) -> Parameters:
        """Add the gradient towards the posterior's mean, stronger where its variance is small."""
        assert isinstance(self.knowledge, Knowledge)
        known = self.knowledge.on(layout.net)
        mean, var = (
            layout.pack({name.removeprefix(kind): t for name, t in known.items() if name.startswith(kind)})
            for kind in ("mean/", "var/")
        )

        def add_term(g: Tensor, theta: Tensor, m: Tensor, v: Tensor) -> Tensor:
            return torch.addcdiv(g, theta - m, v + EPS, value=self.spw)

        return tree_map(add_term, grads, state.student, mean, var)

    def forget(self, layout: WeightLayout, state: CottaState, student: Parameters, grads: Parameters) -> Parameters:
        """Reset the weights whose squared gradient is below the quantile over all weights of the stream."""
        squared = all_weights.flat(grads).square()
        limit = all_weights.quantile(layout.existing_columns(squared), self.delta)
        return all_weights.restore(squared < limit[:, None], student, layout.source())

    def study(self, net: Backbone, batches: Iterable[tuple[Tensor, Tensor]]) -> Knowledge:
        """Continue source training with SGD at a constant rate; compute the mean and variance of the weights.

        NOTE: Maddox et al. take a snapshot an epoch; `swag_every` counts batches, since there may be only one epoch.
        """
        layout = WeightLayout(net)
        theta = mean = layout.source()
        velocity = spread = tree_map(torch.zeros_like, theta)
        images = snapshots = 0
        for count, (x, y) in enumerate(study_batches(net, batches), 1):
            with torch.enable_grad():
                params = all_weights.leaf(theta)
                valid = torch.ones(x.shape[:2], dtype=torch.bool, device=net.device)
                logits = all_weights.forward(layout, params, x, PerBatch(), valid).logits
                grads = all_weights.gradients(losses.cross_entropy(logits, require_labels(y, logits)).mean(), params)
            velocity = tree_map(lambda v, g: self.swag_momentum * v + g, velocity, grads)
            theta = tree_map(lambda t, v: t - self.swag_lr * v, theta, velocity)
            images += x.shape[1]
            if count % self.swag_every == 0:  # about the moving mean: squares about zero would cancel
                snapshots += 1
                before, n = mean, snapshots
                mean = tree_map(lambda m, t, n=n: m + (t - m) / n, before, theta)
                spread = tree_map(lambda v, t, old, new: v + (t - old) * (t - new), spread, theta, before, mean)
        if snapshots < 2:
            raise ValueError(
                f"a posterior needs at least two snapshots of the weights; got {snapshots}, one every "
                f"{self.swag_every} batches. Give more batches, or a smaller swag_every"
            )
        var = tree_map(lambda v: v / snapshots, spread)
        settings = {name: getattr(self, name) for name in ("swag_lr", "swag_momentum", "swag_every")}
        made = {"images": images, "snapshots": snapshots, **settings}
        kinds = {"mean": layout.unpack(mean), "var": layout.unpack(var)}
        tensors = {f"{kind}/{name}": t.clone() for kind, named in kinds.items() for name, t in named.items()}
        return Knowledge(self.name, tensors, net.fingerprint(exact=False), made)
