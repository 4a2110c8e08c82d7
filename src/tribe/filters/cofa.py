"""Average the logits of two neighbours, and keep the average if it is the more confident: COFA (UniTTA, 2024)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tribe.core.validation import in_order
from tribe.filters import Filtered, TimeFilter, bounded, informative, register


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
        """Return the state before the first image."""
        return CofaState(like.new_zeros(streams, classes), torch.zeros(streams, dtype=torch.bool, device=like.device))

    @torch.no_grad()
    def step(self, state: CofaState, logits: Tensor, valid: Tensor) -> Filtered:
        """Average each image with the image before it; the average is used where its largest probability is larger."""
        z = logits.to(state.logits.dtype)
        counted = informative(z, valid)
        z = bounded(z, counted)
        # (S, 1 + B, K): the last image of the state and those of the batch; (S, B): where the last one that counts is
        both, places = torch.cat((state.logits.unsqueeze(1), z), 1), torch.arange(1, z.shape[1] + 1, device=z.device)
        last = torch.where(counted, places, 0).cummax(1).values
        before = torch.cat((torch.zeros_like(last[:, :1]), last[:, :-1]), 1)  # up to the image before
        known = state.seen.unsqueeze(1) | (before > 0)
        average = (z + in_order(both, before)) / 2
        better = average.softmax(-1).amax(-1) > z.softmax(-1).amax(-1)
        new = CofaState(in_order(both, last[:, -1:]).squeeze(1), state.seen | counted.any(1))
        return Filtered(average.log_softmax(-1), counted & known & better, new)
