"""How long steps and predictions take: running means for each size of batch, so that a deadline can be judged early."""

from typing import Literal, NamedTuple

Kind = Literal["step", "predict"]

NEWEST = 1 / 8  # share of the newest time in the mean, and twice that in the deviation: as TCP estimates round trips
SPREAD = 3.0  # mean deviations above the mean that an estimate allows for


class Mean(NamedTuple):
    """A running mean and the running mean of the absolute deviation from it."""

    mean: float
    deviation: float
    first: bool = True  # only one value so far

    def observe(self, value: float) -> "Mean":
        """The means after one more value. A first value that was larger does not count: a first batch is slow."""
        if self.first and value < self.mean:
            return Mean(value, value / 2, False)
        error = value - self.mean
        return Mean(self.mean + NEWEST * error, self.deviation + 2 * NEWEST * (abs(error) - self.deviation), False)

    @property
    def safe(self) -> float:
        """A time that most batches do not exceed."""
        return self.mean + SPREAD * self.deviation


class Times:
    """Running means of the seconds that a batch takes, by kind and bucket of images.

    >>> times = Times()
    >>> times.observe("step", 3, 0.010)
    >>> round(times.expect("step", 4), 3), round(times.expect("step", 16), 3), times.expect("predict", 4)
    (0.025, 0.1, 0.0)
    """

    def __init__(self) -> None:
        self._means: dict[Kind, dict[int, Mean]] = {"step": {}, "predict": {}}

    def observe(self, kind: Kind, images: int, seconds: float) -> None:
        """Add the time of a batch, from its launch until its answers are there."""
        means, bucket = self._means[kind], bucket_of(images)
        known = means.get(bucket)
        means[bucket] = Mean(seconds, seconds / 2) if known is None else known.observe(seconds)

    def expect(self, kind: Kind, images: int) -> float:
        """A time that most batches of this many images do not exceed; 0 before anything is known.

        A size that was never seen takes the time of the next larger one, or in proportion to the next smaller one.
        """
        means, bucket = self._means[kind], bucket_of(images)
        if not means:
            return 0.0
        if (known := means.get(bucket)) is not None:
            return known.safe
        if larger := [size for size in means if size > bucket]:
            return means[min(larger)].safe
        nearest = max(means)
        return means[nearest].safe * bucket / nearest

    def typical(self, kind: Kind, images: int) -> float | None:
        """The mean time of batches of this bucket; None: never seen."""
        known = self._means[kind].get(bucket_of(images))
        return None if known is None else known.mean


def bucket_of(images: int) -> int:
    """The next power of two: batches of similar size share a bucket.

    >>> [bucket_of(n) for n in (1, 2, 3, 64, 65)]
    [1, 2, 4, 64, 128]
    """
    return 1 << max(0, images - 1).bit_length()
