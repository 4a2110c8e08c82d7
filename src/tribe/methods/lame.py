"""Keep the network and correct its outputs: neighbours in feature space should agree: LAME (CVPR 2022).

Assignments Y of a batch's images to classes start as the source's predictions p. They move towards those of their
nearest neighbours W until they converge:

    Y <- softmax(log p + W Y)

Every round lowers E(Y) = sum(-Y log p - (W Y) Y + Y log Y). Nothing is kept from one batch to the next.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from tribe.core import losses
from tribe.core.graphs import segment
from tribe.core.moments import accumulation_dtype
from tribe.fields import Count, NotNegative, Range
from tribe.methods import Backbone, ScreenedBatch, register
from tribe.methods.method import features_of
from tribe.methods.source import Source, SourceState

CHECK_EVERY = 8  # rounds between two checks for convergence: each makes the host wait for the device


class Neighbours(NamedTuple):
    """The rows of W as lists of neighbours: a matrix product would be rounded to TF32 on some devices."""

    ids: Tensor  # (S, B, k) int64, the nearest first
    valid: Tensor  # (S, B, k) bool: there may be fewer than k

    def sum(self, y: Tensor) -> Tensor:
        """W Y: the sum over the neighbours of each image, (S, B, K)."""
        streams = torch.arange(len(y), device=y.device).view(-1, 1, 1)
        return (y[streams, self.ids] * self.valid.unsqueeze(-1)).sum(2)


class Rounds(NamedTuple):
    """The assignments after some rounds."""

    scores: Tensor  # (S, B, K)
    energy: Tensor  # (S,)
    moving: Tensor  # (S,) bool, the streams that have not converged


@register("lame")
@dataclass(frozen=True)
class Lame(Source):
    """The source model, its predictions corrected within each batch."""

    neighbours: Annotated[int, Range()] = 5  # k: neighbours of each image; fewer in batches of k images or less
    rounds: Count = 100  # at most
    settled: NotNegative = 1e-8  # relative change of E below which a stream has converged

    capture = "segments"  # the host checks whether the assignments have converged
    paper = "Boudiaf et al., Parameter-free online test-time adaptation, CVPR 2022"
    works_on = ("features",)
    does_not_adapt = "it keeps nothing from one batch to the next"
    not_exportable_because = "neighbours in a batch correct each other's predictions"

    @torch.no_grad()
    def logits(self, net: Backbone, state: SourceState, batch: ScreenedBatch) -> Tensor:
        """Return the log-probabilities (S, B, K) of the assignments."""
        unary, near = segment(self._compare, net, state, batch)
        return self._settle(unary, near, batch.valid).log_softmax(-1)

    def _compare(self, net: Backbone, state: SourceState, batch: ScreenedBatch) -> tuple[Tensor, Neighbours]:
        """Return the source's -log p of each image (S, B, K), and its neighbours."""
        output = net(batch.x, *batch.deploy(net, state), valid=batch.valid)
        near = nearest(features_of(self, output), batch.valid, self.neighbours)
        return -(losses.probabilities(output.logits) + 1e-10).log(), near

    def _settle(self, unary: Tensor, near: Neighbours, valid: Tensor) -> Tensor:
        """Iterate each stream until its energy converges; a stream that has converged stays."""
        energy = torch.full_like(unary[:, 0, 0], torch.inf)  # (S,)
        now = Rounds(-unary, energy, torch.ones_like(energy, dtype=torch.bool))
        for first in range(0, self.rounds, CHECK_EVERY):
            count = min(CHECK_EVERY, self.rounds - first)
            now = segment(self._pull, now, unary, near, valid, count, first == 0)
            if not bool(now.moving.any()):
                break
        return now.scores

    def _pull(
        self, now: Rounds, unary: Tensor, near: Neighbours, valid: Tensor, rounds: int, first_rounds: bool
    ) -> Rounds:
        scores, energy, moving = now
        for i in range(rounds):
            pull = near.sum(scores.softmax(-1))  # W Y
            scores = torch.where(moving.view(-1, 1, 1), pull - unary, scores)
            y = scores.softmax(-1)
            terms = unary * y - pull * y + y * y.clamp_min(1e-20).log()
            new = torch.where(valid.unsqueeze(-1), terms, 0).sum((1, 2))
            if i > 1 or not first_rounds:  # NOTE: it never stops after two rounds, as released
                moving = moving & ((new - energy).abs() > self.settled * energy.abs())
            energy = new
        return Rounds(scores, energy, moving)


def nearest(features: Tensor, valid: Tensor, count: int) -> Neighbours:
    """Return the ``count`` nearest valid neighbours of each image by direction; ties go to the earlier image."""
    directions = torch.nn.functional.normalize(features.to(accumulation_dtype(features.dtype)), dim=-1)
    # By differences: a matrix product would round, and copies of one image would have a distance.
    distance = torch.cdist(directions, directions, compute_mode="donot_use_mm_for_euclid_dist")  # (S, B, B)
    itself = torch.eye(distance.shape[-1], dtype=torch.bool, device=distance.device)
    allowed = valid.unsqueeze(1) & valid.unsqueeze(2) & ~itself
    ids = distance.masked_fill(~allowed, torch.inf).argsort(dim=-1, stable=True)[..., :count]
    return Neighbours(ids, allowed.gather(-1, ids))
