"""A student learns from its teacher's sure predictions while a frozen anchor keeps both from drifting: TRIBE (AAAI-24).

Three branches of one network. Teacher and student share every affine parameter; the anchor keeps the source's. Each
has its own Balanced BN statistics, all moved by the same pseudo labels. Per batch:

    predict        the teacher, with the statistics from before this batch     -> what is returned, and pseudo labels
    update         the teacher on the batch, the student on its augmentation, the anchor on the batch
    learn          L = L_st + lambda_anc L_anc on the samples the teacher is sure of; one Adam step, affine only
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tribe.engine.augment import Augment, View, check_view, view
from tribe.engine.backbone import Backbone
from tribe.engine.losses import cross_entropy, entropy, mean_over
from tribe.engine.moments import wide
from tribe.engine.optim import Adam, adam_init, adam_step
from tribe.engine.rng import Key
from tribe.engine.state import Affine, Info, Stats
from tribe.methods.base import Deployed, Method, finish, new_info, new_key, register, screen
from tribe.norms.balanced import CONVENTIONS as NORM_CONVENTIONS
from tribe.norms.balanced import Balanced, Convention, apply_convention
from tribe.norms.frozen import Frozen

CONVENTIONS = {
    "released": {"anchor_on": "logits", **NORM_CONVENTIONS["released"]},
    "paper": {"anchor_on": "posteriors", **NORM_CONVENTIONS["paper"]},
}


class TribeState(NamedTuple):
    """Shared affine parameters, the branches' class statistics, and what Adam remembers."""

    affine: Affine  # (S, C), of teacher and student alike
    pair: Stats  # (2 S, K, C), the teacher's row and the student's of each stream
    anchor: Stats  # (S, K, C)
    adam: Adam
    key: Key
    info: Info


@register("tribe")
@dataclass(frozen=True)
class Tribe(Method):
    """TRIBE. Fields left open follow from the number of classes, as the paper sets them for its data sets.

    On a network without BatchNorm the tri-net runs on the affine parameters of LayerNorm and GroupNorm alone, which
    is beyond the paper: there are no class statistics then.
    """

    eta: float | None = None  # momentum of one instance in Balanced BN; 0.0005 K (released: at least 0.01)
    gamma: float | None = None  # share of the class-agnostic update; more where pseudo labels are poor
    h0: float | None = None  # share of log K below which the teacher's entropy makes a pseudo label trusted
    lambda_anc: float = 0.5  # weight of the anchored loss
    lr: float = 1e-3  # Adam's learning rate
    augment: View = Augment()  # noqa: RUF009  what the student sees; a callable gets (B, ...)
    convention: Convention = "released"  # sets the four below, and eta; each can be set alone
    anchor_on: Literal["logits", "posteriors"] | None = None  # what Eq. 6 compares
    pooled_ddof: int | None = None  # see Balanced
    rate_cap: bool | None = None
    gamma_over: Literal["present", "all"] | None = None

    paper = "Su et al., Towards real-world TTA: tri-net self-training with balanced normalization, AAAI 2024"
    works_on = ("affine",)
    presets = {  # noqa: RUF012
        "mnist": {"classes": 10, "eta": 0.01, "gamma": 0.0, "h0": 0.05},
        "cifar10": {"classes": 10, "eta": 0.01, "gamma": 0.0, "h0": 0.05},
        "cifar100": {"classes": 100, "eta": 0.05, "gamma": 0.1, "h0": 0.2},
        "imagenet": {"classes": 1000, "eta": 0.5, "gamma": 0.5, "h0": 0.4, "lr": 5e-4},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes is None:
            raise ValueError("TRIBE keeps statistics per class and needs their number: classes=")
        apply_convention(self, CONVENTIONS)
        expected = CONVENTIONS[self.convention]
        if all(getattr(self, field) != value for field, value in expected.items()):
            raise ValueError(
                f"convention is {self.convention!r}, and {', '.join(expected)} are all those of another one, as after "
                "dataclasses.replace, which keeps what was settled. Build the method anew, with tribe.methods.create"
            )
        h0, gamma = (0.05, 0.0) if self.classes <= 20 else (0.2, 0.1) if self.classes <= 300 else (0.4, 0.5)
        eta = 0.0005 * self.classes
        # NOTE: the paper's eta is 0.0005 K; the released settings never go below 0.01. Above K = 2000 it would pass 1.
        defaults = {"h0": h0, "gamma": gamma, "eta": min(eta if self.convention == "paper" else max(eta, 0.01), 1.0)}
        for field, value in defaults.items():
            if getattr(self, field) is None:
                object.__setattr__(self, field, value)
        if self.anchor_on not in ("logits", "posteriors"):
            raise ValueError(f"anchor_on is 'logits' or 'posteriors'; got {self.anchor_on!r}")
        check_view(self.augment)
        if self.lambda_anc < 0 or self.lr < 0 or self.h0 < 0:  # type: ignore[operator]
            raise ValueError(f"lambda_anc, lr and h0 are not negative; got {self.lambda_anc}, {self.lr}, {self.h0}")
        _ = self.norm  # its own checks of eta and gamma

    @property
    def norm(self) -> Balanced:
        """Balanced BN with this method's settings."""
        conventions = {field: getattr(self, field) for field in NORM_CONVENTIONS["paper"]}
        return Balanced(self.classes or 0, self.eta or 0.0, self.gamma or 0.0, self.convention, **conventions)

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> TribeState:
        """All branches start from the source, every class alike."""
        affine, anchor = net.source(streams, self.norm.classes)
        _, pair = net.source(2 * streams, self.norm.classes)
        return TribeState(affine, pair, anchor, adam_init(affine), new_key(net, streams, seed), new_info(net, streams))

    def deployed(self, net: Backbone, state: TribeState) -> Deployed:
        """The teacher, its class statistics pooled."""
        teacher = Stats(*(t[0::2] for t in state.pair))
        return Deployed(state.affine, self.norm.pool(teacher), Frozen())

    def step(
        self,
        net: Backbone,
        state: TribeState,
        x: Tensor,
        valid: Tensor | None = None,
        retired: TribeState | None = None,
    ) -> tuple[Tensor, TribeState]:
        """Predict with the teacher, then let the three branches see the batch and the affine parameters learn."""
        norm = self.norm
        x, valid, rejected = screen(x, valid)
        prediction = self.predict(net, state, x, valid)
        labels = prediction.argmax(-1)  # (S, B) pseudo labels for the statistics of all branches

        anchor, anchor_stats = self._anchor(net, state, x, labels, valid, retired and retired.anchor)
        with torch.enable_grad():
            affine = state.affine.leaf()
            shared = Affine(*(twice(t) for t in affine))
            views = torch.stack((x, view(self.augment, x, state.key)), 1).flatten(0, 1)  # (2 S, B, ...)
            spare = retired and retired.pair
            pair, _, pair_stats = net(views, shared, state.pair, norm, twice(labels), twice(valid), spare=spare)
            teacher, student = pair.unflatten(0, (-1, 2)).unbind(1)  # (S, B, K) each

            certain = entropy(teacher.detach()) < self.h0 * math.log(norm.classes)  # type: ignore[operator]
            trusted = certain & valid
            loss = mean_over(cross_entropy(student, teacher.argmax(-1)), trusted)  # Eq. 5, (S,)
            if anchor is not None:
                loss = loss + self.lambda_anc * mean_over(self._disagreement(teacher, anchor), trusted)  # Eq. 6
            grads = Affine(*torch.autograd.grad(loss.sum(), affine))

        # NOTE: where nothing is trusted the gradient is zero and Adam still takes its step, as released.
        moved, moments = adam_step(state.affine, grads, state.adam, self.lr)
        new = state._replace(affine=moved, pair=pair_stats, anchor=anchor_stats, adam=moments)
        return finish(net, state, new, prediction, valid, rejected, trusted, moved)

    def _anchor(
        self, net: Backbone, state: TribeState, x: Tensor, labels: Tensor, valid: Tensor, spare: Stats | None
    ) -> tuple[Tensor | None, Stats]:
        """What the source network says with statistics that follow the stream; nothing if nobody asks it."""
        if self.lambda_anc == 0:
            return None, state.anchor
        with torch.no_grad():
            source, _ = net.source(len(x))
            anchor, _, stats = net(x, source, state.anchor, self.norm, labels, valid, spare=spare)
        return anchor, stats

    def _disagreement(self, teacher: Tensor, anchor: Tensor) -> Tensor:
        teacher, anchor = (t.to(wide(t.dtype)) for t in (teacher, anchor))
        if self.anchor_on == "posteriors":
            teacher, anchor = teacher.softmax(-1), anchor.softmax(-1)
        return (teacher - anchor).square().mean(-1)


def twice(t: Tensor) -> Tensor:
    """Each stream's row for its teacher and for its student: (S, ...) -> (2 S, ...)."""
    return t.repeat_interleave(2, 0)
