"""A student learns from its teacher's certain predictions while a frozen anchor limits their drift: TRIBE (AAAI-24).

Three branches of one network. Teacher and student share every affine parameter; the anchor keeps the source's. Each
has its own Balanced BN statistics; the same pseudo labels update all of them. Per batch:

    predict        the teacher, with the statistics from before this batch     -> what is returned, and pseudo labels
    update         the teacher on the batch, the student on its augmentation, the anchor on the batch
    learn          L = L_st + lambda_anc L_anc on the samples the teacher is certain of; one Adam step, affine only
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tribe.core import losses, optim
from tribe.core.augment import Augment, View, view
from tribe.core.moments import accumulation_dtype
from tribe.core.packed import ClassStats
from tribe.core.state import Affine, Info, Stats, copy_missing, room_for, rows_of, tree_map
from tribe.fields import NotNegative
from tribe.methods import Backbone, Deployed, Frozen, Key, Method, ScreenedBatch, Update, register, report_agreement
from tribe.norms.balanced import CONVENTIONS as NORM_CONVENTIONS
from tribe.norms.balanced import Balanced, Convention, apply_convention, published_eta

CONVENTIONS = {
    "released": {"anchor_on": "logits", **NORM_CONVENTIONS["released"]},
    "paper": {"anchor_on": "posteriors", **NORM_CONVENTIONS["paper"]},
}

TEACHER, STUDENT = slice(0, None, 2), slice(1, None, 2)  # their rows among the pair of each stream
# Numbers in a batch from which teacher and student pass one after the other, each with its backward: one of them fills
# a device already, and activations take half the memory.
APART = 2**21


class ClassDefault(float):
    """A default that follows from the number of classes: a copy with other classes gets theirs.

    `dataclasses.replace` passes all values on, and this type tells a default from a number that was given.
    """


class TribeState(NamedTuple):
    """Shared affine parameters, the branches' class statistics, and Adam's moments."""

    affine: Affine  # (S, C), of teacher and student
    pair: ClassStats  # (2 S, K, C), the teacher's row and the student's row of each stream
    anchor: ClassStats  # (S, K, C)
    adam: optim.Adam
    key: Key
    info: Info


@register("tribe")
@dataclass(frozen=True)
class Tribe(Method):
    """TRIBE. A field that is None gets the paper's value for the number of classes.

    On a network without BatchNorm the tri-net adapts the affine parameters of LayerNorm and GroupNorm; there are no
    class statistics then. The paper does not cover this case.
    """

    eta: float | None = None  # momentum of one instance in Balanced BN; 0.0005 K (released: at least 0.01)
    gamma: float | None = None  # share of the class-agnostic update; more where pseudo labels are poor
    h0: NotNegative | None = None  # share of log K below which the teacher's entropy makes a pseudo label trusted
    lambda_anc: NotNegative = 0.5  # weight of the anchored loss
    lr: NotNegative = 1e-3  # Adam's learning rate
    augment: View = Augment()  # noqa: RUF009  what the student sees; a callable gets (B, ...)
    convention: Convention = "released"  # sets the four below, and eta; each can be set alone
    anchor_on: Literal["logits", "posteriors"] | None = None  # what Eq. 6 compares
    pooled_ddof: int | None = None  # see Balanced
    rate_cap: bool | None = None
    gamma_over: Literal["present", "all"] | None = None
    # How class statistics are kept between steps. "packed": 8 bits a number, for many classes; see tribe.core.packed.
    class_stats: Literal["full", "packed"] = "full"

    paper = "Su et al., Towards real-world TTA: tri-net self-training with balanced normalization, AAAI 2024"
    works_on = ("affine",)
    per_class = "statistics of each class"
    presets = {
        "mnist": {"eta": 0.01, "gamma": 0.0, "h0": 0.05},
        "cifar10": {"eta": 0.01, "gamma": 0.0, "h0": 0.05},
        "cifar100": {"eta": 0.05, "gamma": 0.1, "h0": 0.2},
        "imagenet": {"eta": 0.5, "gamma": 0.5, "h0": 0.4, "lr": 5e-4},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        apply_convention(self, CONVENTIONS)
        expected = CONVENTIONS[self.convention]
        if all(getattr(self, field) != value for field, value in expected.items()):
            raise ValueError(
                f"convention is {self.convention!r}, but {', '.join(expected)} all have the values of another one: "
                "dataclasses.replace keeps the values that the old convention set. Use tribe.methods.create instead"
            )
        eta = published_eta(self.class_count, self.convention)
        h0, gamma = self.published(0.05, 0.2, 0.4), self.published(0.0, 0.1, 0.5)
        for field, value in {"h0": h0, "gamma": gamma, "eta": eta}.items():
            if getattr(self, field) is None or isinstance(getattr(self, field), ClassDefault):
                object.__setattr__(self, field, ClassDefault(value))
        _ = self.norm  # checks eta and gamma

    @cached_property
    def norm(self) -> Balanced:
        """Return Balanced BN with this method's settings."""
        conventions = {field: getattr(self, field) for field in NORM_CONVENTIONS["paper"]}
        return Balanced(self.class_count, self.eta or 0.0, self.gamma or 0.0, self.convention, **conventions)

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> TribeState:
        """All branches start from the source, with the same statistics for every class."""
        affine, _ = net.source(streams)
        pair, anchor = (self.first_stats(net, rows) for rows in (2 * streams, streams))
        return TribeState(affine, pair, anchor, optim.adam_init(affine), *self.new_key_and_info(net, streams, seed))

    def deployed(self, net: Backbone, state: TribeState) -> Deployed:
        """Return the teacher, its class statistics pooled."""
        return Deployed(state.affine, self.pooled(net, rows_of(state.pair, TEACHER)), Frozen())

    def anchored(self, net: Backbone, state: Any) -> Stats | None:
        """Return the anchor's class statistics, pooled; None if the loss does not use the anchor."""
        return self.pooled(net, state.anchor) if self.lambda_anc else None

    def first_stats(self, net: Backbone, rows: int) -> ClassStats:
        """Return the source's statistics for every class."""
        return net.class_stats(rows, self.norm.classes, packed=self.class_stats == "packed")

    def pooled(self, net: Backbone, stats: ClassStats) -> Stats:
        """Pool the class statistics of all layers: (R, K, C) -> (R, 1, C)."""
        return stats.map_layers(self.norm.pool, net.columns)

    def adapt(self, net: Backbone, state: TribeState, batch: ScreenedBatch) -> Update:
        """Predict with the teacher, then update the statistics of the three branches and the affine parameters."""
        prediction, _ = self.predict_batch(net, state, batch)
        if batch.on_prediction is not None:
            batch.on_prediction(prediction)
        labels = prediction.argmax(-1)  # (S, B) pseudo labels for the statistics of all branches
        new, trusted = self._learn(net, state, batch.x, labels, batch.valid, retired=batch.retired)
        return Update(prediction, new, trusted, new.affine)

    def _learn(
        self,
        net: Backbone,
        state: Any,
        x: Tensor,
        labels: Tensor,
        valid: Tensor,
        teaching: Affine | None = None,  # the teacher's parameters; None: the student's
        retired: TribeState | None = None,
    ) -> tuple[Any, Tensor]:
        """Update statistics and parameters; also return which samples (S, B) the teacher is certain of."""
        anchor, anchor_stats = self._anchor(net, state, x, labels, valid, retired and retired.anchor)
        seen, pair = view(self.augment, x, state.key), room_for(state.pair, retired and retired.pair)

        def alone(branch: slice, images: Tensor, affine: Affine) -> Tensor:
            """Return the logits of one branch (S, B, K), and write its statistics to its rows of ``pair``."""
            past, after = rows_of(state.pair, branch), rows_of(pair, branch)
            logits: Tensor
            logits, _, stats = net(images, affine, past, self.norm, labels, valid, spare=after)
            copy_missing(stats, after)
            return logits

        with torch.enable_grad():
            affine = state.affine.leaf()
            if x.numel() < APART:
                both = tree_map(interleave, teaching or affine, affine)
                marks = labels.repeat_interleave(2, 0), valid.repeat_interleave(2, 0)  # (2 S, B)
                logits, _, pair = net(interleave(x, seen), both, state.pair, self.norm, *marks, spare=pair)
                teacher, student = logits.unflatten(0, (-1, 2)).unbind(1)  # (S, B, K)
                trusted = self._trusted(teacher, valid)
                loss = self._student_loss(student, teacher, trusted)
                if anchor is not None:
                    loss = loss + self._anchor_loss(teacher, anchor, trusted)
                grads = affine.gradient(loss)
            else:
                learns = anchor is not None and teaching is None  # the teacher's pass has a gradient
                teacher = alone(TEACHER, x, affine if learns else teaching or state.affine)
                trusted, by_anchor = self._trusted(teacher, valid), None
                if anchor is not None and learns:
                    by_anchor = affine.gradient(self._anchor_loss(teacher, anchor, trusted))
                teacher = teacher.detach()
                student = alone(STUDENT, seen, affine)
                grads = affine.gradient(self._student_loss(student, teacher, trusted))
                grads = grads if by_anchor is None else tree_map(torch.add, grads, by_anchor)

        # NOTE: where nothing is trusted the gradient is zero and Adam still takes its step, as released.
        moved, moments = optim.adam_step(state.affine, grads, state.adam, self.lr)
        info = report_agreement(state.info, teacher, student, anchor, valid)
        return state._replace(affine=moved, pair=pair, anchor=anchor_stats, adam=moments, info=info), trusted

    def _anchor(
        self, net: Backbone, state: Any, x: Tensor, labels: Tensor, valid: Tensor, spare: ClassStats | None
    ) -> tuple[Tensor | None, ClassStats]:
        """Return the logits with the source's parameters and the anchor's statistics; None if unused."""
        if self.lambda_anc == 0:
            return None, state.anchor
        with torch.no_grad():
            source, _ = net.source(len(x))
            anchor, _, stats = net(x, source, state.anchor, self.norm, labels, valid, spare=spare)
        return anchor, stats

    def _trusted(self, teacher: Tensor, valid: Tensor) -> Tensor:
        """Return the samples (S, B) that the teacher is certain of."""
        certain: Tensor = losses.entropy(teacher.detach()) < self.h0 * math.log(self.class_count)  # type: ignore[operator]
        return certain & valid

    def _student_loss(self, student: Tensor, teacher: Tensor, trusted: Tensor) -> Tensor:
        """Eq. 5; (S,)."""
        return losses.mean_over(losses.cross_entropy(student, teacher.argmax(-1)), trusted)

    def _anchor_loss(self, teacher: Tensor, anchor: Tensor, trusted: Tensor) -> Tensor:
        """Eq. 6, weighted: the squared distance of teacher and anchor; (S,)."""
        teacher, anchor = (t.to(accumulation_dtype(t.dtype)) for t in (teacher, anchor))
        if self.anchor_on == "posteriors":
            teacher, anchor = teacher.softmax(-1), anchor.softmax(-1)
        loss: Tensor = self.lambda_anc * losses.mean_over((teacher - anchor).square().mean(-1), trusted)
        return loss


def interleave(teacher: Tensor, student: Tensor) -> Tensor:
    """Put the two rows of each stream together: twice (S, ...) -> (2 S, ...)."""
    return torch.stack((teacher, student), 1).flatten(0, 1)
