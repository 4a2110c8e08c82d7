"""The time filter, off while neighbours are predicted alike no more often than chance says.

A network that predicts one class for most images of a corruption looks to `tribe.filters.markov` as if it saw a long
burst. When the corruption ends, a filter that has learned to be this sure goes on answering that class, for hundreds of
images. So it is also asked of the network's own predictions whether there are bursts:

    alike     the share of the last 50 or so images that are predicted like the image before
    chance    what this share would be in random order: the sum of the squared shares of the predicted classes, over
              the last 300 or so images

The filter answers while (alike - chance) / (1 - chance) is above a threshold, as in Cohen's kappa.
"""

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from tribe.core.bounds import NOT_NEGATIVE
from tribe.fields import Share
from tribe.filters import Filtered, FilterInfo, informative, register
from tribe.filters.markov import Markov, MarkovState

LATELY = 50  # images of the share that are alike
LONG = 300  # images of the shares of classes


class CheckedState(NamedTuple):
    """The state of the filter, and what is known of the network's predictions."""

    filter: MarkovState
    last: Annotated[Tensor, NOT_NEGATIVE]  # (S, K) 1 at the last predicted class; 0 before the first image
    alike: Annotated[Tensor, NOT_NEGATIVE]  # (S,) the share of images that are predicted like the one before
    shares: Annotated[Tensor, NOT_NEGATIVE]  # (S, K) of the predicted classes


@register("time-checked")
@dataclass(frozen=True)
class Checked(Markov):
    """The Markov filter, off while neighbours are predicted alike no more often than chance says. Beyond the paper."""

    least_beyond_chance: Share = 0.1  # of (alike - chance) / (1 - chance)

    def init(self, streams: int, classes: int, like: Tensor) -> CheckedState:  # type: ignore[override]
        """Return a state in which nothing is known of bursts."""
        none = like.new_zeros(streams, classes)
        even = torch.full_like(none, 1 / classes)
        return CheckedState(super().init(streams, classes, like), none, like.new_zeros(streams), even)

    @torch.no_grad()
    def step(self, state: CheckedState, logits: Tensor, valid: Tensor) -> Filtered:  # type: ignore[override]
        """Filter a batch, and look at the order of the network's predictions."""
        found, counted = super().step(state.filter, logits, valid), informative(logits, valid)
        kind = state.shares.dtype
        one_hot = torch.zeros_like(logits, dtype=kind).scatter_(2, logits.nan_to_num().argmax(2, keepdim=True), 1)
        one_hot = one_hot * counted.unsqueeze(2)
        count = counted.cumsum(1)
        latest = torch.where(counted, count, 0)
        # the image before: of those that count, the one whose number is one less
        before = (count.unsqueeze(2) - counted.unsqueeze(2).long() == latest.unsqueeze(1)) & counted.unsqueeze(1)
        previous = before.to(kind) @ one_hot
        first = count - counted.long() == 0
        previous = torch.where(first.unsqueeze(2), state.last.unsqueeze(1), previous)
        alike = _average(state.alike.unsqueeze(1), (previous * one_hot).sum(2, keepdim=True), counted, LATELY)[:, :, 0]
        shares = _average(state.shares, one_hot, counted, LONG)
        some = counted.any(1)
        ended = (count == count[:, -1:]).byte().argmax(1)  # the last image that counts
        row = torch.arange(len(ended), device=ended.device)
        new = CheckedState(
            found.state,
            torch.where(some.unsqueeze(1), one_hot[row, ended], state.last),
            torch.where(some, alike[:, -1], state.alike),
            torch.where(some.unsqueeze(1), shares[:, -1], state.shares),
        )
        return Filtered(found.logits, found.used & self._in_bursts(alike, shares), new)

    def _in_bursts(self, alike: Tensor, shares: Tensor) -> Tensor:
        """Return where neighbours are alike beyond chance, from shares (...) and (..., K)."""
        chance = shares.square().sum(-1)
        return alike - chance > self.least_beyond_chance * (1 - chance)

    def info(self, state: CheckedState) -> list[FilterInfo]:  # type: ignore[override]
        """Return whether the filter is on for each stream, and what the temperature that answers believes."""
        bursts = self._in_bursts(state.alike, state.shares).tolist()
        return [one._replace(on=one.on and some) for one, some in zip(super().info(state.filter), bursts, strict=True)]


def _average(before: Tensor, new: Tensor, counted: Tensor, images: int) -> Tensor:
    """Return exponential means (S, B, K) after each image, from those before (S, K) and what is new (S, B, K)."""
    keep, count = math.exp(-1 / images), counted.cumsum(1).to(new.dtype)  # (S, B) images so far
    age = (count.unsqueeze(2) - count.unsqueeze(1)).clamp_min(0)  # (S, B, B) of image j at image i
    weight = (1 - keep) * (keep**age).tril() * counted.unsqueeze(1).to(new.dtype)
    return (keep**count).unsqueeze(2) * before.unsqueeze(1) + weight @ new
