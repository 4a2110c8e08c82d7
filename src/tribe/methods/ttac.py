"""Pull the clusters of test features onto the clusters of source features: TTAC (Su et al., NeurIPS 2022), no queue.

A Gaussian describes the features of each class, and one those of all images together. The source's are known; those of
the stream are updated batch by batch, from the samples the network is certain of. All layers but Linear ones (so not
the classifier) learn to reduce the symmetric Kullback-Leibler divergence between the two.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tribe.core import all_weights, losses, optim
from tribe.core.all_weights import Parameters, WeightLayout
from tribe.core.backbone import Output
from tribe.core.bounds import COUNT
from tribe.core.moments import accumulation_dtype
from tribe.core.state import Affine, Info, tree_map
from tribe.fields import Count, NotNegative, Positive, Range, Share
from tribe.knowledge import Knowledge, KnowledgeError, KnowledgeLike, checked_tensors, study_batches
from tribe.methods import Backbone, Deployed, Frozen, Key, Method, PerBatch, ScreenedBatch, Update, register
from tribe.methods.method import features_of
from tribe.norms import Norm

LIMIT = 2**30  # most numbers in the class covariances of one stream: 4 GB in float32

# The tensors of TTAC's source knowledge; K is 0 if it was studied without classes.
SHAPES = {"mean": "F", "cov": "FF", "class_mean": "KF", "class_cov": "KFF"}


class Gaussians(NamedTuple):
    """Clusters of features, and how many samples each has had."""

    mean: Tensor  # (S, K, F)
    cov: Tensor  # (S, K, F, F)
    seen: Annotated[Tensor, COUNT]  # (S, K) int64


class TtacState(NamedTuple):
    """Parameters, Adam's moments of their gradients, and the stream's clusters."""

    affine: Affine  # (S, C)
    weights: Tensor  # (S, P), all but those of Linear layers
    adam: optim.Adam
    clusters: Gaussians  # one a class
    whole: Gaussians  # one of all samples, K = 1
    key: Key
    info: Info


@register("ttac")
@dataclass(frozen=True)
class Ttac(Method):
    """TTAC without its queue of past images."""

    lr: NotNegative = 1e-5  # Adam's learning rate
    tau_pp: Share = 0.9  # probability above which a sample counts for the class it is predicted as
    n_clus: Count | None = None  # samples a class's Gaussian averages over; None: 128 for up to ten classes, else 64
    n_all: Count = 1280  # samples the Gaussian of all averages over
    n_min: Annotated[int, Range()] = 16  # samples of a class before it is aligned
    ridge: Positive = 1 / 30  # share of the largest source covariance, added to every variance
    class_aware: bool = True  # align each class too, not only all features together
    # NOTE: the released code uses the batch's statistics; the paper's numbers look like frozen ones.
    statistics: Literal["batch", "frozen"] = "batch"
    knowledge: KnowledgeLike = None

    capture = "never"  # the host checks which classes are present, to skip the covariances of the others
    paper = "Su et al., Revisiting realistic test-time training: anchored clustering, NeurIPS 2022"
    works_on = ("features",)
    per_class = "a cluster of each class"
    small = {"n_min": 2}
    needs = "the mean and covariance of source features, of each class and of all"
    presets = {
        "mnist": {"n_clus": 128},
        "cifar10": {"n_clus": 128},
        "cifar100": {"n_clus": 64},
        "imagenet": {"n_clus": 64, "class_aware": False},  # NOTE: its 1000 covariances of classes are 2048 x 2048
    }

    def defaults(self) -> dict[str, int]:
        """Return the published number of samples."""
        return {"n_clus": 128 if self.class_count <= 10 else 64}

    @property
    def norm(self) -> Norm:
        """The rule that normalises."""
        return PerBatch() if self.statistics == "batch" else Frozen()

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> TtacState:
        """The classes' clusters start as the source's, the one of all samples empty."""
        known = checked_tensors(self, net, SHAPES)
        self._check(known)
        classes, features = self.class_count if self.class_aware else 0, len(known["mean"])
        mean, cov = (
            known[name][:classes].expand(streams, *known[name][:classes].shape).clone()
            for name in ("class_mean", "class_cov")
        )
        params = WeightLayout(net, without=nn.Linear).source(streams)
        key, info = self.new_key_and_info(net, streams, seed)
        clusters = Gaussians(mean, cov, key.clock.new_zeros(streams, classes))
        no_mean = params.weights.new_zeros(streams, 1, features)
        no_cov = params.weights.new_zeros(streams, 1, features, features)
        whole = Gaussians(no_mean, no_cov, key.clock.new_zeros(streams, 1))
        return TtacState(*params, optim.adam_init(params), clusters, whole, key, info)

    def _check(self, known: dict[str, Tensor]) -> None:
        assert isinstance(self.knowledge, Knowledge)
        if (made := self.knowledge.spec.get("statistics", self.statistics)) != self.statistics:
            raise KnowledgeError(
                f"{self.knowledge!r} describes features under {made} statistics; this TTAC uses {self.statistics} "
                f"ones. Make it again with statistics={self.statistics!r}"
            )
        if self.class_aware and len(known["class_mean"]) != self.classes:
            raise KnowledgeError(
                f"{self.knowledge!r} describes {len(known['class_mean'])} classes; this TTAC aligns {self.classes}. "
                "Make it again, or set class_aware=False"
            )

    def deployed(self, net: Backbone, state: TtacState) -> Deployed:
        """Return the adapted parameters; the batch's statistics, or the source's."""
        layout = WeightLayout(net, without=nn.Linear)
        weights = [layout.views(row) for row in state.weights]
        return Deployed(state.affine, net.source(len(state.key.seed))[1], self.norm, weights)

    def adapt(self, net: Backbone, state: TtacState, batch: ScreenedBatch) -> Update:
        """Predict, update the clusters, and take one Adam step that makes them more like the source's."""
        assert isinstance(self.knowledge, Knowledge)
        x, valid = batch.x, batch.valid
        layout, known, params = WeightLayout(net, without=nn.Linear), self.knowledge.on(net), Parameters(*state[:2])
        logits, grads, clusters, whole = [], [], [], []
        for i in params.streams(x):
            row = slice(i, i + 1)
            with torch.enable_grad():
                own = all_weights.leaf(params.stream(i))
                output = all_weights.forward(layout, own, x[row], self.norm, valid[row])
                classes, every = (Gaussians(*(t[i] for t in g)) for g in (state.clusters, state.whole))
                with torch.autocast(x.device.type, enabled=False):  # covariances need full precision
                    loss, classes, every = self._align(output, valid[i], classes, every, known)
                grads.append(all_weights.gradients(loss, own))
            logits.append(output.logits.detach())
            clusters.append(classes)
            whole.append(every)
        moved, moments = optim.adam_step(params, all_weights.stack_streams(grads), state.adam, self.lr)
        all_classes, all_whole = (tree_map(lambda *t: torch.stack(t), *streams) for streams in (clusters, whole))
        new = TtacState(*moved, moments, all_classes, all_whole, state.key, state.info)
        predicted = torch.cat(logits)
        return Update(predicted, new, self._certain(predicted) & valid, moved.affine)

    def _certain(self, logits: Tensor) -> Tensor:
        return losses.probabilities(logits).amax(-1) > self.tau_pp

    def _align(
        self, output: Output, valid: Tensor, clusters: Gaussians, whole: Gaussians, known: dict[str, Tensor]
    ) -> tuple[Tensor, Gaussians, Gaussians]:
        """Return the loss of one stream's batch, of which ``valid`` (B,) count, and its clusters after the batch."""
        logits, features = output.logits[0], features_of(self, output)[0].to(known["mean"].dtype)  # (B, K), (B, F)
        identity = torch.eye(features.shape[1], dtype=features.dtype, device=features.device)
        ridge = self.ridge * known["cov"].max() * identity
        every = torch.zeros(1, dtype=torch.int64, device=valid.device)
        mean, cov, whole = follow(whole, every, features, valid[None], self.n_all)
        loss = divergence(mean, cov + ridge, known["mean"][None], known["cov"][None] + ridge).sum()
        if not self.class_aware:
            return loss, clusters, whole
        certain = self._certain(logits.detach()) & valid
        members = certain & (
            logits.argmax(-1) == torch.arange(len(clusters.mean), device=valid.device)[:, None]
        )  # (K, B)
        present = members.any(1).nonzero()[:, 0]  # waits for the device, to skip absent classes
        mean, cov, clusters = follow(clusters, present, features, members[present], self.n_clus or 1)
        aligned = (clusters.seen[present] >= self.n_min).nonzero()[:, 0]
        if len(aligned):
            at = present[aligned]
            sides = mean[aligned], cov[aligned] + ridge, known["class_mean"][at], known["class_cov"][at] + ridge
            loss = loss + divergence(*sides).sum() / len(clusters.mean)
        return loss, clusters, whole

    @torch.no_grad()
    def study(self, net: Backbone, batches: Iterable[tuple[Tensor, Tensor]]) -> Knowledge:
        """Compute the Gaussians of source features, of all images and of each predicted class.

        A class that is never predicted gets the Gaussian of all.
        """
        sums: Sums | None = None
        images = 0
        for x, _ in study_batches(net, batches):
            output = net(x, *net.source(), self.norm)
            logits, features = output.logits[0], features_of(self, output)[0]
            sums = sums or Sums(logits.shape[-1] if self.class_aware else 0, features)
            sums.add(features, logits.argmax(-1))
            images += x.shape[1]
        if sums is None or images < 2:
            raise ValueError(f"the Gaussians of source features need at least two images; got {images}")
        made = {"images": images, "statistics": self.statistics, "class_aware": self.class_aware}
        return Knowledge(self.name, sums.gaussians(accumulation_dtype(net.dtype)), net.fingerprint(exact=False), made)


def follow(
    old: Gaussians, which: Tensor, features: Tensor, members: Tensor, memory: int
) -> tuple[Tensor, Tensor, Gaussians]:
    """Move clusters ``which`` (A,) by their members (A, B) among the features (B, F).

    Returns their means (A, F) and covariances (A, F, F), with gradients through this batch's share, and all clusters
    after it.
    """
    share = members.to(features.dtype)
    m = share.sum(1)
    seen = old.seen.index_add(0, which, members.sum(1))
    rate = 1 / seen[which].clamp(1, memory).to(features.dtype)
    # NOTE: the released rate of the averages has no such bound; with more samples in a batch than ``memory`` variances
    # became negative.
    rate = torch.minimum(rate, 1 / m.clamp_min(1))
    past, past_cov = old.mean[which], old.cov[which]
    d = (features - past[:, None]) * share[..., None]  # (A, B, F)
    delta = rate[:, None] * d.sum(1)
    mean = past + delta
    gained = d.mT @ d - m[:, None, None] * past_cov
    cov = past_cov + rate[:, None, None] * gained - delta[:, :, None] * delta[:, None, :]
    new_mean, new_cov = (t.index_copy(0, which, u.detach()) for t, u in ((old.mean, mean), (old.cov, cov)))
    return mean, cov, Gaussians(new_mean, new_cov, seen)


def divergence(mean: Tensor, cov: Tensor, other_mean: Tensor, other_cov: Tensor) -> Tensor:
    """Mean of the two Kullback-Leibler divergences between Gaussians (A, F) and (A, F, F): (A,).

    The logarithms of the determinants cancel.
    """
    precision, other = (torch.cholesky_inverse(torch.linalg.cholesky_ex(c)[0]) for c in (cov, other_cov))
    gap = (mean - other_mean)[..., None]
    apart = (((precision + other) @ gap) * gap).sum((-2, -1))
    return ((precision * other_cov + other * cov).sum((-2, -1)) - 2 * mean.shape[-1] + apart) / 4


class Sums:
    """Counts, sums and sums of products of features, for each class and, last, for all."""

    def __init__(self, classes: int, like: Tensor) -> None:
        self.features = like.shape[1]
        if (numbers := classes * self.features**2) > LIMIT:
            raise ValueError(
                f"TTAC keeps a covariance of {self.features} x {self.features} features for each of {classes} classes: "
                f"{numbers * 4 / 1e9:.1f} GB a stream, more than {LIMIT * 4 / 1e9:.0f}. class_aware=False aligns all "
                "features together, without classes"
            )
        exact = torch.float32 if like.device.type == "mps" else torch.float64
        self.count = torch.zeros(classes + 1, dtype=exact, device=like.device)
        self.first = self.count.new_zeros(classes + 1, self.features)
        self.second = self.count.new_zeros(classes + 1, self.features, self.features)

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add (B, F) features of the classes (B,)."""
        features, last = features.to(self.first), len(self.count) - 1
        chosen = [(k, features[labels == k]) for k in labels.unique().tolist() if k < last]
        for k, rows in [*chosen, (last, features)]:
            self.count[k] += len(rows)
            self.first[k] += rows.sum(0)
            self.second[k] += rows.mT @ rows

    def gaussians(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Means and biased covariances, as `Ttac` reads them."""
        count = self.count.clamp_min(1)[:, None]
        mean = self.first / count
        cov = self.second / count[..., None] - mean[:, :, None] * mean[:, None, :]
        if bool(cov[-1].max() <= 0):
            raise ValueError("all source images have the same features: a covariance to align with is missing")
        seen = self.count > 0
        mean, cov = torch.where(seen[:, None], mean, mean[-1]), torch.where(seen[:, None, None], cov, cov[-1])
        tensors = {"class_mean": mean[:-1], "class_cov": cov[:-1], "mean": mean[-1], "cov": cov[-1]}
        return {name: t.to(dtype).clone() for name, t in tensors.items()}
