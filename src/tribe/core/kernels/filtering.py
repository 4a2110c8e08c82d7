"""The forward and the backward pass of a hidden Markov model over classes; see `tribe.filters.markov`."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, attr-defined"

from collections.abc import Sequence

import torch
from torch import Tensor

from tribe.core.kernels import tl, triton


def scan(
    likelihood: Tensor, counted: Tensor, state: Sequence[Tensor], constants: Sequence[float]
) -> tuple[list[Tensor], list[Tensor]]:
    """Update the belief image by image, from likelihoods (S, B, M, K); a program for each stream and temperature.

    Returns the tensors of a `tribe.filters.markov.Scanned`, and all but the last of the next `MarkovState`.
    """
    likelihood, state = likelihood.contiguous(), [t.contiguous() for t in state]
    streams, batch, bank, classes = likelihood.shape
    per_image = [likelihood.new_empty((streams, batch, bank)) for _ in range(4)]
    parts = [torch.empty_like(likelihood), *per_image]
    ends = [torch.empty_like(t) for t in state[:-1]]
    _scan[(streams * bank,)](
        likelihood, counted.contiguous().view(torch.uint8), *state, *parts, *ends, batch, bank, classes,
        *(float(c) for c in constants), BLOCK=_width(classes), num_warps=_warps(classes),
    )  # fmt: skip
    return parts, ends


def smooth(belief: Tensor, rate: Tensor, likelihood: Tensor, counted: Tensor) -> Tensor:
    """Return the belief (S, B, K) given the whole batch, from belief, rate (S, B) and likelihood at one temperature."""
    belief, rate, likelihood = belief.contiguous(), rate.contiguous(), likelihood.contiguous()
    streams, batch, classes = belief.shape
    smoothed = torch.empty_like(belief)
    _smooth[(streams,)](
        belief, rate, likelihood, counted.contiguous().view(torch.uint8), smoothed, batch, classes,
        BLOCK=_width(classes), num_warps=_warps(classes),
    )  # fmt: skip
    return smoothed


def _width(classes: int) -> int:
    return max(int(triton.next_power_of_2(classes)), 16)


def _warps(classes: int) -> int:
    """Return how many warps share the classes: at most 32 numbers of each tensor stay in a thread's registers."""
    return 1 if classes <= 128 else min(max(_width(classes) // 512, 4), 32)


@triton.jit
def _scan(
    likelihood, counted, belief0, marginal0, weight0, rate0, recent0, evidence0, sure0, images0,
    beliefs, rates, recents, evidences, sures, belief1, marginal1, weight1, rate1, recent1, evidence1, sure1,
    batch, bank, classes,
    rate_step, least_rate, marginal_step, memory, threshold, most, drift, start, patience, first, sure_first,
    least_sure, unseen, forget,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # streams x images x temperatures x classes can pass 2 ** 31
    stream, temperature = row // bank, row % bank
    k = tl.arange(0, BLOCK)
    inside = k < classes
    belief = tl.load(belief0 + row * classes + k, mask=inside, other=0.0)
    marginal = tl.load(marginal0 + row * classes + k, mask=inside, other=0.0)
    weight, rate = tl.load(weight0 + row), tl.load(rate0 + row)
    recent, evidence = tl.load(recent0 + row), tl.load(evidence0 + row)
    sure = tl.load(sure0 + row)  # the mean likelihood of the likeliest class
    images = tl.load(images0 + stream).to(tl.float32)
    even = 1.0 / classes
    for b in range(batch):
        image = stream * batch + b
        place = image * bank + temperature
        real = tl.load(counted + image) != 0
        chance = tl.load(likelihood + place * classes + k, mask=inside, other=0.0)
        joint = (belief + rate * (even - belief)) * chance
        total = tl.sum(joint, 0)
        drawn = marginal * chance
        local = tl.sum(drawn, 0)
        earned = weight * local
        null = earned + (1.0 - weight) * even
        gained = tl.log(total / null)
        tl.store(rates + place, rate)
        step = tl.maximum(1.0 / (images + patience), rate_step)
        moved = tl.minimum(tl.maximum(rate + step * (rate / (classes * total) - rate), least_rate), 1.0)
        step = tl.maximum(1.0 / (images + first), marginal_step)
        share = tl.where(inside, (1.0 - unseen) * drawn / local + unseen * even, 0.0)
        belief = tl.where(real, joint / total, belief)
        marginal = tl.where(real, marginal + step * (share - marginal), marginal)
        share_earned = earned / null
        weight = tl.where(real, share_earned + forget * (0.5 - share_earned), weight)
        rate = tl.where(real, moved, rate)
        recent = tl.where(real, memory * recent + tl.log(total * classes), recent)
        step = tl.maximum(1.0 / (images + sure_first), marginal_step)
        sure = tl.where(real, sure + step * (tl.max(chance, 0) - sure), sure)
        evidence = tl.where(real, tl.minimum(tl.maximum(evidence + gained - drift, -threshold), most), evidence)
        silent = sure < least_sure
        belief = tl.where(silent, tl.where(inside, even, 0.0), belief)
        rate = tl.where(silent, start, rate)
        evidence = tl.where(silent, -threshold, evidence)
        images = tl.where(real, images + 1.0, images)
        tl.store(beliefs + place * classes + k, belief, mask=inside)
        tl.store(recents + place, recent)
        tl.store(evidences + place, evidence)
        tl.store(sures + place, sure)
    tl.store(belief1 + row * classes + k, belief, mask=inside)
    tl.store(marginal1 + row * classes + k, marginal, mask=inside)
    tl.store(weight1 + row, weight)
    tl.store(rate1 + row, rate)
    tl.store(recent1 + row, recent)
    tl.store(evidence1 + row, evidence)
    tl.store(sure1 + row, sure)


@triton.jit
def _smooth(belief, rate, likelihood, counted, smoothed, batch, classes, BLOCK: tl.constexpr):
    stream = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < classes
    later = tl.where(inside, 1.0, 0.0)
    for i in range(batch):
        image = stream * batch + batch - 1 - i
        row = image * classes + k
        product = tl.load(belief + row, mask=inside, other=0.0) * later
        tl.store(smoothed + row, product / tl.sum(product, 0), mask=inside)
        ahead = tl.load(likelihood + row, mask=inside, other=0.0) * later
        r = tl.load(rate + image)
        back = tl.where(inside, (1.0 - r) * ahead + r * tl.sum(ahead, 0) / classes, 0.0)
        later = tl.where(tl.load(counted + image) != 0, back / tl.sum(back, 0), later)
