"""The parts that a worker's sessions, writer and controls share: fleet, store, scheduler, threads and tasks."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from tribe.serve.batch_times import BatchTimes
from tribe.serve.config import Policy
from tribe.serve.events import Events
from tribe.serve.metrics import Metrics
from tribe.serve.scheduler import Scheduler
from tribe.serve.store import StreamStore
from tribe.streams import Fleet

T = TypeVar("T")
Thread = Literal["step", "predict", "claims", "states", "writer"]
THREADS: tuple[Thread, ...] = ("step", "predict", "claims", "states", "writer")
log = logging.getLogger("tribe.serve")


class Runtime:
    """Hold the parts that a worker's sessions, writer and controls share. Use it on one event loop.

    Each thread does one thing after another. ``step`` and ``predict`` run the model, so that a prediction never waits
    for a step; ``claims`` asks the store for claims, ``states`` changes the fleet, and may wait for a step; ``writer``
    writes states to the store.

    Args:
        fleet: the network and the states of its streams.
        store: holds claims and stored states; None: nothing is stored, and this worker owns every stream.
        policy: how it trades latency, adaptation and safety.
        owner: the worker's name in the store.
        model: the name of the model in metrics.
        clock: the time in seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        store: StreamStore | None,
        policy: Policy,
        owner: str,
        model: str,
        clock: Callable[[], float],
    ) -> None:
        self.fleet, self.store, self.policy, self.owner, self.clock = fleet, store, policy, owner, clock
        self.events, self.metrics = Events(policy.events), Metrics(model)
        self.scheduler = Scheduler(policy, BatchTimes())
        self.on_progress: Callable[[], None] = lambda: None  # called when a stream is free again
        self.threads = {name: ThreadPoolExecutor(1, f"tribe-{name}") for name in THREADS}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, thread: Thread, function: Callable[[], T]) -> T:
        """Run a function in a thread, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self.threads[thread], function)

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
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.scheduler.release(stream)
            raise
        try:
            yield
        finally:
            self.scheduler.release(stream)
            self.on_progress()

    # A change of a stream is made in the store, in the fleet and in the session. If it ended in the middle, they would
    # not agree. So it runs as a task of its own, which goes on although its caller is cancelled.

    def start(self, change: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a change to its end."""
        task = asyncio.get_running_loop().create_task(change)
        self._tasks.add(task)  # the event loop alone would not keep it alive
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self, change: Coroutine[Any, Any, T]) -> T:
        """Run a change to its end, and return its result. If the caller is cancelled, an error is only logged."""
        task = self.start(change)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.add_done_callback(_log_error)
            raise
        return task.result()

    async def finished(self) -> None:
        """Wait until no change runs."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def close(self) -> None:
        """End the threads and the event log."""
        for thread in self.threads.values():
            thread.shutdown(wait=True)
        self.events.close()


def _log_error(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("its caller was cancelled, and it failed: %s: %s", type(error).__name__, error)
