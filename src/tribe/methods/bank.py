"""Follow the stream at several speeds at once, and predict with the mixture that foresees it best: a bank of speeds.

Beyond the paper. One pass a batch, no gradient: what a step costs beside plain inference is the moments of each layer.
Per batch:

    predict     with the mixture of the source's statistics and those of every speed, from before this batch
    score       each speed by how well its pooled statistics foresaw the moments of this batch, in the same pass
    update      Balanced BN at every speed, with the labels just predicted

The score of a speed is the Gaussian negative log-likelihood of each image's moments (mean, var) in each channel,

    0.5 (log V + (var + (mean - M)^2) / V),    M, V the pooled mean and variance of the speed,

averaged over channels and over the last images. Images of classes that came often lately count less: a burst says
little about the world. The weights of the mixture are softmax(-score / temperature), where the source has a bonus:
adapting costs accuracy where little has changed.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from tribe.core.bounds import TRUTH
from tribe.core.rules import Recorded
from tribe.core.state import Affine, Info, Stats, room_for
from tribe.fields import NotNegative, Positive, Share, require
from tribe.methods import Backbone, Deployed, Frozen, Key, Method, ScreenedBatch, Update, finite, mask_logits, register
from tribe.norms.balanced import Balanced, ClassSums, published_eta

MOST_WEIGHT = 10.0  # of an image of a rare class, relative to the mean


class BankState(NamedTuple):
    """Class statistics at every speed above 0, and how well each speed foresees the stream."""

    stats: Stats  # (V S, K, C), the V speeds of a stream are adjacent
    pooled: Stats  # (V S, 1, C), the same pooled over classes
    score: Tensor  # (S, V + 1) relative to the source, which is first; lower is better
    frequency: Annotated[Tensor, TRUTH]  # (S, K) of the classes predicted lately
    key: Key
    info: Info


@register("bank")
@dataclass(frozen=True)
class Bank(Method):
    """A bank of speeds. A field that is None gets a value for the number of classes."""

    speeds: tuple[float, ...] | None = None  # momenta of one image in Balanced BN, beside 0, the source
    gamma: Share | None = None  # share of the class-agnostic update; more where pseudo labels are poor
    bonus: NotNegative = 0.05  # by which the source's score is better than it measures
    temperature: Positive = 0.02  # of the weights: lower decides harder
    horizon: Positive = 300.0  # images over which scores and frequencies are averaged

    paper = "none: one forward pass with TRIBE's Balanced BN at several speeds"
    works_on = ("statistics",)
    per_class = "statistics of each class"

    def __post_init__(self) -> None:
        super().__post_init__()
        speeds = tuple(self.speeds or ())
        fine = all(isinstance(v, int | float) and 0 < v <= 1 for v in speeds) and len(set(speeds)) == len(speeds) > 0
        expected = "speeds of bank are different numbers above 0 and at most 1, beside 0, which is the source"
        require(fine, expected, self.speeds)
        object.__setattr__(self, "speeds", tuple(float(v) for v in speeds))

    def defaults(self) -> dict[str, object]:
        """Return TRIBE's momentum, three and ten times as much, and its gamma for 100 classes at least.

        Where most labels are wrong, as at night, the statistics of single classes do not move: a share of all does.
        """
        eta = published_eta(self.class_count)
        speeds = tuple(dict.fromkeys(min(scale * eta, 1.0) for scale in (1, 3, 10)))
        return {"speeds": speeds, "gamma": self.published(0.1, 0.1, 0.5)}

    @cached_property
    def norm(self) -> Balanced:
        """Return Balanced BN; each row has a speed of its own."""
        return Balanced(self.class_count, gamma=self.gamma or 0.0)

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> BankState:
        """Start every speed at the source."""
        assert self.speeds is not None
        rows = streams * len(self.speeds)
        stats, pooled = (net.source(rows, count)[1] for count in (self.class_count, 1))
        key, info = self.new_key_and_info(net, streams, seed)
        score = pooled.mean.new_zeros(streams, len(self.speeds) + 1)
        frequency = pooled.mean.new_full((streams, self.class_count), 1 / self.class_count)
        return BankState(stats, pooled, score, frequency, key, info)

    def weights(self, state: BankState) -> Tensor:
        """Return the weights of the source and of every speed in the mixture: (S, V + 1)."""
        bonus = state.score.new_tensor([self.bonus] + [0.0] * (state.score.shape[1] - 1))
        return ((bonus - state.score) / self.temperature).softmax(1)

    def deployed(self, net: Backbone, state: BankState) -> Deployed:
        """Return the source's parameters with the mixture of the statistics."""
        weights = self.weights(state).unsqueeze(2)
        mean, var = ((weights * t).sum(1, keepdim=True) for t in self._candidates(net, state))
        affine = Affine(*(t.expand(len(mean), -1) for t in net.origin.state.affine))
        return Deployed(affine, Stats(mean, var), Frozen())

    def _candidates(self, net: Backbone, state: BankState) -> Stats:
        """Return the statistics of the source and the pooled ones of every speed: (S, V + 1, C)."""
        streams, pairs = len(state.score), zip(net.origin.state.stats, state.pooled, strict=True)
        return Stats(
            *(torch.cat((own.expand(streams, -1, -1), t.view(streams, -1, t.shape[2])), 1) for own, t in pairs)
        )

    @torch.no_grad()
    def adapt(self, net: Backbone, state: BankState, batch: ScreenedBatch) -> Update:
        """Predict, score the speeds, and update the statistics."""
        affine, stats, _ = batch.deploy(net, state)
        logits, _, moments = net(batch.x, affine, stats, Recorded(), valid=batch.valid)
        seen = batch.valid & finite(logits)
        logits = mask_logits(logits, seen)
        if batch.on_prediction is not None:
            batch.on_prediction(logits)
        spare = None if batch.retired is None else batch.retired.stats
        return Update(logits, self._follow(net, state, moments, logits.argmax(-1), seen, spare), seen=seen)

    def _follow(
        self, net: Backbone, state: BankState, moments: Stats, labels: Tensor, seen: Tensor, spare: Any = None
    ) -> BankState:
        """Score and update every speed with the moments (S, B, C) and the labels (S, B) of the images ``seen``."""
        sums = self.norm.sum_classes(moments, labels, seen, net.origin.state.stats.mean)
        images = sums.images.sum(1)  # (S, 1)
        keep = torch.exp(-images / self.horizon)
        most = images.clamp_min(1)
        came = sums.images.squeeze(2) / most  # (S, G)
        seldom = (1 / (self.class_count * state.frequency)).clamp_max(MOST_WEIGHT)
        if sums.labels is not None:
            seldom = seldom.gather(1, sums.labels)
            came = torch.zeros_like(state.frequency).scatter_add(1, sums.labels, came)
        gain = self._surprise(net, state, sums, seldom / most)  # (S, V + 1)
        score = torch.lerp(gain - gain[:, :1], state.score, keep)
        frequency = torch.lerp(came, state.frequency, keep)
        stats = room_for(state.stats, spare)
        pooled = self.norm.follow(state.stats, images.new_tensor(self.speeds).view(-1, 1, 1), sums, stats)
        return state._replace(stats=stats, pooled=pooled, score=score, frequency=frequency)

    def _surprise(self, net: Backbone, state: BankState, sums: ClassSums, weight: Tensor) -> Tensor:
        """Return the negative log-likelihood of images, weighted by their class (S, G), under each speed: (S, V + 1).

        The square is expanded around the source's mean, so that no tensor of images, speeds and channels is made.
        """
        foreseen, spread = self._candidates(net, state)
        offset, spread = foreseen - sums.origin, spread + net.eps
        weight = weight.unsqueeze(2)
        total = (weight * sums.images).sum(1, keepdim=True)  # (S, 1, 1)
        linear, square = (weight * sums.joint).sum(1, keepdim=True).chunk(2, 2)  # (S, 1, C)
        apart = torch.addcmul(square + total * net.eps, offset, total * offset - 2 * linear)
        surprise: Tensor = 0.5 * torch.addcmul(apart / spread, total, spread.log()).mean(2)
        return surprise
