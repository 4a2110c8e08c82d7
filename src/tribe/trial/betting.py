"""A confidence sequence for the sum of a finite population that is drawn at random, without replacement.

Of a recording, the population are the frames on which two models differ, and the value of a frame is 1, 0 or -1. Who
says that the sum is S can be bet against: the capital of a fair game rarely grows. So every S at which the capital has
ever exceeded 2 / error is excluded, from below and from above, and the sums that are left hold the true one at all
times, with a probability of at least 1 - error. One may stop whenever one likes.

Waudby-Smith & Ramdas, Estimating means of bounded random variables by betting, JRSS-B 2024: the hedged capital process
without replacement, whose bets are a mixture over a grid.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

BETS = 20  # players: each always bets the same share of all that may be bet, and each begins with 1 / BETS
Values = NDArray[np.int64]


def sum_interval(values: Values, population: int, error: float) -> tuple[int, int]:
    """Return the least and the largest sum of a population that is not excluded.

    Args:
        values: The values that were drawn so far, in their order: -1, 0 or 1.
        population: How many there are to draw.
        error: The share of sequences that may ever exclude the true sum.

    >>> sum_interval(np.array([1, 1, 0]), 3, 0.01)
    (2, 2)
    """
    low, high = _least(values, population, error), -_least(-values, population, error)
    return min(low, high), max(low, high)  # they cross in a sequence that is wrong anyway


def excludes_below(values: Values, population: int, least: int, error: float) -> NDArray[np.bool_]:
    """Return after each draw whether all sums up to ``least`` are excluded; (..., t) for many sequences (..., t)."""
    capital = log_capital(values, population, least)
    return np.asarray(np.maximum.accumulate(capital, -1) >= math.log(2 / error))


def log_capital(values: Values, population: int, total: int) -> NDArray[np.float64]:
    """Return the logarithm of the capital of those who bet that the sum exceeds ``total``, after each draw (..., t).

    If the sum is ``total``, the expected value of the next draw is the mean of what is left; a bet of the share g
    multiplies the capital by 1 - g + g times the value over this mean, with values of 0, 1 and 2 in place of -1, 0, 1.
    """
    shifted = values + 1
    drawn = np.cumsum(shifted, -1)
    left = total + population - (drawn - shifted)  # the sum of what is left before each draw
    count = population - np.arange(values.shape[-1])  # how many are left before each draw
    impossible = left - shifted < 0  # more was drawn than the sum permits
    ratio = np.where(left > 0, shifted * count / np.maximum(left, 1), 1.0)
    mixed: Any = -np.inf
    for i in range(BETS):
        share = (i + 0.5) / BETS
        mixed = np.logaddexp(mixed, np.cumsum(np.log1p(share * (ratio - 1)), -1))
    return np.where(np.logical_or.accumulate(impossible, -1), np.inf, mixed - math.log(BETS))


def _least(values: Values, population: int, error: float) -> int:
    """Return the least sum that is not excluded: an excluded sum excludes all that are smaller."""
    drawn, count = int(values.sum()), len(values)
    low, high = drawn - (population - count), drawn + (population - count)  # what is left is between all -1 and all 1
    while low < high and count:
        middle = (low + high) // 2
        if excludes_below(values, population, middle, error)[-1]:
            low = middle + 1
        else:
            high = middle
    return low
