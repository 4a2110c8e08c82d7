"""Uncertainty of a number: mean and deviation over seeds, and a paired block bootstrap for "A beats B".

The images of a stream are not independent: classes come in bursts, a domain lasts for thousands of images, and a
prediction depends on the images before it. The plain bootstrap draws single images as if they were independent, and its
intervals are far too narrow. Here blocks of consecutive images are drawn, the same blocks for both methods: both had
the same images in the same order, so what is hard for both cancels.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tribe.lab.metrics import scored, wrong
from tribe.lab.record import Record

DRAWS = 2000


class Spread(NamedTuple):
    """Mean and standard deviation over seeds."""

    mean: float
    deviation: float | None  # between seeds, of a sample; None for one seed
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + (f" ± {self.deviation:.2f}" if self.deviation is not None else "")


def spread(values: Sequence[float]) -> Spread:
    """Mean and standard deviation.

    >>> str(spread([1.0, 2.0, 3.0]))
    '2.00 ± 1.00'
    """
    if not values:
        raise ValueError("there are no values to take a mean of")
    numbers = np.asarray(values, dtype=np.float64)
    return Spread(float(numbers.mean()), float(numbers.std(ddof=1)) if len(numbers) > 1 else None, len(numbers))


class Duel(NamedTuple):
    """Error of A minus error of B, in shares: negative where A is better.

    ``p`` is one-sided, for the direction that was observed: the probability of a difference this large in that
    direction if A and B were equally good. The estimate is the share of drawn streams with no difference or one in the
    other direction. It is the same for A against B as for B against A, and 1 if there is no difference. Without an
    expected direction, use the two-sided p, which is twice as large.
    """

    difference: float
    low: float  # of the interval
    high: float
    p: float
    level: float  # of the interval
    block: int  # consecutive images that are drawn together

    def __str__(self) -> str:
        around = f"{100 * self.low:+.2f} to {100 * self.high:+.2f}"
        if self.difference == 0:
            return "no difference" if self.low == self.high else f"no difference, not sure: {around}"
        word = "better" if self.difference < 0 else "worse"
        gap, low, high = (100 * abs(x) for x in (self.difference, *sorted((self.low, self.high), key=abs)))
        if self.low < 0 < self.high:
            return f"{gap:.2f} points {word}, not sure: {around}"
        return f"{gap:.2f} points {word} ({100 * self.level:g} %: {low:.2f} to {high:.2f}, p {_p_text(self.p)})"


def duel(
    a: Sequence[Record],
    b: Sequence[Record],
    *,
    block: int | None = None,
    draws: int = DRAWS,
    level: float = 0.95,
    seed: int = 0,
) -> Duel:
    """The difference between the instance errors of A and B on the same streams, with its uncertainty.

    Args:
        a: records of A, one for each seed.
        b: records of B on the same streams, in the same order.
        block: consecutive images drawn together; None: the square root of their number, some batches of a usual stream.
            Longer bursts of classes need longer blocks.
        draws: how many streams are drawn.
        level: of the interval.
        seed: of the draws.
    """
    if not a or len(a) != len(b):
        raise ValueError(f"a duel needs as many records of A as of B, at least one; got {len(a)} and {len(b)}")
    if not 0 < level < 1 or draws < 1:
        raise ValueError(f"level lies between 0 and 1 and draws is at least 1; got {level} and {draws}")
    gaps = [_gap(x, y) for x, y in zip(a, b, strict=True)]
    images = min(len(gap) for gap in gaps)
    block = round(math.sqrt(images)) if block is None else block
    if not 1 <= block <= images:
        raise ValueError(f"block is a number of images, from 1 to {images}; got {block}")
    total = sum(len(gap) for gap in gaps)
    rng = np.random.default_rng(seed)
    drawn = np.sum([_block_sums(gap, block, draws, rng) for gap in gaps], axis=0) / total
    observed = float(sum(gap.sum() for gap in gaps)) / total
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    other_side = drawn * np.sign(observed) <= 0  # everywhere if there is no difference
    p = (1 + int(other_side.sum())) / (1 + draws)
    return Duel(observed, float(low), float(high), p, level, block)


def _gap(a: Record, b: Record) -> NDArray[np.float64]:
    """(T,) whether A is wrong minus whether B is, image by image."""
    same = all(torch.equal(x, y) for x, y in ((a.label, b.label), (a.domain, b.domain))) and a.domains == b.domains
    if not same:
        raise ValueError(
            "the records are of different streams: A and B must have met the same images in the same order"
        )
    return (wrong(a) - wrong(b))[scored(a)].numpy()


def _block_sums(gap: NDArray[np.float64], block: int, draws: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """(draws,) sums over as many images, in blocks that start anywhere; the end of the stream joins its start."""
    count = len(gap)
    total = np.concatenate(([0.0], np.cumsum(np.concatenate((gap, gap[:block])))))
    whole, rest = divmod(count, block)
    starts = rng.integers(0, count, size=(draws, whole + (rest > 0)))
    sums = (total[starts[:, :whole] + block] - total[starts[:, :whole]]).sum(1)
    if rest:
        sums += total[starts[:, -1] + rest] - total[starts[:, -1]]
    return np.asarray(sums)


def _p_text(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
