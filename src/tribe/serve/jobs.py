"""A request as the scheduler sees it, the line of a stream's requests, and a batch that runs."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from tribe.serve.errors import Overloaded


@dataclass(eq=False, slots=True)
class Job:
    """One request. ``answered`` and ``learnable`` change while it waits."""

    stream: str | None  # None: the source model predicts
    images: Tensor  # (B, ...)
    arrived: float
    deadline: float = math.inf
    learn: bool = True
    request_id: str | None = None
    reply: Any = None  # the caller's own, such as a future
    source: bool = False  # the source model predicts, because the stream has no state here
    launch_by: float = 0.0  # when it no longer waits for company
    answered: bool = False  # has an answer or an error; its images may still be learned
    predicting: bool = False  # is in the line for predictions, or answered by one
    learnable: bool = False  # is in its stream's line
    asked: bool = False  # is in its stream's line, and somebody waits for its step
    counted: bool = False  # is among the requests without an answer
    launched: float = math.nan  # when its batch was launched
    size: int = 0  # how many images

    def __post_init__(self) -> None:
        self.size = self.images.shape[0]


@dataclass(eq=False, slots=True)
class Line:
    """The requests of a stream that are not learned yet, the oldest first."""

    jobs: deque[Job] = field(default_factory=deque)
    asked: int = 0  # how many of them somebody waits for
    busy: bool = False  # one of its requests is being stepped, or somebody holds the stream
    holders: deque[Callable[[], None]] = field(default_factory=deque)  # who wants to hold it next


class Running(NamedTuple):
    """A batch that was launched."""

    jobs: list[Job]
    since: float
    until: float  # when it should be done

    @property
    def size(self) -> int:
        """How many images."""
        return sum(job.size for job in self.jobs)


class Refused(NamedTuple):
    """A request that gets no answer, and why."""

    job: Job
    error: Overloaded
