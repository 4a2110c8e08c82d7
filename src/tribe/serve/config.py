"""Settings of a server: the policy of its worker, and limits on requests and connections."""

import dataclasses
from dataclasses import dataclass

from tribe.fields import is_number, require, require_whole


@dataclass(frozen=True)
class Policy:
    """Trade latency, adaptation and safety. Times are in seconds."""

    # Batches
    max_batch_delay: float = 0.002  # longest wait of a request for a larger batch; 0 while the model is idle
    streams: int = 64  # most streams in one step, and most requests in one prediction
    images: int = 512  # most images in one step or prediction; a single larger request runs alone
    exact: bool = (
        False  # step streams one by one: a stored state is the bits of its replay; slower, see docs/serving.md
    )
    turn: float = 0.05  # longest step or prediction while several tokens send requests; a longer request runs alone

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
    rest: float = 5.0  # a stream without a request for this long is not renewed: others may have it after its lease
    requests: int = 256  # request ids kept with each stream: a repeated one does not learn again
    open_streams: int = 10_000  # most streams that are open at the same time, which tokens share; more get 503
    stored_streams: int = 1_000_000  # most streams in the store; more get 503

    # Shadow
    demote: bool = False  # alarms of adapting that goes wrong let the source answer, until somebody promotes the stream

    # Write-behind
    write_every: float = 0.5  # between two rounds of writing
    write_bytes: int = 256 * 2**20  # bytes of states that one round writes; it writes at least one state
    lag: float = 30.0  # a stream whose oldest unwritten step is older stops learning: at most this much is lost
    retry: float = 0.25  # first pause after the store failed; it doubles
    retry_most: float = 5.0  # longest pause after the store failed
    keep_moved: float = 7 * 86400.0  # how long the state before a move to another version is kept, to go back to
    auto_back: bool = True  # whether a stream that has moved goes back by itself, for an alarm or a worse estimate
    idle: float = 300.0  # a stream without a request for this long is written and released
    drain: float = 10.0  # the longest that `stop` waits for requests and the learning queue

    # Watching
    events: int = 1000  # most events in the log, and most that one subscriber may be behind
    snapshots: int = 4  # most snapshots of each stream for rollback
    stream_metrics: int = 100  # most streams that get their own gauges

    def __post_init__(self) -> None:
        whole = ("streams", "images", "waiting", "backlog", "backlog_bytes", "requests", "write_bytes", "events")
        require_whole(self, "open_streams", "stored_streams")
        require_whole(self, *whole, "snapshots", "stream_metrics")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is float or (field.name == "deadline" and value is not None):
                require(is_number(value) and value >= 0, f"{field.name} is a number of seconds, not negative", value)
        for name in ("demote", "exact", "auto_back"):
            require(isinstance(getattr(self, name), bool), f"{name} is true or false", getattr(self, name))
        require(
            self.renew + self.margin < self.lease,
            "a lease is renewed before the worker stops learning: renew + margin is less than lease",
            (self.renew, self.margin, self.lease),
        )


PARSERS = ("auto", "h11", "zttp")


@dataclass(frozen=True)
class Limits:
    """Bound requests and connections; a request over a limit is refused without affecting others."""

    body: int = 32 * 2**20  # bytes of a request, also when it is unpacked; states have a limit of their own
    state: int = 1024 * 2**20  # bytes of a state that is put to a stream
    pixels: int = 16_000_000  # of an image; of a picture before it is decoded
    request_pixels: int = 2**22  # of all images of a request: a step takes memory for each, on small networks 600 bytes
    body_seconds: float = 20.0  # until a whole body must have arrived
    state_seconds: float = 600.0  # the same for a state
    idle_seconds: float = 75.0  # between two requests of a connection
    head_seconds: float = 10.0  # until the headers of a request must have arrived
    send_seconds: float = 30.0  # in which a client reads nothing of its answer: then the connection is closed
    connections: int = 500  # open at the same time; while there are more, those without a token get 503
    thumbnails: int = 0  # bytes of the last frames of streams, which the page shows; 0: none is kept
    bodies: int = 1536 * 2**20  # bytes of bodies that are read or wait for an answer at the same time, of all clients
    open: bool = False  # whether a server without tokens may listen beyond this machine
    any_range: bool = False  # whether floating point images that look like 0 to 255 are predicted and learned
    parser: str = "auto"  # of HTTP: h11, or zttp, which is faster and young; auto: zttp on this machine alone

    def __post_init__(self) -> None:
        require_whole(self, "thumbnails", least=0)
        for name in ("open", "any_range"):
            require(isinstance(getattr(self, name), bool), f"{name} is true or false", getattr(self, name))
        require(self.parser in PARSERS, f"parser is one of {', '.join(PARSERS)}", self.parser)
        require_whole(self, "body", "state", "pixels", "request_pixels", "connections", "bodies")
        for name in ("body_seconds", "state_seconds", "idle_seconds", "head_seconds", "send_seconds"):
            value = getattr(self, name)
            require(is_number(value) and value > 0, f"{name} is a number of seconds, more than 0", value)
