"""The numbers that decide how a worker serves: how long it waits, what it keeps, when it stops learning."""

import dataclasses
from dataclasses import dataclass

from tribe.fields import is_number, require, require_whole
from tribe.streams.fleet import UnknownStream

__all__ = ["NotOwner", "NotStored", "Overloaded", "Policy", "UnknownStream"]


@dataclass(frozen=True)
class Policy:
    """How a worker trades latency, adaptation and safety. Times are in seconds."""

    # Batches
    gather: float = 0.002  # the longest that a request waits for company while the model was busy; idle: not at all
    streams: int = 64  # most streams in one step, and most requests in one prediction
    images: int = 512  # most images in one step or prediction; a single larger request runs alone

    # Latency
    deadline: float | None = None  # of requests that name none, counted from their arrival; None: they wait
    waiting: int = 1024  # most requests without an answer; the next one is refused
    relief: float = 0.5  # after a request was refused, requests with a deadline are only predicted for this long
    backlog: int = 512  # most requests that were answered and not learned yet; the oldest are dropped
    backlog_bytes: int = 256 * 2**20  # and most bytes of their images
    backlog_seconds: float = 1.0  # and most time to learn them: after an overload requests are soon stepped again

    # Ownership
    lease: float = 5.0  # how long a claim holds without renewal
    renew: float = 1.0  # between two renewals
    margin: float = 1.5  # how long before the end of a lease the worker stops learning: its clock, its longest step
    staleness: float = 1.0  # a stream that another worker owns is looked up again after this
    requests: int = 256  # request ids kept with each stream: a repeated one does not learn again

    # Write-behind
    write_every: float = 0.5  # between two rounds of writing
    write_bytes: int = 256 * 2**20  # bytes of states that one round writes; it writes at least one state
    lag: float = 30.0  # a stream whose oldest unwritten step is older stops learning: at most this much is lost
    retry: float = 0.25  # first pause after the store failed; it doubles
    retry_most: float = 5.0  # up to this
    idle: float = 300.0  # a stream without a request for this long is written and released
    drain: float = 10.0  # the longest that `stop` waits for requests and the learning queue

    # Watching
    events: int = 1000  # kept events, and most that one subscriber may be behind
    snapshots: int = 4  # kept for each stream for rollback
    stream_metrics: int = 100  # most streams that get their own gauges

    def __post_init__(self) -> None:
        whole = ("streams", "images", "waiting", "backlog", "backlog_bytes", "requests", "write_bytes", "events")
        require_whole(self, *whole, "snapshots", "stream_metrics")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is float or (field.name == "deadline" and value is not None):
                require(is_number(value) and value >= 0, f"{field.name} is a number of seconds, not negative", value)
        require(
            self.renew + self.margin < self.lease,
            "a lease is renewed before the worker stops learning: renew + margin is less than lease",
            (self.renew, self.margin, self.lease),
        )


class Overloaded(RuntimeError):
    """The worker cannot answer in time; ``retry_after`` says in how many seconds it may."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class WrongState(RuntimeError):
    """The stored state of the stream belongs to another model or method."""


class NotOwner(RuntimeError):
    """Another worker owns the stream, so this one cannot change it."""


class NotStored(RuntimeError):
    """The state of the stream cannot be stored for a reason of its own, such as a number that is not finite."""
