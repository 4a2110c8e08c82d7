"""CoTTA that knows how sure source training was of each weight: PETAL (Brahma & Rai, CVPR 2023).

Two things differ from CoTTA. The loss also holds the student to the posterior of source training, a Gaussian for each
weight (SWAG-diagonal; Maddox et al., NeurIPS 2019): spw / 2 sum (theta - mean)^2 / (var + eps). And what goes back to
the source is not drawn by lot: it is the weights whose squared gradient is the smallest.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tribe.engine.all_weights import Parameters, WeightLayout, flat, forward, gradients, leaf, quantile, restore
from tribe.engine.backbone import Backbone
from tribe.engine.losses import cross_entropy
from tribe.engine.state import tree_map
from tribe.knowledge import Knowledge, KnowledgeLike, checked_tensors, require_labels, study_batches
from tribe.methods.base import register
from tribe.methods.cotta import AveragedTeacher, CottaState
from tribe.norms.batch import PerBatch

EPS = 1e-6  # added to the posterior's variance, as released


@register("petal")
@dataclass(frozen=True)
class Petal(AveragedTeacher):
    """PETAL: a term from the posterior of source training; weights with small gradients are forgotten."""

    spw: float = 1e-9  # weight of the posterior's term
    delta: float = 0.03  # the share of weights, those of smallest squared gradient, that goes back to the source
    swag_lr: float = 0.01  # `study`: the constant learning rate of SGD
    swag_momentum: float = 0.9  # `study`: SGD's momentum
    swag_every: int = 1  # `study`: batches between two snapshots of the weights
    knowledge: KnowledgeLike = None

    paper = "Brahma & Rai, A probabilistic framework for lifelong test-time adaptation, CVPR 2023"
    needs = "the mean and variance of every weight under source training (SWAG-diagonal)"
    presets = {  # noqa: RUF012
        "mnist": {"classes": 10, "p_th": 0.92},
        "cifar10": {"classes": 10, "p_th": 0.92},
        "cifar100": {"classes": 100, "p_th": 0.72},
        "imagenet": {"classes": 1000, "p_th": 0.1, "chunk": 4},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spw < 0 or not 0 <= self.delta <= 1:
            raise ValueError(f"spw is not negative and delta within 0 and 1; got {self.spw} and {self.delta}")
        if self.swag_lr < 0 or not 0 <= self.swag_momentum < 1 or self.swag_every < 1:
            raise ValueError(
                "swag_lr is not negative, swag_momentum within 0 and 1 (1 excluded) and swag_every at least 1; got "
                f"{self.swag_lr}, {self.swag_momentum} and {self.swag_every}"
            )

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> CottaState:
        """Student and teacher start at the source."""
        names = WeightLayout(net).names()
        checked_tensors(
            self, net, {f"{kind}/{name}": shape for kind in ("mean", "var") for name, shape in names.items()}
        )
        return super().init(net, streams, seed)

    def regularised(self, layout: WeightLayout, state: CottaState, grads: Parameters) -> Parameters:
        """Add the pull towards the posterior's mean, the stronger the surer source training was."""
        assert isinstance(self.knowledge, Knowledge)
        mean, var = self._posterior(layout, self.knowledge.on(layout.net))

        def pulled(g: Tensor, theta: Tensor, m: Tensor, v: Tensor) -> Tensor:
            return torch.addcdiv(g, theta - m, v + EPS, value=self.spw)

        return tree_map(pulled, grads, state.student, mean, var)

    def forget(self, layout: WeightLayout, state: CottaState, student: Parameters, grads: Parameters) -> Parameters:
        """The weights whose squared gradient is strictly below the quantile over all of a stream's."""
        squared = flat(grads).square()
        limit = quantile(layout.existing_columns(squared), self.delta)
        return restore(squared < limit[:, None], student, layout.source())

    def study(self, net: Backbone, batches: Iterable[tuple[Tensor, Tensor]]) -> Knowledge:
        """Train on from the source with SGD at a constant rate, and take the mean and variance of where it goes.

        NOTE: Maddox et al. take a snapshot an epoch; `swag_every` counts batches, since one pass may be all there is.
        """
        layout = WeightLayout(net)
        theta = mean = layout.source()
        speed = spread = tree_map(torch.zeros_like, theta)
        images = snapshots = 0
        for count, (x, y) in enumerate(study_batches(net, batches), 1):
            with torch.enable_grad():
                params = leaf(theta)
                valid = torch.ones(x.shape[:2], dtype=torch.bool, device=net.device)
                logits = forward(layout, params, x, PerBatch(), valid).logits
                grads = gradients(cross_entropy(logits, require_labels(y, logits)).mean(), params)
            speed = tree_map(lambda s, g: self.swag_momentum * s + g, speed, grads)
            theta = tree_map(lambda t, s: t - self.swag_lr * s, theta, speed)
            images += x.shape[1]
            if count % self.swag_every == 0:  # moments about the moving mean: those about zero would cancel
                snapshots += 1
                before, n = mean, snapshots
                mean = tree_map(lambda m, t, n=n: m + (t - m) / n, before, theta)
                spread = tree_map(lambda v, t, old, new: v + (t - old) * (t - new), spread, theta, before, mean)
        if snapshots < 2:
            raise ValueError(
                f"a posterior needs two snapshots of the weights at least: got {snapshots}, one every "
                f"{self.swag_every} batches. Give more batches, or a smaller swag_every"
            )
        var = tree_map(lambda v: v / snapshots, spread)
        settings = {name: getattr(self, name) for name in ("swag_lr", "swag_momentum", "swag_every")}
        made = {"images": images, "snapshots": snapshots, **settings}
        return Knowledge(self.name, named(layout.unpack(mean), layout.unpack(var)), net.fingerprint(exact=False), made)

    @staticmethod
    def _posterior(layout: WeightLayout, tensors: Mapping[str, Tensor]) -> tuple[Parameters, Parameters]:
        mean, var = (
            layout.pack({name.removeprefix(kind): t for name, t in tensors.items() if name.startswith(kind)})
            for kind in ("mean/", "var/")
        )
        return mean, var


def named(mean: Mapping[str, Tensor], var: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What PETAL must know, from means and variances under the names of the model's own state dict."""
    kinds = {"mean": mean, "var": var}
    return {f"{kind}/{name}": t.detach().clone() for kind, part in kinds.items() for name, t in part.items()}
