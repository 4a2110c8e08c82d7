"""Requests on their way to an answer, the queue of a stream, and how long batches take."""

import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from torch import Tensor

Kind = Literal["step", "predict"]
NEWEST = 1 / 8  # share of the newest time in a mean, and twice that in a deviation: as TCP estimates round trips
SPREAD = 3.0  # mean deviations above the mean that an estimate allows for


class JobState(Enum):
    """Where a request stands on its way to an answer."""

    NEW = "new"  # not offered yet, or taken back
    STEP = "step"  # waits for a step, or is being stepped
    PREDICTION = "prediction"  # waits for a prediction, or is being predicted
    DONE = "done"  # has an answer or an error


WAITING = (JobState.STEP, JobState.PREDICTION)  # offered, and without an answer


@dataclass(eq=False, slots=True)
class Job:
    """A request. The scheduler changes its state while it waits."""

    stream: str | None  # None: the source model predicts
    images: Tensor  # (B, ...)
    arrived: float
    deadline: float = math.inf
    learn: bool = True
    request_id: str | None = None
    user: Any = None  # who sent it, such as a `Principal`: users share the model
    share: float = 1.0  # of learning that its user gets, relative to others
    reply: Any = None  # for the caller, such as a future
    source: bool = False  # the source model predicts, because the stream has no state here
    version: str | None = None  # that the request names; None: that of its stream
    launch_by: float = 0.0  # when it no longer waits for a larger batch
    launched: float = math.nan  # when its batch was launched
    state: JobState = JobState.NEW
    queued: bool = False  # is in its stream's queue, to be learned; also after it was answered
    size: int = field(init=False)  # how many images

    def __post_init__(self) -> None:
        self.size = self.images.shape[0]

    @property
    def awaits_step(self) -> bool:
        """Return whether it is in a queue, and its answer comes from a step."""
        return self.queued and self.state is JobState.STEP


@dataclass(eq=False, slots=True)
class StreamQueue:
    """The requests of a stream that are not learned yet, the oldest first."""

    jobs: deque[Job] = field(default_factory=deque)
    user: Hashable = None  # who sent the first of them
    awaiting: int = 0  # how many of them await a step
    busy: bool = False  # one of its requests is being stepped, or the stream is held
    holders: deque[Callable[[], None]] = field(default_factory=deque)  # callbacks of those who want to hold it next


class BatchTimes:
    """Estimate the seconds that a batch takes, by kind and size, so that a deadline can be judged early.

    >>> times = BatchTimes()
    >>> times.observe("step", 3, 0.010)
    >>> round(times.expect("step", 4), 3), round(times.expect("step", 16), 3), times.expect("predict", 4)
    (0.025, 0.1, 0.0)
    """

    def __init__(self) -> None:
        self._means: dict[Kind, dict[int, tuple[float, float, int]]] = {"step": {}, "predict": {}}

    def observe(self, kind: Kind, images: int, seconds: float) -> None:
        """Add the time of a batch, from its launch until its answers are there."""
        means, size = self._means[kind], 1 << max(0, images - 1).bit_length()  # the next power of two
        mean, deviation, count = means.get(size, (seconds, seconds / 2, 0))
        if count == 1 and seconds < mean:  # a first batch is slow, and then does not count
            mean, deviation = seconds, seconds / 2
        elif count:
            error = seconds - mean
            mean, deviation = mean + NEWEST * error, deviation + 2 * NEWEST * (abs(error) - deviation)
        means[size] = mean, deviation, count + 1

    def expect(self, kind: Kind, images: int) -> float:
        """Return a time that most batches of this many images do not exceed; 0 before the first batch.

        A new size takes the time of the next larger one, or in proportion to the next smaller one.
        """
        means, size = self._means[kind], 1 << max(0, images - 1).bit_length()  # the next power of two
        if not means:
            return 0.0
        nearest = min((other for other in means if other >= size), default=max(means))
        mean, deviation, _ = means[nearest]
        return max(1.0, size / nearest) * (mean + SPREAD * deviation)
