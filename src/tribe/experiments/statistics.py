"""Uncertainty of a number: mean and deviation over seeds, and tests of "A beats B", over seeds and on one stream.

Over seeds (`paired`) the differences of errors are independent: every seed is another stream, which both methods play.

One stream shows only what was better *on this stream* (`duel`). Its images are not independent, so the plain bootstrap
of single images gives intervals that are far too narrow. Here blocks of consecutive images are drawn, the same for both
methods, so what is hard for both cancels. A block has `BLOCK_TIMES` times the integrated autocorrelation time of the
differences; where this is more than a `LEAST_BLOCKS`-th of the stream, the interval is too narrow all the same.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tribe.experiments.metrics import scored, wrong
from tribe.experiments.record import Record

DRAWS = 2000  # streams
LEVEL = 0.95  # of intervals
SURE = 0.05  # a smaller p is called a difference
BLOCK_TIMES = 5  # a block of one correlation time would miss half of the variance of its sums, five miss a tenth
LEAST_BLOCKS = 8  # fewer blocks show no spread
WINDOW = 5  # correlation times of the sum, see `correlation_time`


class Spread(NamedTuple):
    """Mean and standard deviation over seeds."""

    mean: float
    deviation: float | None  # between seeds, of a sample; None for one seed
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + (f" ± {self.deviation:.2f}" if self.deviation is not None else "")


def spread(values: Sequence[float]) -> Spread:
    """Return mean and standard deviation.

    >>> str(spread([1.0, 2.0, 3.0]))
    '2.00 ± 1.00'
    """
    if not values:
        raise ValueError("there are no values to take a mean of")
    numbers = np.asarray(values, dtype=np.float64)
    return Spread(float(numbers.mean()), float(numbers.std(ddof=1)) if len(numbers) > 1 else None, len(numbers))


class Paired(NamedTuple):
    """Number of A minus number of B over the same seeds: negative where A is lower.

    ``p`` is two-sided, of the paired t test: the probability of a difference this large, in either direction, if A and
    B were equally good. None where differences show no spread: for one seed, and where they are the same in all seeds.
    """

    difference: float  # the mean
    deviation: float | None  # of the differences, between seeds
    p: float | None
    seeds: int
    agree: int  # seeds whose difference has the sign of the mean

    def __str__(self) -> str:
        word = "better" if self.difference < 0 else "worse"
        gap = f"{abs(self.difference):.2f} points {word}" if self.difference else "no difference"
        if self.deviation is None:
            return f"{gap} in one seed"
        if not self.difference:
            return f"{gap} over {self.seeds} seeds" + (f" (± {self.deviation:.2f})" if self.deviation else "")
        if self.p is None:
            return f"{gap} over {self.seeds} seeds (not sure: the same in all seeds, without a spread to test)"
        sure = "" if self.p < SURE else "not sure: "
        agree = f"{self.agree} of {self.seeds} agree"
        test = f"paired t test, two-sided p {_p_text(self.p)}"
        return f"{gap} over {self.seeds} seeds ({sure}± {self.deviation:.2f}, {agree}, {test})"


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """Compare numbers of A and B, one for each seed, of the same seeds in the same order.

    >>> str(paired([1.0, 2.0, 2.5], [2.0, 3.0, 4.0]))
    '1.17 points better over 3 seeds (± 0.29, 3 of 3 agree, paired t test, two-sided p 0.020)'
    """
    if not a or len(a) != len(b):
        raise ValueError(f"a comparison needs as many numbers of A as of B, at least one; got {len(a)} and {len(b)}")
    gaps = [x - y for x, y in zip(a, b, strict=True)]
    over, p = spread(gaps), None
    if not any(gaps):
        p = None if len(gaps) == 1 else 1.0
    elif not all(math.isclose(gap, gaps[0], rel_tol=1e-9, abs_tol=1e-12) for gap in gaps):  # equal but for rounding
        from scipy.stats import ttest_1samp  # takes a second to import, and most commands do not need it

        p = float(ttest_1samp(gaps, 0.0).pvalue)
    return Paired(over.mean, over.deviation, p, len(gaps), sum(gap * over.mean > 0 for gap in gaps))


def correlation_time(gap: NDArray[np.float64]) -> float:
    """Return the integrated autocorrelation time of a series, in steps: 1 if its numbers are independent.

    One plus twice the sum of the autocorrelations, up to the first lag that is `WINDOW` times the sum so far: further
    ones are noise, and their sum would grow with the length of the series.
    """
    centred = gap - gap.mean()
    power = np.abs(np.fft.rfft(centred, 2 * len(centred))) ** 2
    correlation = np.fft.irfft(power)[: len(centred)]
    if correlation[0] <= 0:
        return 1.0
    times = 2 * np.cumsum(correlation / correlation[0]) - 1
    ends = np.flatnonzero(np.arange(len(times)) >= WINDOW * times)
    return max(1.0, float(times[ends[0] if len(ends) else -1]))


class Duel(NamedTuple):
    """Error of A minus error of B on the same streams, in shares: negative where A is better.

    ``p`` is two-sided: the probability of a difference this large, in either direction, if A and B were equally good on
    streams like these. The estimate is twice the share of drawn streams with no difference or one in the other
    direction. It is the same for A against B as for B against A, and 1 without a difference.
    """

    difference: float
    low: float  # of the interval
    high: float
    p: float
    block: int  # consecutive images that are drawn together

    def __str__(self) -> str:
        around = f"{100 * self.low:+.2f} to {100 * self.high:+.2f}"
        if self.difference == 0:
            return "no difference" if self.low == self.high else f"no difference, not sure: {around}"
        word = "better" if self.difference < 0 else "worse"
        gap, low, high = (100 * abs(x) for x in (self.difference, *sorted((self.low, self.high), key=abs)))
        if self.p >= SURE or self.low <= 0 <= self.high:
            return f"{gap:.2f} points {word} on this stream, not sure: {around}"
        sure = f"{100 * LEVEL:g} %: {low:.2f} to {high:.2f}, two-sided p {_p_text(self.p)}"
        return f"{gap:.2f} points {word} on this stream ({sure}, blocks of {self.block} images)"


def duel(a: Sequence[Record], b: Sequence[Record], block: int | None = None) -> Duel:
    """Return the difference between the instance errors of A and B on the same streams, with its uncertainty.

    ``block`` consecutive images are drawn together; None: as many as the correlation of the differences asks for.
    """
    if not a or len(a) != len(b):
        raise ValueError(f"a duel needs as many records of A as of B, at least one; got {len(a)} and {len(b)}")
    gaps = [_gap(x, y) for x, y in zip(a, b, strict=True)]
    images = min(len(gap) for gap in gaps)
    if block is None:
        block = math.ceil(BLOCK_TIMES * max(correlation_time(gap) for gap in gaps))
        block = max(1, min(block, images // LEAST_BLOCKS))
    if not 1 <= block <= images:
        raise ValueError(f"block is a number of images, from 1 to {images}; got {block}")
    total = sum(len(gap) for gap in gaps)
    rng = np.random.default_rng(0)  # the same streams for the same records
    drawn = np.sum([_block_sums(gap, block, DRAWS, rng) for gap in gaps], axis=0) / total
    observed = float(sum(gap.sum() for gap in gaps)) / total
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    other_side = drawn * np.sign(observed) <= 0  # everywhere without a difference
    p = min(1.0, 2 * (1 + int(other_side.sum())) / (1 + DRAWS))
    return Duel(observed, float(low), float(high), p, block)


def _gap(a: Record, b: Record) -> NDArray[np.float64]:
    """Return whether A is wrong minus whether B is, image by image, (T,)."""
    same = all(torch.equal(x, y) for x, y in ((a.label, b.label), (a.domain, b.domain))) and a.domains == b.domains
    if not same:
        raise ValueError(
            "the records are of different streams: A and B must have met the same images in the same order"
        )
    return (wrong(a) - wrong(b))[scored(a)].numpy()


def _block_sums(gap: NDArray[np.float64], block: int, draws: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return (draws,) sums over as many images, in blocks that start anywhere; the stream is a circle."""
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
