"""The next image is probably of the same class: a hidden Markov model over classes, on while the stream supports it.

Each image keeps the class of the one before with probability 1 - rho; else its class is drawn anew, each with 1 / K.
What the network says of an image is the likelihood of its classes, l = softmax(z / T). Per image:

    predict        prior <- (1 - rho) p + rho / K                                  p: the belief after the last image
    update         p <- prior l / (prior . l)
    learn rho      towards the probability that the class was drawn anew, (rho / K) / (prior . l)
    compare        with a null model, independent draws: null = w (pi . l) + (1 - w) / K, where pi is the marginal of
                   the last images, and w the weight that it has earned against even draws

A bank of temperatures T runs side by side. While the evidence of any, the sum of log (prior . l) - log null, is above a
threshold, the answer is p, else the network's own prediction. The sharpest temperature answers of those whose prior
predicted the last images about best, by the sum of log (prior . l). A temperature at which the likeliest class of an
image has less than about a quarter is excluded, and waits where it started: with many classes it adds up the bias of
the network, not its observations. See docs/time.md for the derivation.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tribe.core import kernels
from tribe.core.bounds import COUNT, NOT_NEGATIVE
from tribe.core.kernels import filtering
from tribe.fields import NotNegative, Range, check_fields, is_number, require
from tribe.filters import Filtered, FilterInfo, TimeFilter, bounded, informative, register

START = 0.5  # rho before the first image: bursts of two
PATIENCE = 30  # images that the first rho counts for
FIRST = 10  # images that the uniform first marginal counts for
FORGET = 0.01  # share of w that returns to a half with every image, so that it can change
SURE = 2  # images that the first confidence, 1, counts for
LEAST_CONFIDENCE = 0.25  # mean likelihood of the likeliest of many classes below which a temperature is excluded
FEWER = 1.5  # subtracted per number of classes: with ten classes a tenth remains, which the likeliest always has
UNSEEN = 0.01  # share of the marginal that is spread evenly, so that a class that was never seen can come

Below1 = Annotated[float, Range(below=1)]


class MarkovState(NamedTuple):
    """The belief of each of M temperatures about each stream."""

    belief: Annotated[Tensor, NOT_NEGATIVE]  # (S, M, K), p
    marginal: Annotated[Tensor, NOT_NEGATIVE]  # (S, M, K), pi
    weight: Annotated[Tensor, NOT_NEGATIVE]  # (S, M), w
    rate: Tensor  # (S, M), rho
    recent: Tensor  # (S, M), how well about the last hundred images were predicted, which chooses the temperature
    evidence: Tensor  # (S, M), which turns the filter on and off
    confidence: Tensor  # (S, M), the mean likelihood of the likeliest class, over the last images
    images: Annotated[Tensor, COUNT]  # (S,) int64, images so far


class Scanned(NamedTuple):
    """The results of a pass over a batch, for each image."""

    belief: Tensor  # (S, B, M, K), after the image
    rate: Tensor  # (S, B, M), before the image
    recent: Tensor  # (S, B, M), after the image
    evidence: Tensor  # (S, B, M), after the image
    confidence: Tensor  # (S, B, M), after the image


class FilterInput(NamedTuple):
    """A batch as the filter reads it."""

    likelihood: Tensor  # (S, B, M, K)
    counted: Tensor  # (S, B)
    every: list[bool]  # whether the image counts for every stream, where that is known without waiting for a device

    def mask(self, image: int) -> Tensor:
        """Return for which streams an image counts, (S, 1)."""
        return self.counted[:, image].unsqueeze(-1)


@register("time")
@dataclass(frozen=True)
class Markov(TimeFilter):
    """A hidden Markov model over classes that turns itself on and off. Beyond the paper.

    An answer uses the image and those before it. With ``within="batch"`` it also uses those after it in the same batch.
    """

    within: Literal["past", "batch"] = "past"  # which images of its batch an answer uses
    temperatures: Sequence[float] = (0.5, 0.9, 1.5, 2.4, 4.0)  # T, rising, or one; above 4 any bias looks like a burst
    temperature_margin: Below1 = 0.03  # share of the best sum that a sharper temperature may miss; rare classes need it
    training_shares: Sequence[float] | None = None  # of the classes, divided out; None: all were equal
    rate_step: Below1 = 0.01  # of rho: about the last 100 images; slower than the marginal, so that bias is not a burst
    least_rate: Below1 = 0.005  # of rho; bounds how long a wrong class stays, see docs/time.md
    marginal_step: Below1 = 0.03  # of pi: about the last 30 images
    recent_memory: Below1 = 0.99  # discount of the sum that chooses the temperature
    evidence_on: NotNegative = 10.0  # nats above which the filter is on; chance alone gets there with e^-10
    evidence_most: NotNegative = 60.0  # limits the evidence, so that some dozen images that switch turn the filter off
    evidence_drift: NotNegative = 0.03  # nats that each image must add, so that hardly sticky streams stay off
    likelihood_floor: Below1 = 0.001  # shared by all classes: one image alone cannot exclude a class

    paper = "Rabiner, A tutorial on hidden Markov models, Proceedings of the IEEE 1989; not part of the TRIBE paper"

    def __post_init__(self) -> None:
        check_fields(self)
        if is_number(self.temperatures):  # --set tribe+time.temperatures=1
            object.__setattr__(self, "temperatures", (self.temperatures,))
        expected = "temperatures is a sequence of positive numbers that rise"
        self._set_numbers("temperatures", expected)
        require(list(self.temperatures) == sorted(set(self.temperatures)), expected, self.temperatures)
        if self.training_shares is not None:
            self._set_numbers("training_shares", "training_shares is a sequence of positive shares, one a class")
        least = self.evidence_on
        require(self.evidence_most > least, f"evidence_most is above evidence_on, {least:g}", self.evidence_most)

    def _set_numbers(self, name: str, expected: str) -> None:
        given = getattr(self, name)
        given = given.tolist() if isinstance(given, np.ndarray | Tensor) else given
        several = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
        require(several and all(is_number(v) and v > 0 for v in given), expected, given)
        object.__setattr__(self, name, tuple(float(v) for v in given))

    @property
    def uses_batch(self) -> bool:
        """Return whether ``within`` is "batch"."""
        return self.within == "batch"

    def init(self, streams: int, classes: int, like: Tensor) -> MarkovState:
        """Return a state in which every class is equally likely, and nothing is known of bursts."""
        if self.training_shares is not None and len(self.training_shares) != classes:
            given = len(self.training_shares)
            raise ValueError(f"training_shares has {given} shares; the network has {classes} classes")
        shape = streams, len(self.temperatures)
        even, zero = like.new_full((*shape, classes), 1 / classes), like.new_zeros(shape)
        count = torch.zeros(streams, dtype=torch.int64, device=like.device)
        off = zero - self.evidence_on
        return MarkovState(even, even.clone(), zero + 0.5, zero + START, zero, off, zero + 1, count)

    @torch.no_grad()
    def step(self, state: MarkovState, logits: Tensor, valid: Tensor) -> Filtered:
        """Filter a batch: update the belief image by image; smooth it backwards if the whole batch may be used."""
        z = logits.to(state.belief.dtype)
        counted = informative(z, valid)
        z = bounded(z, counted)
        if self.training_shares is not None:
            z = z - _logs(tuple(self.training_shares), z.dtype, z.device)
        every = counted.all(0).tolist() if _can_read(counted) else [False] * counted.shape[1]
        images = FilterInput(self._likelihood(z), counted, every)
        scanned, new = self._scan(state, images)
        if self.within == "batch":
            chosen = self._chosen(new)  # as it is at the end of the batch
            belief = self._smooth(scanned, images, chosen)
            # Where it was excluded it started again after the image, so its belief does not include the image.
            sure = _at(scanned.confidence, chosen.unsqueeze(1).expand(counted.shape))
            on = (sure >= least_confidence(z.shape[-1])) & (self._evidence(new) > self.evidence_on).unsqueeze(1)
        else:
            belief = _at(scanned.belief, self._chosen(scanned))
            on = self._evidence(scanned) > self.evidence_on
        tiny = torch.finfo(torch.float32).tiny
        return Filtered(belief.clamp_min(tiny).log(), counted & on, new)

    def info(self, state: MarkovState) -> list[FilterInfo]:
        """Return whether the filter is on for each stream, and what the temperature that answers believes."""
        chosen = self._chosen(state)
        evidence = self._evidence(state).tolist()
        rows = zip(chosen.tolist(), _at(state.rate, chosen).tolist(), evidence, strict=True)
        return [FilterInfo(e > self.evidence_on, 1 / rate, self.temperatures[m], e) for m, rate, e in rows]

    def _evidence(self, after: MarkovState | Scanned) -> Tensor:
        """Return the most evidence (...) of all temperatures; an excluded one has less than turns the filter on."""
        return after.evidence.amax(-1)

    def _chosen(self, after: MarkovState | Scanned) -> Tensor:
        """Return the temperature that answers: the sharpest, not excluded, with a sum (..., M) within the margin."""
        recent = after.recent.masked_fill(after.confidence < least_confidence(after.belief.shape[-1]), -math.inf)
        best = recent.amax(-1, keepdim=True)
        return (recent >= best - self.temperature_margin * best.abs()).byte().argmax(-1)

    def _likelihood(self, z: Tensor) -> Tensor:
        """Return the likelihood of the classes, (S, B, M, K), for every temperature."""
        heat = torch.stack([z / t for t in self.temperatures], 2)  # no tensor from the host: it is captured in graphs
        return heat.softmax(-1) * (1 - self.likelihood_floor) + self.likelihood_floor / z.shape[-1]

    def _scan(self, state: MarkovState, images: FilterInput) -> tuple[Scanned, MarkovState]:
        """Update the belief image by image, then compare it with the null model image by image."""
        if kernels.can_filter(images.likelihood):  # in one launch: a program for each stream and temperature
            constants = (
                *(self.rate_step, self.least_rate, self.marginal_step, self.recent_memory),
                *(self.evidence_on, self.evidence_most, self.evidence_drift, START, PATIENCE, FIRST, SURE),
                *(least_confidence(images.likelihood.shape[-1]), UNSEEN, FORGET),
            )
            parts, after = filtering.scan(images.likelihood, images.counted, state, constants)
            return Scanned(*parts), MarkovState._make((*after, state.images + images.counted.sum(1)))
        confidences = self._confidence(state, images)
        silent = confidences < least_confidence(images.likelihood.shape[-1])
        beliefs, rates, total, local, (belief, marginal, rate) = self._follow(state, images, silent)
        recents, evidences, (weight, recent, evidence) = self._compare(state, images, total, local, silent)
        images_so_far = state.images + images.counted.sum(1)
        ends = MarkovState(belief, marginal, weight, rate, recent, evidence, confidences[:, -1], images_so_far)
        return Scanned(beliefs, rates, recents, evidences, confidences), ends

    def _follow(
        self, state: MarkovState, images: FilterInput, silent: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the belief and rho after each image, and its likelihoods prior . l and pi . l, each (S, B, M).

        A temperature that is ``silent`` (S, B, M) after an image starts again.

        The loop has as few operations as possible: on so few numbers each costs as much as another.
        """
        belief, marginal, rate = state.belief, state.marginal, state.rate.unsqueeze(-1)  # (S, M, K or 1)
        classes, even = belief.shape[-1], torch.full_like(belief, 1 / belief.shape[-1])
        some = silent.any(2).any(0).tolist() if _can_read(silent) else [True] * silent.shape[1]
        rate_step, marginal_step = self._steps(state.images, images.counted, rate.dtype)
        keep, spread, move = 1 - marginal_step, marginal_step * (UNSEEN / classes), marginal_step * (1 - UNSEEN)
        rows = zip(
            *(t.unbind(1) for t in (images.likelihood, rate_step.unsqueeze(-1), keep, spread, move)), strict=True
        )
        beliefs, rates, totals, locals_ = [], [], [], []
        for b, (chance, step, kept, evenly, drawn_share) in enumerate(rows):
            joint = torch.lerp(belief, even, rate).mul_(chance)
            total = joint.sum(-1, keepdim=True)  # prior . l
            drawn = marginal * chance
            local = drawn.sum(-1, keepdim=True)  # pi . l
            rates.append(rate)
            totals.append(total)
            locals_.append(local)
            marginal = (marginal * kept).add_(evenly).addcmul_(drawn, drawn_share / local)
            # The likelihood sums to 1, so rho / K is the joint probability that the class is drawn anew.
            rate = torch.lerp(rate, rate / (total * classes), step).clamp_(self.least_rate, 1.0)
            updated = joint.div_(total)
            belief = updated if images.every[b] else torch.where(images.mask(b).unsqueeze(-1), updated, belief)
            if some[b]:
                again = silent[:, b].unsqueeze(-1)
                belief, rate = belief.masked_fill_(again, 1 / classes), rate.masked_fill_(again, START)
            beliefs.append(belief)
        rates_, total, local = (torch.stack(parts, 1).squeeze(-1) for parts in (rates, totals, locals_))
        return torch.stack(beliefs, 1), rates_, total, local, (belief, marginal, rate.squeeze(-1))

    def _compare(
        self, state: MarkovState, images: FilterInput, total: Tensor, local: Tensor, silent: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the quality of the last predictions, and the evidence, after each image: (S, B, M) each."""
        weight, recent, evidence = state.weight, state.recent, state.evidence
        classes, even = state.belief.shape[-1], torch.full_like(weight, 1 / state.belief.shape[-1])
        return_to = torch.full_like(weight, FORGET / 2)
        predicted = (total * classes).log_().unbind(1)
        nulls, recents, evidences = [], [], []
        for b, (chance, ahead) in enumerate(zip(local.unbind(1), (local - even.unsqueeze(1)).unbind(1), strict=True)):
            null = torch.addcmul(even, weight, ahead)  # w (pi . l) + (1 - w) / K
            nulls.append(null)
            earned = return_to.add(weight * chance / null, alpha=1 - FORGET)
            added = predicted[b].add(recent, alpha=self.recent_memory)
            weight = earned if images.every[b] else torch.where(images.mask(b), earned, weight)
            recent = added if images.every[b] else torch.where(images.mask(b), added, recent)
            recents.append(recent)
        gained = (total / torch.stack(nulls, 1)).log_().sub_(self.evidence_drift)
        gained.masked_fill_(~images.counted.unsqueeze(-1), 0)
        gained.masked_fill_(silent, -math.inf)
        for gain in gained.unbind(1):
            evidence = (evidence + gain).clamp_(-self.evidence_on, self.evidence_most)
            evidences.append(evidence)
        return torch.stack(recents, 1), torch.stack(evidences, 1), (weight, recent, evidence)

    def _confidence(self, state: MarkovState, images: FilterInput) -> Tensor:
        """Return the mean likelihood of the likeliest class after each image, (S, B, M)."""
        top, mean, means = images.likelihood.amax(-1), state.confidence, []
        before = state.images.unsqueeze(1) + images.counted.cumsum(1) - 1  # images before this one, if it counts
        step = (1 / (before + SURE)).clamp_min(self.marginal_step).masked_fill_(~images.counted, 0).to(top.dtype)
        for one, share in zip(top.unbind(1), step.unsqueeze(-1).unbind(1), strict=True):
            mean = torch.lerp(mean, one, share)
            means.append(mean)
        return torch.stack(means, 1)

    def _steps(self, images: Tensor, counted: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the step of each image for rho, (S, B, 1), and pi, (S, B, 1, 1): larger at first, 0 if it is bad."""
        before = (images.unsqueeze(1) + counted.cumsum(1) - counted.long()).to(dtype)  # images before this one
        steps = [(1 / (before + PATIENCE), self.rate_step), (1 / (before + FIRST), self.marginal_step)]
        rate, marginal = (torch.where(counted, at_first.clamp_min(later), 0) for at_first, later in steps)
        return rate.unsqueeze(-1), marginal[..., None, None]

    def _smooth(self, scanned: Scanned, images: FilterInput, chosen: Tensor) -> Tensor:
        """Return the belief (S, B, K) in every image given its whole batch, by a backward pass at one temperature."""
        each = chosen.unsqueeze(1).expand(images.counted.shape)
        belief, rate, likelihood = (_at(t, each) for t in (scanned.belief, scanned.rate, images.likelihood))
        if kernels.can_filter(likelihood):
            return filtering.smooth(belief, rate, likelihood, images.counted)
        later = torch.ones_like(belief[:, 0])  # (S, K), the likelihood of the images after this one
        laters = []
        for b in reversed(range(len(images.every))):
            laters.append(later)
            ahead = likelihood[:, b] * later
            back = torch.lerp(ahead, ahead.mean(-1, keepdim=True), rate[:, b].unsqueeze(-1))
            back = back / back.sum(-1, keepdim=True)
            later = back if images.every[b] else torch.where(images.mask(b), back, later)
        product = belief * torch.stack(laters[::-1], 1)
        return product / product.sum(-1, keepdim=True)


@kernels.comparison
def _filtered(device: torch.device) -> dict[str, Sequence[Tensor]]:
    """Filter twenty images of two streams, which are mostly of one class; some do not count."""
    rule, logits = Markov(within="batch"), kernels.numbers(device, 2, 20, 21)
    logits[..., 3] += 4
    valid = (torch.arange(40).view(2, 20) % 11 != 4).to(device)
    done = rule.step(rule.init(2, 21, logits), logits, valid)
    return {"the state of the time filter": done.state, "smoothed beliefs": [done.logits.exp()]}


def least_confidence(classes: int) -> float:
    """Return the mean likelihood of the likeliest class below which a temperature is excluded.

    >>> [round(least_confidence(classes), 3) for classes in (6, 10, 100, 1000)]
    [0.0, 0.1, 0.235, 0.248]
    """
    return LEAST_CONFIDENCE - FEWER / classes


def _can_read(t: Tensor) -> bool:
    """Return whether values can be read at no cost: not on a GPU, and not while the operations are recorded."""
    return t.device.type == "cpu" and not torch.compiler.is_compiling()


@functools.cache
def _logs(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the logarithms of values, copied to the device once: a CUDA graph cannot copy from the host."""
    return torch.tensor(values, dtype=dtype, device=device).log()


def _at(values: Tensor, index: Tensor) -> Tensor:
    """Return the values (S, ..., K) or (S, ...) at one temperature each, by ``index`` (S, ...) into the next axis."""
    axis = index.dim()
    place = index.view(*index.shape, 1, *[1] * (values.dim() - axis - 1))
    return torch.take_along_dim(values, place, axis).squeeze(axis)
