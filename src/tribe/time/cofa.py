"""Average the logits of two neighbours, and keep the average if it is the more confident: COFA (UniTTA, 2024)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tribe.time import Filtered, TimeFilter, informative, pick_last, register


class CofaState(NamedTuple):
    """The last image of each stream."""

    logits: Tensor  # (S, K)
    seen: Tensor  # (S,) bool, whether there was one


@register("cofa")
@dataclass(frozen=True)
class Cofa(TimeFilter):
    """COFA: two neighbours probably share their class. It is always on, also where neighbours share nothing."""

    paper = "Du et al., UniTTA: Unified benchmark and versatile framework towards realistic test-time adaptation, 2024"
    always_on = "as published it averages any two neighbours, and has no test of whether they share their class"

    def init(self, streams: int, classes: int, like: Tensor) -> CofaState:
        """No image has been seen."""
        return CofaState(like.new_zeros(streams, classes), torch.zeros(streams, dtype=torch.bool, device=like.device))

    @torch.no_grad()
    def step(self, state: CofaState, logits: Tensor, valid: Tensor) -> Filtered:
        """Average each image with the image before it; the average is used where its largest probability is larger."""
        z = logits.to(state.logits.dtype)
        counted = informative(z, valid)
        before, known = _before(z, counted, state)
        average = (z + before) / 2
        better = average.softmax(-1).amax(-1) > z.softmax(-1).amax(-1)
        last = pick_last(z, counted, state.logits)
        return Filtered(average.log_softmax(-1), counted & known & better, CofaState(last, state.seen | counted.any(1)))


def _before(z: Tensor, counted: Tensor, state: CofaState) -> tuple[Tensor, Tensor]:
    """For each image the logits (S, B, K) of the last image before it that counts, and whether there is one (S, B)."""
    batch = z.shape[1]
    place = torch.where(counted, torch.arange(batch, device=z.device), -1)  # (S, B)
    last = place.cummax(1).values  # the last image up to this one
    previous = torch.cat((torch.full_like(last[:, :1], -1), last[:, :-1]), 1)  # up to the one before
    inside = torch.take_along_dim(z, previous.clamp_min(0).unsqueeze(-1), 1)
    found = previous >= 0
    before = torch.where(found.unsqueeze(-1), inside, state.logits.unsqueeze(1))
    return before, found | state.seen.unsqueeze(1)
