"""Learn as TRIBE does, now and then, on a bank of speeds: `tribe.methods.bank` with TRIBE's loss on some images.

Beyond the paper. Statistics carry most of what TRIBE gains, and gradients can be rare. In one of
`learn_every` batches, on at most 32 images of it, one step of Adam moves the affine parameters:

    L = L_st + lambda_anc L_anc

where the teacher is the network that has just predicted, the student passes an augmentation, and the anchor has the
source's parameters. All three normalise with the bank's mixture. As the source takes over the statistics, it takes over
the parameters; where the bank begins again, they do.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from tribe.core import losses, optim
from tribe.core.augment import Augment, View, view
from tribe.core.bounds import TRUTH
from tribe.core.moments import accumulation_dtype
from tribe.core.state import Affine, Info, Stats, select, tree_map
from tribe.fields import NotNegative, Range
from tribe.methods import Backbone, Deployed, Frozen, Key, ScreenedBatch, Update, register
from tribe.methods.bank import Bank
from tribe.methods.places import PlaceMemory, World
from tribe.methods.probing import Probes

MOST_LEARNED = 32  # images of a batch


class BankTribeState(NamedTuple):
    """The state of a bank, and what has been learned."""

    stats: Stats  # as in `BankState`
    pooled: Stats
    score: Tensor
    frequency: Annotated[Tensor, TRUTH]
    probes: Probes
    world: World
    places: PlaceMemory
    affine: Affine  # (S, C)
    adam: optim.Adam
    key: Key
    info: Info


@register("bank-tribe")
@dataclass(frozen=True)
class BankTribe(Bank):
    """A bank of speeds that learns. A field that is None gets a value for the number of classes."""

    # Batches, of which the first is learned from; 0: none, a bank alone.
    learn_every: Annotated[int, Range(low=0)] = 4
    h0: NotNegative | None = None  # share of log K below which the entropy of a prediction makes it trusted
    lambda_anc: NotNegative = 0.5  # weight of the anchored loss
    lr: NotNegative = 1e-3  # Adam's learning rate
    augment: View = Augment()  # noqa: RUF009  what the student sees; a callable gets (B, ...)

    paper = "none: TRIBE's loss on a part of the images, with the statistics of a bank of speeds"
    works_on = ("affine", "statistics")
    small = {"compare": 2, "learn_every": 2}
    rare_field = "learn_every"
    follows_without_learning = True

    def defaults(self) -> dict[str, object]:
        """Return those of the bank, and TRIBE's h0."""
        return {**super().defaults(), "h0": self.published(0.05, 0.2, 0.4)}

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> Any:
        """Start at the source."""
        bank, (affine, _) = super().init(net, streams, seed), net.source(streams)
        return BankTribeState(**bank._asdict(), affine=affine, adam=optim.adam_init(affine))

    def deployed(self, net: Backbone, state: Any) -> Deployed:
        """Return what has been learned, as far as the source has not taken over, with the mixture of the statistics."""
        bank = super().deployed(net, state)
        share = self.source_share(state).unsqueeze(1) if self.compare else torch.zeros_like(state.score[:, :1])
        affine = tree_map(lambda own, source: torch.lerp(own, source, share), state.affine, bank.affine)
        return Deployed(affine, bank.stats, bank.norm)

    def adapt(self, net: Backbone, state: Any, batch: ScreenedBatch) -> Update:
        """Predict and update the statistics; now and then, learn."""
        update = super().adapt(net, state, batch)
        new, seen = update.state, update.seen
        assert seen is not None
        rows = (state.key.clock % (self.learn_every or 1) == 0).nonzero()[:, 0]
        if self.learn_every and len(rows):
            every = slice(None, None, math.ceil(batch.x.shape[1] / MOST_LEARNED))
            new = self._learn(net, new, rows, *(t[rows, every] for t in (batch.x, update.logits, seen)))
        return update._replace(state=new, affine=self.deployed(net, new).affine)

    def _learn(self, net: Backbone, state: Any, rows: Tensor, x: Tensor, teacher: Tensor, seen: Tensor) -> Any:
        """Take a step for some streams (R,), with images and the teacher's logits (R, B, ...); seen: which count."""
        source, stats, frozen = net.source(len(rows))[0], self.deployed(net, state).stats, Frozen()
        stats = Stats(*(t[rows] for t in stats))
        trusted = seen & (losses.entropy(teacher) < self.h0 * math.log(self.class_count))  # type: ignore[operator]
        affine, adam, key = (tree_map(lambda t: t[rows], t) for t in (state.affine, state.adam, state.key))
        student_sees = view(self.augment, x, key)
        with torch.enable_grad():
            leaf = affine.leaf()
            student = net(student_sees, leaf, stats, frozen, valid=seen).logits
            loss = losses.mean_over(losses.cross_entropy(student, teacher.argmax(-1)), trusted)
            if self.lambda_anc:
                with torch.no_grad():
                    anchor = net(x, source, stats, frozen, valid=seen).logits
                again = net(x, leaf, stats, frozen, valid=seen).logits
                wide = accumulation_dtype(again.dtype)
                apart = (again.to(wide) - anchor.to(wide)).square().mean(-1)
                loss = loss + self.lambda_anc * losses.mean_over(apart, trusted)
            gradient = leaf.gradient(loss)
        moved = optim.adam_step(affine, gradient, adam, self.lr)
        kept = (select(trusted.any(1), new, old) for new, old in zip(moved, (affine, adam), strict=True))
        affine, adam = (
            tree_map(lambda t, new: t.index_copy(0, rows, new.detach()), whole, new)
            for whole, new in zip((state.affine, state.adam), kept, strict=True)
        )
        return state._replace(affine=affine, adam=adam)
