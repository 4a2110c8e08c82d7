"""Learn rarely, from images that stand for their class and for the world: SNAP (Cha et al., NeurIPS 2025).

Beyond the paper, which does not compare TRIBE with it. TENT's step is taken in one of `learn_every` batches, and not on
that batch but on a small memory that all batches feed. Per batch:

    predict    with the statistics that the memory had when it was last learned from, corrected where the batch
               deviates from them beyond chance                                -> what is returned, labels, confidence
    remember   images whose prediction is confident; when the memory is full, an image of the class that holds the most
               leaves, the one whose moments at the first normalisation layer are farthest from those of the stream
    learn      in one of `learn_every` batches: one Adam step down the entropy of the memory. Its statistics are the new
               ones, and its images are the first to leave from then on
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from tribe.core import losses, memory, optim
from tribe.core.bounds import COUNT
from tribe.core.graphs import segment
from tribe.core.memory import Timely, Turnover
from tribe.core.moments import observe
from tribe.core.rules import move_towards, pool_batch
from tribe.core.slots import Slot, current_pass
from tribe.core.state import Affine, Info, Stats, select
from tribe.fields import Count, NotNegative, Share
from tribe.methods import Backbone, Deployed, Key, MemoryMethod, ScreenedBatch, finite, mask_logits, register
from tribe.methods.base import entropy_gradient
from tribe.norms.batch import Training
from tribe.norms.instance import Instance


class Corrected(Instance):
    """Correct the stored statistics where those of the whole batch deviate beyond chance."""

    def __call__(
        self, mean: Tensor, var: Tensor, count: int, stats: Stats, labels: Tensor | None, valid: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Stats]:
        """Return the corrected statistics (R, 1, C); the stored ones stay."""
        return super().__call__(*pool_batch(mean, var, valid), count, stats, labels, valid, eps)


class SnapState(NamedTuple):
    """Parameters, the statistics of the memory, Adam's moments, and what decides which images it holds."""

    affine: Affine  # (S, C)
    stats: Stats  # (S, 1, C), of the memory when it was last learned from
    adam: optim.Adam
    memory: Timely  # an image's "uncertainty" is its distance from the stream's average on arrival
    world: Stats  # (S, 1, c), average moments of the stream at the first normalisation layer
    learned: Annotated[Tensor, COUNT]  # (S,) int64, images that had arrived when the memory was last learned from
    key: Key
    info: Info


class SnapPrediction(NamedTuple):
    """The predictions of a batch, and what the memory decides by."""

    prediction: Tensor  # (S, B, K) logits
    counts: Tensor  # (S, B) bool, images that they are for
    labels: Tensor  # (S, B)
    score: Tensor  # (S, B) confidence
    distance: Tensor  # (S, B) of its moments from the average ones
    world: Stats  # the average with this batch


@register("snap")
@dataclass(frozen=True)
class Snap(MemoryMethod):
    """SNAP with TENT.

    NOTE: as released, but (1) the first batch is not learned from before the memory exists; (2) the memory is brought
    up to date once a batch, so that no order among its images matters; (3) distances are those on arrival, where the
    released code measures them again if the average moves far. The released memory is as large as a batch.
    """

    learn_every: Count = 8  # batches, of which the first is learned from
    tau: Share = 0.5  # tau_conf, least confidence of an image that is remembered
    momentum: Share = 0.1  # share of the newest batch in the average moments
    k: NotNegative = 1.0  # standard errors of a batch's deviation from the memory that count as chance

    small = {"size": 8, "learn_every": 2}
    paper = "Cha et al., SNAP: low-latency test-time adaptation with sparse updates, NeurIPS 2025"
    rare_field = "learn_every"

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> SnapState:
        """Start at the source, the memory empty."""
        affine, stats = net.source(streams)
        bank = memory.new_timely(net, streams, self.size, self.room)
        key, info = self.new_key_and_info(net, streams, seed)
        first = next((slot.columns for slot in net.slots if slot.tracked), slice(0, 0))
        world = Stats(*(t[..., first].clone() for t in stats))
        return SnapState(affine, stats, optim.adam_init(affine), bank, world, key.clock.clone(), key, info)

    def deployed(self, net: Backbone, state: SnapState) -> Deployed:
        """Return the adapted parameters, and the memory's statistics, corrected for each batch."""
        return Deployed(state.affine, state.stats, Corrected(self.k))

    @torch.no_grad()
    def look(self, net: Backbone, state: SnapState, batch: ScreenedBatch) -> SnapPrediction:
        """Predict a batch, and compare the moments of its images with those of the stream."""
        first = next((slot for slot in net.slots if slot.tracked), None)
        moments: list[Tensor] = []  # of the images (S, B, c)

        def hook(slot: Slot, images: Tensor) -> None:
            current = current_pass.get()
            if slot is first and current is not None and not moments:
                moments.extend(observe(slot.unfold(images, current)))

        logits = net(batch.x, *batch.deploy(net, state), valid=batch.valid, slot_hook=hook).logits
        counts = batch.valid & finite(logits)
        logits = mask_logits(logits, counts)
        p = losses.probabilities(logits)
        world, distance = state.world, torch.zeros_like(counts, dtype=state.memory.uncertainty.dtype)
        if moments:
            mean, var = (torch.where(counts.unsqueeze(2), t, 0) for t in moments)
            world = move_towards(state.world, *pool_batch(mean, var, counts), self.momentum, counts)
            apart = (mean - world.mean).square() + (var.clamp_min(0).sqrt() - world.var.clamp_min(0).sqrt()).square()
            distance = apart.sum(2).sqrt().to(distance)  # 2-Wasserstein
        return SnapPrediction(logits, counts, p.argmax(-1), self.score(p), distance, world)

    def trusted(self, seen: SnapPrediction) -> Tensor:
        """Return the images that the network is sure of."""
        return seen.counts & (seen.score > self.tau)

    def learn(self, net: Backbone, state: SnapState, x: Tensor, seen: SnapPrediction) -> SnapState:
        """Remember the images; now and then, learn from the memory."""
        due = seen.counts.any(1) & (state.key.clock % self.learn_every == 0)
        state = self.remember(state._replace(world=seen.world), x, seen, seen.counts)
        return segment(self.update, net, state, x.shape[2:], due) if bool(due.any()) else state

    def remember(self, state: SnapState, x: Tensor, seen: SnapPrediction, arriving: Tensor) -> SnapState:
        """Keep the nearest images of each class, as many of each as there is room for; first those not learned from."""
        bank, arrival = state.memory, memory.arrival_numbers(state.memory, arriving)
        newcomers = {"image": x, "label": seen.labels, "arrival": arrival, "uncertainty": seen.distance}
        labels, number, distance = (
            torch.cat((getattr(bank, name), newcomers[name].to(getattr(bank, name))), 1)
            for name in ("label", "arrival", "uncertainty")
        )
        offered = torch.cat((memory.filled(bank), arriving & self.trusted(seen)), 1)  # (S, M + B)
        learned = number < state.learned.unsqueeze(1)
        chosen = offered & (order_of(labels, distance, learned, offered) < self.size)
        since, until = torch.zeros_like(chosen[0], dtype=torch.int64), torch.full_like(number, x.shape[1] + 1)
        stays, passed = Turnover(chosen, since, until), torch.full_like(bank.held, x.shape[1])
        return state._replace(memory=memory.hold(bank, newcomers, stays, arriving, passed))

    def update(self, net: Backbone, state: SnapState, shape: tuple[int, ...], due: Tensor) -> SnapState:
        """Take one step down the entropy of the memory, in the streams ``due`` (S,) with an image in memory."""
        counts = memory.filled(state.memory) & due.unsqueeze(1)  # (S, M)
        x = memory.images(state.memory, shape)
        grads, stats = entropy_gradient(net, state.affine, state.stats, Training(1.0), x, counts)
        moved, moments = optim.adam_step(state.affine, grads, state.adam, self.lr)
        learned = state.memory.arrivals.clone()
        return select(counts.any(1), state._replace(affine=moved, stats=stats, adam=moments, learned=learned), state)


def order_of(labels: Tensor, distance: Tensor, learned: Tensor, offered: Tensor) -> Tensor:
    """Return the place of each image (S, N) in the order in which a memory would hold them; not ``offered``: the last.

    First come the nearest images of each class, then the second nearest, and so on; those ``learned`` from come later.
    """
    group = torch.where(offered, 2 * labels + learned, -1)
    nearer = distance.argsort(dim=1, stable=True)  # (S, N)
    sorted_group = group.gather(1, nearer)
    rank = (sorted_group.unsqueeze(2) == sorted_group.unsqueeze(1)).tril(-1).sum(2)  # in its group
    size = labels.shape[1]
    late = size * learned.gather(1, nearer) + 2 * size * ~offered.gather(1, nearer)
    order = nearer.gather(1, (rank + late).argsort(dim=1, stable=True))
    return torch.empty_like(order).scatter_(1, order, torch.arange(size, device=order.device).expand_as(order))
