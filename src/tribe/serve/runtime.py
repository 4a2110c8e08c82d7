"""The parts that a worker's sessions, writer and controls share: streams, fleet, store, threads and tasks."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from tribe.fields import printable
from tribe.health.report import StreamInfo
from tribe.serve.config import Policy
from tribe.serve.jobs import BatchTimes
from tribe.serve.metrics import Events, Metrics
from tribe.serve.scheduler import Scheduler
from tribe.serve.store import Claim, KeptState, Stored, StreamStore
from tribe.serve.versions import FIRST, Versions

T = TypeVar("T")
Role = Literal["owned", "followed", "unreachable", "unfit"]
Mark = tuple[int, int, float | None]  # generation, clock and time of a stored state, which identify it
Thread = Literal["step", "predict", "claims", "lookups", "states", "writer"]
log = logging.getLogger("tribe.serve")
MOST_FAILING = 1000  # streams whose reports fail, which are remembered


HEALTH = {  # name in answers and descriptions -> field of `tribe.health.Health`
    "accuracy": "accuracy",
    "accuracy_low": "low",
    "accuracy_high": "high",
    "accuracy_overall": "overall",
    "accuracy_familiar": "familiar",
    "source_accuracy": "source_accuracy",
    "source_accuracy_low": "source_low",
    "source_accuracy_high": "source_high",
    "source_agreement": "source_agreement",
    "held": "held",
    "returned": "returned",
}


@dataclass(eq=False)
class StreamSession:
    """A stream that this worker answers for."""

    name: str
    role: Role
    used: float  # when the last request came
    claim: Claim | None = None
    learn_until: float = float("inf")  # by the worker's clock: from then on the lease may have ended
    mark: Mark | None = None  # of the stored state that a follower has
    looked_up: float | None = None  # when the store was last asked
    loaded: bool = True  # whether the fleet has a state of it; without one the source model predicts
    recent: deque[str] = field(default_factory=deque)  # ids of the last requests that its state has learned
    clock: int = 0  # steps that its state has taken
    report: dict[str, Any] = field(default_factory=dict)  # after the last step; see `read_reports`
    dirty_since: float | None = None  # when the oldest step was taken that no write has begun to store
    writing_since: float | None = None  # the same of the write that runs
    unstorable: str | None = None  # why its state cannot be stored
    snapshots: list[Any] = field(default_factory=list)  # for rollback; see `controls.SessionSnapshot`
    images: int = 0  # images that came since it was opened
    opener: Hashable = None  # the user who opened it here first
    unfit: tuple[int, float | None] | None = None  # clock and time of its stored state, if that cannot be used
    resting: bool = False  # its claim is not renewed, because no request came; it is stored
    unclaimed: bool = False  # it was looked up for a user who may not claim it
    holding: bool = False  # whether the guard let it learn nothing in the last step
    kept: KeptState | None = None  # the state that stays after a move; see `moves.Moves`
    kept_state: Stored | None = None  # the state itself, without a store
    kept_until: float = float("inf")  # by the worker's clock: then it is removed
    keep: str | None = None  # where the stored state stays at the next write, because the stream has moved since
    accuracy_before: float | None = None  # that was estimated when it moved

    @property
    def generation(self) -> int | None:
        """The generation of the claim, or of the state that a follower has."""
        if self.claim is not None:
            return self.claim.generation
        return None if self.mark is None else self.mark[0]

    @property
    def changed(self) -> bool:
        """Return whether some of its learning is not stored yet."""
        return self.dirty_since is not None or self.writing_since is not None

    def lag(self, now: float) -> float:
        """Return the age of the oldest step that is not stored; 0 without a claim, for example without a store."""
        times = [since for since in (self.dirty_since, self.writing_since) if since is not None]
        return now - min(times) if times and self.claim is not None else 0.0

    def note_report(self, report: dict[str, Any], changed: float | None = None) -> None:
        """Replace the report, and the clock in it; ``changed``: when the state changed, if it must be written."""
        self.report, self.clock = report, report.get("steps", self.clock)
        if self.dirty_since is None:
            self.dirty_since = changed

    def note_kept(self, kept: KeptState | None, until: float = float("inf")) -> None:
        """Note which state stays beside the stored ones, and until when, if it had been kept at this moment."""
        self.kept, self.kept_until = kept, until if kept is None else until - kept.age

    def renewed(self, claim: Claim, asked: float, lease: float, margin: float) -> None:
        """Note that the store has confirmed the claim; it was asked at ``asked`` by this worker's clock."""
        self.claim, self.role, self.learn_until, self.resting = claim, "owned", asked + lease - margin, False

    def lost(self) -> None:
        """Note that the claim may not be used any more."""
        self.claim, self.learn_until = None, float("-inf")


@dataclass(eq=False)
class Runtime:
    """Hold the parts that a worker's sessions, writer and controls share. Use it on one event loop.

    Each thread does one thing after another. ``step`` and ``predict`` run the model, so that a prediction never waits
    for a step; ``claims`` renews and ends claims, which must wait for nothing else; ``lookups`` asks the store for
    streams, and claims new ones; ``states`` changes the fleet, and may wait for a step; ``writer`` writes states.
    """

    fleet: Versions
    store: StreamStore | None
    policy: Policy
    owner: str  # the worker's name in the store
    model: str  # its name in metrics
    clock: Callable[[], float]
    version: str = FIRST  # the default one, in metrics

    def __post_init__(self) -> None:
        self.events, self.metrics = Events(self.policy.events), Metrics(self.model, self.version)
        self.scheduler = Scheduler(self.policy, BatchTimes())
        self.after_commit = AfterCommit()
        self.on_progress: Callable[[], None] = lambda: None  # called when a stream is free again
        self.threads = {name: ThreadPoolExecutor(1, f"tribe-{name}") for name in get_args(Thread)}
        self._tasks: set[asyncio.Task[Any]] = set()

    def run(self, thread: Thread, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function in a thread, and return a future of its result."""
        return asyncio.get_running_loop().run_in_executor(self.threads[thread], function)

    @contextlib.asynccontextmanager
    async def hold(self, stream: str) -> AsyncIterator[None]:
        """Keep a stream from being stepped; predictions go on."""
        granted = asyncio.get_running_loop().create_future()

        def grant() -> None:
            if granted.done():  # the caller was cancelled
                self.scheduler.release(stream)
            else:
                granted.set_result(None)

        self.scheduler.hold(stream, grant)
        try:
            await granted
            yield
        finally:
            if not granted.cancelled():  # else `grant` lets it go
                self.scheduler.release(stream)
                self.on_progress()

    # A change of a stream is made in the store, in the fleet and in the session. If it ended in the middle, they would
    # not agree. So it runs as a task of its own, which goes on although its caller is cancelled.

    def start(self, change: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a change to its end; await it in `asyncio.shield`."""
        task = asyncio.get_running_loop().create_task(change)
        self._tasks.add(task)  # the event loop alone would not keep it alive
        task.add_done_callback(self._tasks.discard)
        return task

    async def finished(self) -> None:
        """Wait until no change runs."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def close(self) -> None:
        """End the threads and the event log."""
        for thread in self.threads.values():
            thread.shutdown(wait=True)
        self.events.close()


class AfterCommit:
    """Run what follows a committed step: the request does not fail with it.

    It is logged once for a stream, and again after it was all right, so that a stream that fails in every step does not
    fill the log.
    """

    def __init__(self) -> None:
        self._failing: dict[tuple[str, str], None] = {}

    @contextlib.contextmanager
    def isolated(self, what: str, stream: str) -> Iterator[None]:
        """Log an exception of the block; ``what`` names what failed."""
        try:
            yield
        except Exception:
            if (what, stream) not in self._failing:
                self._failing[what, stream] = None
                while len(self._failing) > MOST_FAILING:
                    del self._failing[next(iter(self._failing))]
                log.exception("stream %r was stepped, and %s failed", printable(stream), what)
        else:
            self._failing.pop((what, stream), None)

    def reports(self, fleet: Any, names: Iterable[str], look: bool = False) -> dict[str, dict[str, Any]]:
        """Return what streams report, after their alarms were read; only the steps where that fails."""
        wanted = list(names)

        def read(some: list[str]) -> dict[str, dict[str, Any]]:
            if look:
                fleet.look(some)
            return read_reports(fleet, some)

        with contextlib.suppress(Exception):
            return read(wanted)
        reports: dict[str, dict[str, Any]] = {}
        for name in wanted:
            reports[name] = {"steps": fleet.clock(name)}
            with self.isolated("its report", name):
                reports |= read([name])
        return reports


def facts_of(info: StreamInfo) -> dict[str, Any]:
    """Return what a stream reports by name, without what is not known."""
    return {name: value for name, value in info._asdict().items() if value is not None}


def read_reports(fleet: Any, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return what each stream reports, in plain numbers by name; estimates that do not exist are left out."""
    reports = {}
    for name, report in fleet.report_many(names).items():
        reports[name], health = facts_of(report.info), report.health
        if health is not None:
            numbers = {key: getattr(health, field) for key, field in HEALTH.items()}
            reports[name] |= {key: value for key, value in numbers.items() if value is not None}
            reports[name]["alarms"] = list(health.alarms)
    return reports
