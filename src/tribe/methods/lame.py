"""Leave the network alone and correct its outputs: neighbours in feature space should agree: LAME (CVPR 2022).

Assignments Y of a batch's images to classes start as the source's predictions p and are pulled towards those of their
nearest neighbours W until they settle:

    Y <- softmax(log p + W Y)

which lowers E(Y) = sum(-Y log p - (W Y) Y + Y log Y) in every round. Nothing is kept from one batch to the next.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tribe.engine.backbone import Backbone
from tribe.engine.moments import wide
from tribe.engine.segments import segment
from tribe.methods.base import NO_FEATURES, features_of, finish, register, screen
from tribe.methods.source import Source, SourceState

LOOK_EVERY = 8  # rounds between two looks at whether every stream has settled: each makes the host wait for the device


class Neighbours(NamedTuple):
    """The rows of W, as lists: a product with the matrix would be rounded to TF32 on some devices."""

    who: Tensor  # (S, B, k) int64, the nearest first
    valid: Tensor  # (S, B, k) bool: there may be fewer than k

    def sum(self, y: Tensor) -> Tensor:
        """W Y: what the neighbours of each image hold together, (S, B, K)."""
        streams = torch.arange(len(y), device=y.device).view(-1, 1, 1)
        return (y[streams, self.who] * self.valid.unsqueeze(-1)).sum(2)


class Settling(NamedTuple):
    """Where the rounds stand."""

    scores: Tensor  # (S, B, K)
    energy: Tensor  # (S,)
    moving: Tensor  # (S,) bool, the streams that have not settled


@register("lame")
@dataclass(frozen=True)
class Lame(Source):
    """The source model, its predictions corrected within each batch; returns probabilities."""

    neighbours: int = 5  # k: how many images pull at each one; fewer in batches of k images and less
    rounds: int = 100  # at most
    settled: float = 1e-8  # relative change of E at which a stream stops

    eager_only, in_segments = "the host looks whether the assignments have settled", True
    paper = "Boudiaf et al., Parameter-free online test-time adaptation, CVPR 2022"
    works_on = ("features",)
    output = "probabilities"
    does_not_adapt = "it keeps nothing from one batch to the next"
    more_than_a_pass = "neighbours in a batch correct each other's predictions"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.neighbours < 0 or self.rounds < 1 or self.settled < 0:
            raise ValueError(
                f"neighbours and settled are not negative and rounds is at least 1; got {self.neighbours}, "
                f"{self.settled} and {self.rounds}"
            )

    def init(self, net: Backbone, streams: int = 1, seed: int = 0) -> SourceState:
        """Clocks only."""
        if net.classifier is None:
            raise ValueError(NO_FEATURES.format(self.name))
        return super().init(net, streams, seed)

    def step(
        self, net: Backbone, state: SourceState, x: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, SourceState]:
        """Predict."""
        x, valid, rejected = screen(x, valid)
        logits, state = finish(net, state, state, self._corrected(net, state, x, valid), valid, rejected)
        return logits.softmax(-1), state

    def predict(self, net: Backbone, state: SourceState, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Predict; the state has nothing to learn."""
        return self.step(net, state, x, valid)[0]

    @torch.no_grad()
    def _corrected(self, net: Backbone, state: SourceState, x: Tensor, valid: Tensor) -> Tensor:
        """Logits (S, B, K) of the assignments."""
        unary, near = segment(self._compare, net, state, x, valid)
        return self._settle(unary, near, valid)

    def _compare(self, net: Backbone, state: SourceState, x: Tensor, valid: Tensor) -> tuple[Tensor, Neighbours]:
        """What the source says of each image, -log p (S, B, K), and whom it lies near."""
        affine, stats, norm = self.deployed(net, state)
        output = net(x, affine, stats, norm, valid=valid)
        p = output.logits.to(wide(output.logits.dtype)).softmax(-1)
        return -(p + 1e-10).log(), nearest(features_of(self, output), valid, self.neighbours)

    def _settle(self, unary: Tensor, near: Neighbours, valid: Tensor) -> Tensor:
        """Iterate each stream until its energy stands still; a stream that has settled stays."""
        energy = torch.full_like(unary[:, 0, 0], torch.inf)  # (S,)
        now = Settling(-unary, energy, torch.ones_like(energy, dtype=torch.bool))
        for first in range(0, self.rounds, LOOK_EVERY):
            some = min(LOOK_EVERY, self.rounds - first)
            now = segment(self._pull, now, unary, near, valid, some, first == 0)
            if not bool(now.moving.any()):
                break
        return now.scores

    def _pull(
        self, now: Settling, unary: Tensor, near: Neighbours, valid: Tensor, rounds: int, beginning: bool
    ) -> Settling:
        """Some rounds."""
        scores, energy, moving = now
        for i in range(rounds):
            pull = near.sum(scores.softmax(-1))  # W Y
            scores = torch.where(moving.view(-1, 1, 1), pull - unary, scores)
            y = scores.softmax(-1)
            terms = unary * y - pull * y + y * y.clamp_min(1e-20).log()
            new = torch.where(valid.unsqueeze(-1), terms, 0).sum((1, 2))
            if i > 1 or not beginning:  # NOTE: the first two rounds never end it, as released
                moving = moving & ((new - energy).abs() > self.settled * energy.abs())
            energy = new
        return Settling(scores, energy, moving)


def nearest(features: Tensor, valid: Tensor, count: int) -> Neighbours:
    """The ``count`` nearest valid neighbours of each image, in direction; of two as near, the earlier."""
    directions = torch.nn.functional.normalize(features.to(wide(features.dtype)), dim=-1)
    # By differences: a product of matrices would round, and copies of one image would lie apart.
    distance = torch.cdist(directions, directions, compute_mode="donot_use_mm_for_euclid_dist")  # (S, B, B)
    itself = torch.eye(distance.shape[-1], dtype=torch.bool, device=distance.device)
    allowed = valid.unsqueeze(1) & valid.unsqueeze(2) & ~itself
    who = distance.masked_fill(~allowed, torch.inf).argsort(dim=-1, stable=True)[..., :count]
    return Neighbours(who, allowed.gather(-1, who))
