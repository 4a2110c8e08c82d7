"""Alarms of every stream: faults of the camera, a change of the images, and adapting that goes wrong.

Two pure functions over rows watch a method, `Alarms.look` before it learns and `Alarms.observe` after. They do not
synchronise, so that they can be part of a captured step. On the host, `read` turns what is new into events in words.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tribe.core.losses import entropy
from tribe.fields import is_whole, require
from tribe.health.collapse import MIDDLE, CollapseRules, CollapseState, Signs, look_for_collapse, start_collapse
from tribe.health.frames import FrameRules, FrameState, Verdict, judge, start_frames
from tribe.health.martingale import Martingale, MartingaleState, Reference, rank

FAULTS = Verdict._fields
KINDS = (*FAULTS, "shift", "drift", "collapse", "scatter")
BEGIN, END = 0.5, 0.1  # share of faulty frames at which an alarm begins and ends


class AlarmState(NamedTuple):
    """Everything that the alarms of a stream remember; n is the number of `KINDS`."""

    frames: FrameState
    martingale: MartingaleState
    collapse: CollapseState
    images: Tensor  # (S,) int64, images seen
    faults: Tensor  # (S, 7) share of the last frames that show each fault
    first: Tensor  # (S, 7) int64, after how many images each fault began
    on: Tensor  # (S, n) bool, which alarms are on
    times: Tensor  # (S, n) int64, how often each alarm began
    image: Tensor  # (S, n) int64, images seen when it last began
    since: Tensor  # (S, n) int64, after how many images its cause began
    numbers: Tensor  # (S, n, 2) what `read` says of it


@dataclass(frozen=True)
class Alarms:
    """The settings of all alarms."""

    frames: FrameRules = FrameRules()  # noqa: RUF009
    collapse: CollapseRules = CollapseRules()  # noqa: RUF009
    martingale: Martingale = Martingale()  # noqa: RUF009
    window: int = 32  # frames of which half must be faulty

    def __post_init__(self) -> None:
        for name, kind in (("frames", FrameRules), ("collapse", CollapseRules), ("martingale", Martingale)):
            value = getattr(self, name)
            require(isinstance(value, kind), f"{name} of Alarms is a {kind.__name__}", value)
        require(is_whole(self.window, least=1), "window of Alarms is a whole number, at least 1", self.window)

    def init(self, streams: int, classes: int, device: torch.device | str | None = None) -> AlarmState:
        """The state before the first image."""
        count = torch.zeros(streams, len(KINDS), dtype=torch.int64, device=device)
        share = torch.zeros(streams, len(FAULTS), device=device)
        return AlarmState(
            frames=start_frames(streams, device),
            martingale=self.martingale.init(streams, device),
            collapse=start_collapse(streams, classes, device),
            images=count[:, 0].clone(),
            faults=share,
            first=share.to(torch.int64),
            on=count > 0,
            times=count,
            image=count.clone(),
            since=count.clone(),
            numbers=torch.zeros(streams, len(KINDS), 2, device=device),
        )

    @torch.no_grad()
    def look(self, state: AlarmState, x: Tensor, valid: Tensor) -> tuple[Verdict, AlarmState]:
        """Judge images (S, B, ...) before a method learns from them: ``teaches_nothing`` of the verdict says which."""
        verdict, _, frames = judge(self.frames, state.frames, x, valid)
        marked = torch.stack(verdict, 2)  # (S, B, 7)
        count = valid.sum(1, keepdim=True)
        share = marked.sum(1) / count.clamp_min(1)
        faults = torch.lerp(share, state.faults, torch.exp(count / -self.window))
        before = (valid.cumsum(1) - 1).unsqueeze(2)  # real images of the batch before each
        start = torch.where(marked, before, valid.shape[1]).amin(1) + state.images.unsqueeze(1)
        fewer_than_one = state.faults < 1 - math.exp(-0.9 / self.window)
        first = torch.where(marked.any(1) & fewer_than_one, start, state.first)
        return verdict, state._replace(frames=frames, faults=faults, first=first)

    @torch.no_grad()
    def observe(
        self,
        state: AlarmState,
        verdict: Verdict,
        output: Tensor,
        valid: Tensor,
        distance: Tensor,
        *,
        probabilities: bool = False,
        source: Tensor | None = None,
        known: Tensor | None = None,
        reference: Reference | None = None,
    ) -> AlarmState:
        """Add what a method did with a batch. Frames that teach nothing say nothing of the method and are left out.

        Args:
            state: what `look` returned.
            verdict: what `look` returned.
            output: the method's predictions (S, B, K).
            valid: which images count (S, B).
            distance: how far the affine parameters have moved (S,), as in `Info`.
            probabilities: whether ``output`` holds probabilities instead of logits.
            source: the source's logits (S, B, K), if they were computed.
            known: for which images (S, B) they were; None: all.
            reference: what is normal for the source; None: without the alarm "shift".
        """
        images = state.images + valid.sum(1)
        valid = valid & ~verdict.teaches_nothing
        sourced = valid if known is None else valid & known
        classes = None if source is None else source.argmax(2)
        signs, collapse = look_for_collapse(
            self.collapse, state.collapse, output.argmax(2), valid, distance, classes, known
        )
        state = state._replace(collapse=collapse)
        if reference is not None:
            if source is not None:
                logits, counted = source, sourced
            else:
                logits, counted = _logits(output, probabilities), valid
            share = entropy(logits) / math.log(logits.shape[2])
            ranks = rank(reference, share, logits.argmax(2))
            _, martingale = self.martingale.step(reference, state.martingale, ranks, counted, state.images)
            state = state._replace(martingale=martingale)
        return _update(state, signs, images, compared=reference is not None)


def _logits(output: Tensor, probabilities: bool) -> Tensor:
    return output.clamp_min(torch.finfo(torch.float32).tiny).log() if probabilities else output


def _update(state: AlarmState, signs: Signs, images: Tensor, compared: bool) -> AlarmState:
    """Update the alarms after so many images (S,): which are on, and when and with which numbers others begin."""
    bet = state.martingale
    mean, began = bet.mean, bet.since[:, 0]
    if compared:  # else they stay as they were in the beginning
        mean = bet.mean / bet.weight.clamp_min(1e-6)
        began = torch.where(mean > 0.5, began, bet.since[:, 1])
    was_on = state.on[:, : len(FAULTS)]
    faulty = torch.where(was_on, state.faults > END, state.faults >= BEGIN)
    scatter = signs.scatter | (state.on[:, -1] & (state.collapse.evidence > 0))  # until nothing speaks for it
    on = torch.cat((faulty, torch.stack((bet.changed, signs.drift, signs.collapse, scatter), 1)), 1)
    begins = on & ~state.on

    filling = (1 - signs.top_share).clamp_min_(1e-6).log_().mul_(MIDDLE)  # a window of one class fills so fast
    pure = (images + filling).long().clamp_min_(0)
    ordered = (images - state.collapse.length).clamp_min_(0)
    since = torch.cat((state.first, torch.stack((began, state.images, pure, ordered), 1)), 1)
    pairs = mean, bet.weight, signs.distance, state.collapse.steps, signs.top_share, signs.top, signs.order
    four = torch.stack([t.float() for t in (*pairs, signs.source_order)], 1).unflatten(1, (4, 2))
    seven = torch.stack((state.faults, state.frames.grey.unsqueeze(1).expand_as(state.faults)), 2)
    numbers = torch.cat((seven, four), 1)
    return state._replace(
        images=images,
        on=on,
        times=state.times + begins,
        image=torch.where(begins, images.unsqueeze(1), state.image),
        since=torch.where(begins, since, state.since),
        numbers=torch.where(begins.unsqueeze(2), numbers, state.numbers),
    )
