"""Sense how far the features have drifted from the source's, and adapt the more cautiously: PeTTA (NeurIPS 2024).

A teacher and a student as in RoTTA, with Robust BN and the same memory, and the source's parameters as an anchor. Per
batch:

    predict    the teacher                                          -> what is returned, labels, and features
    sense      gamma, between 0 and 1: how far the moving mean of the features of each predicted class has gone from
               the source's, in units of the source's variance                                   (Eq. 6 of the paper)
    adjust     lambda = gamma lambda_0 and alpha = (1 - gamma) alpha_0                            (Eq. 7)
    remember   add each image to the memory; see `tribe.core.memory`
    learn      the student, on the memory and its augmentation: L_CLS, agreement with the teacher, + L_AL, with the
               anchor, + lambda R, the distance of its parameters from the source's; one Adam step, affine only
    follow     teacher <- (1 - alpha) teacher + alpha student
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from tribe.core import losses, memory, optim
from tribe.core.augment import Augment, View, view
from tribe.core.backbone import Backbone
from tribe.core.graphs import segment
from tribe.core.memory import Timely
from tribe.core.rng import Key
from tribe.core.rules import Frozen
from tribe.core.state import Affine, Info, Stats, select, tree_map
from tribe.fields import NotNegative, Share
from tribe.knowledge import Knowledge, KnowledgeError, KnowledgeLike, checked_tensors, study_batches
from tribe.methods import ScreenedBatch, finite, mask_logits, register, report_agreement
from tribe.methods.method import features_of
from tribe.methods.rotta import Branch, TimelyMethod
from tribe.norms.batch import Robust


class PettaState(NamedTuple):
    """Teacher and student, the anchor's statistics, the mean features, Adam's moments, and the memory."""

    teacher: Branch
    student: Branch
    anchor: Stats  # (S, 1, C)
    mean: Tensor  # (S, K, F) moving mean of the features of each predicted class; the source's at first
    adam: optim.Adam
    memory: Timely
    key: Key
    info: Info


class PettaPrediction(NamedTuple):
    """The teacher's predictions of a batch, and the divergence."""

    prediction: Tensor  # (S, B, K) logits
    counts: Tensor  # (S, B) bool, which images they are for
    labels: Tensor  # (S, B)
    score: Tensor  # (S, B), the entropies
    gamma: Tensor  # (S,) the divergence before the batch
    mean: Tensor  # (S, K, F) after it


@register("petta")
@dataclass(frozen=True)
class Petta(TimelyMethod):
    """PeTTA. It learns once a batch, as released; published for batches of 64.

    Published settings: all defaults, for every data set; the plain loss for ImageNet-C, the symmetric one for others.

    NOTE: the source's means and variances come from images that the source model classifies itself, as released. There
    they are test images of the source data, here training images: `tribe source` never uses test images for a method. A
    class with fewer than two of them gets those of all images.
    """

    alpha_0: Share = 0.001  # the student's share in each step of the teacher, without divergence
    lambda_0: NotNegative = 10.0  # weight of R where the divergence is complete
    anchor_weight: NotNegative = 1.0  # weight of L_AL, which is constant
    nu: Share = 0.05  # the newest batch's share in the moving means of the features
    alpha_bn: Share = 0.05  # the newest batch's share in the statistics of Robust BN
    loss: Literal["symmetric", "plain"] = "symmetric"  # L_CLS: RMT's, both ways and with both views, or RoTTA's
    regularizer: Literal["cosine", "l2"] = "cosine"  # R: mean over the parameters of minus their cosine, or of squares
    # NOTE: Eq. 6 sums over the F features and then takes the mean over classes of 1 - exp(-distance): with hundreds of
    # features gamma is always 1. Released: 1 - exp(-mean over classes and features).
    sensing: Literal["released", "paper"] = "released"
    augment: View = Augment()  # noqa: RUF009  what the student sees; a callable gets (B, ...)
    knowledge: KnowledgeLike = None

    paper = "Hoang et al., Persistent test-time adaptation in recurring testing scenarios, NeurIPS 2024"
    works_on = ("affine", "features")
    per_class = "a mean of the features, and a share of its memory, for each class"
    needs = "the mean and variance of source features of each class"
    presets = {"imagenet": {"loss": "plain"}}

    def study(self, net: Backbone, batches: Iterable[tuple[Tensor, Tensor]]) -> Knowledge:
        """Mean and variance of the features of the images that the source model assigns to each class."""
        images, nothing = 0, torch.zeros((), dtype=torch.float64, device=net.device)
        counts, total, squares = nothing, nothing, nothing
        for x, _ in study_batches(net, batches):
            output = net(x, *net.source(), Frozen())
            features = features_of(self, output)[0].double()  # (B, F)
            member = _members(output.logits.argmax(-1), self.class_count)[0].double()  # (B, K)
            images, counts = images + x.shape[1], counts + member.sum(0)
            total, squares = total + member.T @ features, squares + member.T @ features.square()  # (K, F)
        if not images:
            raise KnowledgeError("PeTTA's means and variances of source features need source images; got none")
        mean, var = _moments(counts, total, squares)
        overall = _moments(counts.sum(0, keepdim=True), total.sum(0, keepdim=True), squares.sum(0, keepdim=True))
        few = (counts < 2).unsqueeze(1)
        tensors = {"mean": torch.where(few, overall[0], mean).float(), "var": torch.where(few, overall[1], var).float()}
        return Knowledge(self.name, tensors, net.fingerprint(exact=False), {"images": images})

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> PettaState:
        """Teacher, student and mean features start from the source, the memory empty."""
        known = checked_tensors(self, net, {"mean": (self.class_count, "F"), "var": (self.class_count, "F")})
        teacher, student = Branch(*net.source(streams)), Branch(*net.source(streams))
        mean = known["mean"].expand(streams, -1, -1).clone()
        moments, anchor = optim.adam_init(student.affine), net.source(streams)[1]
        bank, clocks = memory.new_timely(net, streams, self.size, self.room), self.new_key_and_info(net, streams, seed)
        return PettaState(teacher, student, anchor, mean, moments, bank, *clocks)

    @torch.no_grad()
    def look(self, net: Backbone, state: PettaState, batch: ScreenedBatch) -> PettaPrediction:
        """Predict, measure the divergence, and let the mean features follow the batch's."""
        output = net(batch.x, *batch.deploy(net, state), valid=batch.valid)
        counts = batch.valid & finite(output.logits)
        prediction = mask_logits(output.logits, counts)
        p = losses.probabilities(prediction)
        labels = p.argmax(-1)
        member = _members(labels, self.class_count) & counts.unsqueeze(-1)  # (S, B, K)
        gamma = self._divergence(net, state.mean, member.any(1))
        mean = state.mean + self.nu * _shift(state.mean, features_of(self, output).to(state.mean.dtype), member)
        return PettaPrediction(prediction, counts, labels, self.score(p), gamma, mean)

    def _divergence(self, net: Backbone, mean: Tensor, present: Tensor) -> Tensor:
        """Return how far the mean features of the classes ``present`` (S, K) are from the source's: (S,), 0 to 1."""
        assert isinstance(self.knowledge, Knowledge)
        known = self.knowledge.on(net)
        distance = (mean - known["mean"]).square() / (known["var"] + 1e-6)  # (S, K, F)
        if self.sensing == "paper":
            return losses.mean_over(-torch.expm1(-distance.sum(-1)), present)
        return -torch.expm1(-losses.mean_over(distance.mean(-1), present))

    def learn(self, net: Backbone, state: PettaState, x: Tensor, seen: PettaPrediction) -> PettaState:
        """Remember the images, and learn from the memory; the divergence says how cautiously."""
        state = self.remember(state._replace(mean=seen.mean), x, seen, seen.counts)
        return segment(self._learn, net, state, x.shape[2:], seen.gamma, seen.counts.any(1))

    def _learn(
        self, net: Backbone, state: PettaState, shape: tuple[int, ...], gamma: Tensor, due: Tensor
    ) -> PettaState:
        """Move the student, then the teacher towards it, in the streams ``due`` (S,)."""
        x, valid = memory.images(state.memory, shape), memory.filled(state.memory) & due.unsqueeze(1)
        norm, (source, _) = Robust(self.alpha_bn), net.source(len(x))
        with torch.no_grad():
            teacher, _, teacher_stats = net(x, *state.teacher, norm, valid=valid)
            anchor, _, anchor_stats = net(x, source, state.anchor, norm, valid=valid)
            # The number of updates is the clock: the view does not depend on batches without an image.
            augmented = view(self.augment, x, state.key._replace(clock=state.adam.steps))
        with torch.enable_grad():
            affine = state.student.affine.leaf()
            plain, _, stats = net(x, affine, state.student.stats, norm, valid=valid)  # moves the statistics too
            strong, _, stats = net(augmented, affine, stats, norm, valid=valid)
            each = self.anchor_weight * losses.soft_cross_entropy(strong, anchor)  # L_AL, (S, M)
            if self.loss == "plain":
                each = each + losses.soft_cross_entropy(strong, teacher)
            else:
                both = losses.symmetric_cross_entropy(plain, teacher) + losses.symmetric_cross_entropy(strong, teacher)
                each = each + both / 2
            loss = losses.mean_over(each, valid) + gamma * self.lambda_0 * self._distance(net, affine, source)  # (S,)
            grads = affine.gradient(loss)
        moved, moments = optim.adam_step(state.student.affine, grads, state.adam, self.lr)
        alpha = ((1 - gamma) * self.alpha_0).unsqueeze(1).to(moved.weight)
        followed = tree_map(lambda t, s: t + alpha * (s - t), state.teacher.affine, moved)
        new = state._replace(
            teacher=Branch(followed, teacher_stats),
            student=Branch(moved, stats),
            anchor=anchor_stats,
            adam=moments,
            info=report_agreement(state.info, teacher, strong, anchor, valid),
        )
        return select(due, new, state)

    def _distance(self, net: Backbone, affine: Affine, source: Affine) -> Tensor:
        """R: the mean over the scale and the shift of every layer that has them: (S,)."""
        terms, start = [], 0
        for slot in net.slots:
            columns = slice(start, start := start + slot.channels)
            for name, learned, first in zip(Affine._fields, affine, source, strict=True):
                if getattr(slot.layer, name) is not None:
                    now, then = learned[:, columns], first[:, columns]
                    is_cosine = self.regularizer == "cosine"
                    terms.append(-cosine_similarity(now, then, 1) if is_cosine else (now - then).square().sum(1))
        return torch.stack(terms).mean(0)


def _members(labels: Tensor, classes: int) -> Tensor:
    """Return which class each image has: (S, B) -> (S, B, K) bool."""
    return labels.unsqueeze(-1) == torch.arange(classes, device=labels.device)


def _moments(counts: Tensor, total: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance from counts (K,) and sums (K, F); of less than two images they mean nothing."""
    n = counts.unsqueeze(1).clamp_min(2)
    mean = total / n
    return mean, ((squares - n * mean.square()) / (n - 1)).clamp_min(0)


def _shift(mean: Tensor, features: Tensor, member: Tensor) -> Tensor:
    """From the means (S, K, F) to those of a batch's features (S, B, F); 0 for classes without a member."""
    exact = features.dtype if features.device.type == "mps" else torch.float64  # TF32 and autocast do not apply to it
    weight = member.to(exact) / member.sum(1, keepdim=True).clamp_min(1)  # (S, B, K)
    clean = torch.where(member.any(-1, keepdim=True), features, 0).to(exact)
    fresh = (weight.transpose(1, 2) @ clean).to(mean.dtype)
    return torch.where(member.any(1).unsqueeze(-1), fresh - mean, 0)
