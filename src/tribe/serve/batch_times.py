"""Estimate how long steps and predictions take, by the size of a batch, so that a deadline can be judged early."""

from typing import Literal, NamedTuple

Kind = Literal["step", "predict"]

NEWEST = 1 / 8  # share of the newest time in the mean, and twice that in the deviation: as TCP estimates round trips
SPREAD = 3.0  # mean deviations above the mean that an estimate allows for


class RunningMean(NamedTuple):
    """A running mean and the running mean of the absolute deviation from it."""

    mean: float
    deviation: float
    first: bool = True  # only one value so far

    def observe(self, value: float) -> "RunningMean":
        """Return the means after one more value. A larger first value does not count: a first batch is slow."""
        if self.first and value < self.mean:
            return RunningMean(value, value / 2, False)
        error = value - self.mean
        deviation = self.deviation + 2 * NEWEST * (abs(error) - self.deviation)
        return RunningMean(self.mean + NEWEST * error, deviation, False)


class BatchTimes:
    """Estimate the seconds that a batch takes, by kind and size, so that a deadline can be judged early.

    >>> times = BatchTimes()
    >>> times.observe("step", 3, 0.010)
    >>> round(times.expect("step", 4), 3), round(times.expect("step", 16), 3), times.expect("predict", 4)
    (0.025, 0.1, 0.0)
    """

    def __init__(self) -> None:
        self._means: dict[Kind, dict[int, RunningMean]] = {"step": {}, "predict": {}}

    def observe(self, kind: Kind, images: int, seconds: float) -> None:
        """Add the time of a batch, from its launch until its answers are there."""
        means, bucket = self._means[kind], _bucket(images)
        before = means.get(bucket)
        means[bucket] = RunningMean(seconds, seconds / 2) if before is None else before.observe(seconds)

    def expect(self, kind: Kind, images: int) -> float:
        """Return a time that most batches of this many images do not exceed; 0 before the first batch.

        A new size takes the time of the next larger one, or in proportion to the next smaller one.
        """
        means, bucket = self._means[kind], _bucket(images)
        if not means:
            return 0.0
        nearest = min((size for size in means if size >= bucket), default=max(means))
        found = means[nearest]
        return max(1.0, bucket / nearest) * (found.mean + SPREAD * found.deviation)


def _bucket(images: int) -> int:
    """Return the next power of two: batches of similar size share a bucket."""
    return 1 << max(0, images - 1).bit_length()
