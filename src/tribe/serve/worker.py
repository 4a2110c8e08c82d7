"""The worker: requests of many streams come in, batches of them go to the model, answers come out.

The event loop decides, in a `Scheduler`. Threads do what takes time, each one thing after another: one steps; one
predicts, so that a prediction never waits for a running step; one asks the store for claims; one puts states into the
fleet and takes them out; one writes states to the store. All bookkeeping is on the event loop.
"""

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

from torch import Tensor

from tribe.fields import document
from tribe.methods import Pipeline
from tribe.serve import execution
from tribe.serve.budget import Times
from tribe.serve.condition import Conditions
from tribe.serve.config import Policy
from tribe.serve.control import Controls
from tribe.serve.errors import Overloaded, UnknownStream
from tribe.serve.events import Events
from tribe.serve.execution import Result
from tribe.serve.jobs import Job, Refused
from tribe.serve.keeper import Keeper
from tribe.serve.metrics import Metrics
from tribe.serve.ownership import Served, new_owner
from tribe.serve.scheduler import Scheduler
from tribe.serve.store.protocol import Store, check_name
from tribe.serve.watch import Watch
from tribe.serve.writer import Writer
from tribe.streams import Fleet

THREADS = ("step", "predict", "claims", "states", "writer")
LONGEST_ID = 1000  # characters of a request id
log = logging.getLogger("tribe.serve")


class InferResult(NamedTuple):
    """The answer to a request."""

    logits: Tensor
    adapted: bool
    clock: int | None
    generation: int | None
    health: dict[str, Any] | None


document(
    InferResult,
    logits="Of each image, (B, K); probabilities for methods that return those.",
    adapted="Whether the stream has learned from these images. False: it may learn from them later, or not at all.",
    clock="Steps that the state has taken with which, or by which, the images were predicted; None without a stream.",
    generation="How often the stream has been claimed; None without a store.",
    health="What the stream's state reports, such as its entropy, and what a guarded or watched fleet found in its "
    "last step, such as its estimated accuracy and alarms; None without a stream.",
)


class Worker:
    """Serves the streams of a fleet. Use it on one event loop.

    Args:
        fleet: the network and the states of its streams.
        store: where states and claims are kept; None: nothing is kept, and this worker owns every stream.
        policy: how it trades latency, adaptation and safety.
        owner: its name in the store, for one start of one process; None: a new one.
        model: the name of the model in metrics.
        clock: the time in seconds, as deadlines have it: that of the event loop.
    """

    def __init__(
        self,
        fleet: Fleet,
        store: Store | None = None,
        *,
        policy: Policy | None = None,
        owner: str | None = None,
        model: str = "tribe",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fleet, self.store, self.policy, self.clock = fleet, store, policy or Policy(), clock
        self.owner = owner if owner is not None else new_owner()
        self.metrics, self.log = Metrics(model), Events(self.policy.events)
        self._threads = {name: ThreadPoolExecutor(1, f"tribe-{name}") for name in THREADS}
        in_claims, in_states = (functools.partial(self._in_thread, name) for name in ("claims", "states"))
        self.keeper = Keeper(
            fleet, store, self.policy, self.owner, clock, self.log, in_claims, in_states, self.hold, self._return_jobs
        )
        self.scheduler = Scheduler(self.policy, Times(), self.keeper.blocked)
        self.writer: Writer | None = None
        if store is not None:
            in_writer = functools.partial(self._in_thread, "writer")
            lose = self.keeper.lose
            self.writer = Writer(
                store, self.policy, clock, self.log, self.metrics, in_writer, self.hold, fleet.to_bytes, lose
            )
            self.keeper.writer = self.writer
        self.conditions = Conditions(fleet, self.log, self.metrics)
        self._watch = Watch(self.keeper, self.scheduler, self.metrics, self.conditions)
        self._controls = Controls(self.keeper, self.hold, self.drained, in_states, self.stream)
        self._filters = Pipeline.of(fleet.method).filter is not None  # then also a frozen stream changes
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._progress = asyncio.Event()  # set and replaced whenever a batch ends
        self._accepting = self._stopped = False

    # -- life cycle ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to serve, in the running event loop."""
        loop = asyncio.get_running_loop()
        self._accepting = True
        self.conditions.start()
        chores: list[tuple[Callable[[], Any], float]] = [(self.release_idle, max(0.1, self.policy.idle / 10))]
        if self.store is not None:
            chores += [(self.write_round, self.policy.write_every), (self.keeper.renew, self.policy.renew)]
        self._tasks = [loop.create_task(self._repeat(*chore)) for chore in chores]

    async def _repeat(self, chore: Callable[[], Any], every: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + every, loop.time())  # from start to start, so that a long round does not add to the lag
            await asyncio.sleep(due - loop.time())
            try:
                await chore()
            except Exception:
                log.exception("a chore failed and is tried again: %s", getattr(chore, "__name__", chore))

    async def stop(self) -> None:
        """Refuse new requests, finish those that came, store every stream, and release them all."""
        self._accepting = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.policy.drain):
                await self.keeper.tasks.done()  # a request whose stream is being opened does not count as waiting
                await self.drained()
        self._stopped = True
        for job in self.scheduler.abandon():
            self._refuse(Refused(job, Overloaded("the server stops", 1.0)))
        self._advance()  # an action may wait for what was abandoned
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.keeper.tasks.done()
        for served in list(self.keeper.streams.values()):
            try:
                await self.keeper.release(served)
            except Exception as error:  # of this stream or of the store: the others are tried all the same
                self.log.add("not-stored", f"it was not stored: {error}", served.name, logging.ERROR)
        if self._timer is not None:
            self._timer.cancel()
        for thread in self._threads.values():
            thread.shutdown(wait=True)
        self.conditions.stop()
        self.log.close()

    async def drained(self, stream: str | None = None) -> None:
        """Wait until nothing waits or is to be learned, of one stream or of all."""
        while self._is_busy(stream):
            await self._progress.wait()

    def _is_busy(self, stream: str | None) -> bool:
        lines = self.scheduler.lines
        if stream is None:
            return bool(self.scheduler.waiting or self.scheduler.stepping or any(line.jobs for line in lines.values()))
        running = self.scheduler.stepping.jobs if self.scheduler.stepping is not None else []
        return (stream in lines and bool(lines[stream].jobs)) or any(job.stream == stream for job in running)

    async def write_round(self) -> None:
        """Store what changed; the writer's task calls it every so often."""
        if self.writer is not None:
            await self.writer.round(self.keeper.streams.values())

    async def release_idle(self) -> None:
        """Store and release streams that had no request for a while."""
        await self.keeper.release_idle(self._is_busy)

    # -- requests -----------------------------------------------------------------------------------------------------

    async def infer(
        self,
        stream: str | None,
        images: Tensor,
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        learn: bool = True,
    ) -> InferResult:
        """Predict images (B, ...), and let their stream learn from them.

        Args:
            stream: its name; None: the source model predicts. An unknown name makes a new stream.
            images: floating point in [0, 1].
            request_id: a second request of the stream with the same id is predicted and does not learn.
            deadline: a time of the event loop; `Overloaded` is raised if the answer cannot be there by then.
            learn: False: only predict.
        """
        if not self._accepting:
            raise Overloaded("the server stops, or has not started", 1.0)
        if request_id is not None and len(request_id) > LONGEST_ID:
            raise ValueError(f"a request id has at most {LONGEST_ID} characters; got {len(request_id)}")
        if images.dim() < 2 or not len(images):
            raise ValueError(f"images have the shape {tuple(images.shape)}; expected (B, ...) with at least one image")
        now = self.clock()
        if deadline is None:
            deadline = math.inf if self.policy.deadline is None else now + self.policy.deadline
        job = Job(stream, images, now, deadline, learn, request_id, asyncio.get_running_loop().create_future())
        try:
            await self._place(job)
            inferred: InferResult = await job.reply
        except asyncio.CancelledError:
            if self.scheduler.answer(job):
                self.metrics.refused("canceled")
            raise
        except Overloaded:
            self.metrics.refused("refused")
            raise
        except Exception:
            self.metrics.refused("failed")
            raise
        return inferred

    async def _place(self, job: Job) -> None:
        """Open the stream of a request if need be, and give the request to the scheduler."""
        if job.stream is not None:
            now = self.clock()
            served = self.keeper.ready(job.stream, now)
            if served is None:
                check_name(job.stream)
                served = await self._opened(job)
                if job.answered or job.reply.done():
                    return  # refused or canceled meanwhile
            self._prepare(job, served)
        if self._stopped:
            raise Overloaded("the server stops", 1.0)
        self.scheduler.offer(job, self.clock())
        self.pump()

    async def _opened(self, job: Job) -> Served:
        assert job.stream is not None
        left = None if job.deadline == math.inf else job.deadline - self.clock()
        try:
            async with asyncio.timeout(left):
                return await self.keeper.open(job.stream)
        except TimeoutError:
            raise Overloaded("the stream could not be opened in time", 1.0) from None

    def _prepare(self, job: Job, served: Served) -> None:
        """Decide whether a request may learn, and what predicts it."""
        served.images += job.size
        job.source = not served.loaded
        known = job.request_id
        repeated = known is not None and (known in served.recent or self.scheduler.will_learn(served.name, known))
        job.learn = job.learn and not repeated and self.keeper.blocked(served.name) is None

    # -- batches ------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Launch what can be launched now, and come back when the next thing is due."""
        if self._stopped:
            return
        now = self.clock()
        for refused in self.scheduler.refuse_late(now):
            self._refuse(refused)
        self._launch_prediction(now)
        if (jobs := self.scheduler.next_step(now)) is not None:
            self.metrics.batch_streams.observe(len(jobs))
            self._launch("step", functools.partial(execution.step, self.fleet, jobs), self._stepped)
        self._launch_prediction(now)  # what the choice of a step has left to predictions
        self._set_timer(now)

    def _launch_prediction(self, now: float) -> None:
        jobs, late = self.scheduler.next_prediction(now)
        for refused in late:
            self._refuse(refused)
        if jobs is not None:
            self._launch("predict", functools.partial(execution.predict, self.fleet, jobs), self._predicted)

    def _launch(self, thread: str, run: Callable[[], list[Result]], done: Callable[[Any], None]) -> None:
        asyncio.get_running_loop().run_in_executor(self._threads[thread], run).add_done_callback(done)

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        moment = self.scheduler.wake(now)
        if moment < math.inf:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, moment - now), self.pump)

    def _stepped(self, future: "asyncio.Future[list[Result]]") -> None:
        now, running = self.clock(), self.scheduler.stepping
        assert running is not None
        self.metrics.ran("step", now - running.since)
        for job, result in zip(running.jobs, _results(future, len(running.jobs)), strict=True):
            served = self.keeper.streams.get(job.stream or "")
            adapted = False
            if served is not None and result.error is None:
                lost = self.store is not None and served.claim is None  # while it was stepped: nothing of it is kept
                adapted = served.clock != result.clock and not lost  # nor if it is frozen, or all images were bad
                self._note_step(served, job, result, now)
            self._answer(job, result, "adapted" if adapted else "unchanged", now, adapted)
        self.scheduler.step_done(now)
        self._advance()

    def _note_step(self, served: Served, job: Job, result: Result, now: float) -> None:
        served.clock = result.clock or 0
        self.conditions.note(served, result.condition or {})
        served.note_learned(job.request_id, self.policy.requests)
        served.learned_at = time.time()
        if not served.frozen or self._filters:
            served.touch(now)

    def _predicted(self, future: "asyncio.Future[list[Result]]") -> None:
        now, running = self.clock(), self.scheduler.predicting
        assert running is not None
        self.metrics.ran("predict", now - running.since)
        for job, result in zip(running.jobs, _results(future, len(running.jobs)), strict=True):
            if isinstance(result.error, UnknownStream) and not job.answered:
                self._return_job(self.scheduler.take_back(job))  # the stream was lost while the request waited
            else:
                self._answer(job, result, "source" if job.stream is None else "predicted", now)
        self.scheduler.prediction_done(now)
        self._advance()

    def _advance(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()
        self.pump()

    def _answer(self, job: Job, result: Result, outcome: str, now: float, adapted: bool = False) -> None:
        if job.answered:
            return
        if result.error is None and now > job.deadline:
            self._refuse(Refused(job, Overloaded(f"the answer was {now - job.deadline:.3f} s late", now - job.arrived)))
            self.scheduler.answer(job)
            return
        self.scheduler.answer(job)
        if job.reply.done():
            return
        if result.error is not None:
            job.reply.set_exception(result.error)
            return
        assert result.logits is not None
        served = self.keeper.streams.get(job.stream) if job.stream is not None else None
        generation = None if served is None else served.generation
        health = None if result.health is None else result.health | ({} if served is None else served.condition)
        job.reply.set_result(InferResult(result.logits, adapted, result.clock, generation, health))
        self.metrics.answered(outcome, job.size, job.arrived, job.launched, now)

    def _refuse(self, refused: Refused) -> None:
        if not refused.job.reply.done():
            refused.job.reply.set_exception(refused.error)

    # -- holding and losing streams -----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def hold(self, stream: str) -> AsyncIterator[None]:
        """Keep a stream from being stepped; predictions go on."""
        granted = asyncio.get_running_loop().create_future()

        def grant() -> None:
            if granted.done():  # whoever asked has given up
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
            self._advance()

    def _return_jobs(self, stream: str) -> None:
        """Place the requests of a stream again, after it was lost."""
        for job in self.scheduler.withdraw(stream, "lease"):
            self._return_job(job)

    def _return_job(self, job: Job) -> None:
        async def again() -> None:
            try:
                await self._place(job)
            except Exception as error:
                if not job.reply.done():
                    job.reply.set_exception(error)

        self.keeper.tasks.start(again())

    async def _in_thread(self, thread: str, run: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads[thread], run)

    # -- streams ------------------------------------------------------------------------------------------------------

    async def control(
        self,
        action: Literal["create", "end", "reset", "freeze", "unfreeze", "snapshot", "rollback", "drop"],
        stream: str,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Do something to a stream; see `tribe.serve.control.Controls`."""
        return await self._controls(action, check_name(stream), **arguments)

    async def get_state(self, stream: str) -> bytes:
        """The state file of a stream: `tribe.load` opens it."""
        return await self._controls.get_state(check_name(stream))

    async def put_state(self, stream: str, data: bytes) -> dict[str, Any]:
        """Replace the state of a stream by that of a file, or make a stream of it."""
        return await self._controls.put_state(check_name(stream), data)

    def streams(self) -> list[dict[str, Any]]:
        """What is known of the streams that this worker answers for."""
        return self._watch.streams()

    def stream(self, name: str) -> dict[str, Any]:
        """What is known of one stream; `UnknownStream` if this worker does not answer for it."""
        return self._watch.stream(name)

    async def stored(self, prefix: str = "") -> set[str]:
        """The names of the streams in the store that begin so; without a store there are none."""
        store = self.store
        if store is None:
            return set()

        def names() -> set[str]:
            found: set[str] = set()
            after: str | None = None
            while entries := store.list(prefix, after=after):
                found |= {entry.stream for entry in entries}
                after = entries[-1].stream
            return found

        found: set[str] = await self._in_thread("claims", names)
        return found

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The last events, then every new one, until the worker stops."""
        async for event in self.log.listen():
            yield event._asdict()

    def metrics_text(self, streams: bool = False) -> str:
        """The metrics as Prometheus reads them; ``streams``: with gauges of single streams, up to a limit."""
        return self._watch.metrics_text(streams)


def _results(future: "asyncio.Future[list[Result]]", count: int) -> list[Result]:
    """What a thread returned; what it raised, for every request."""
    error = future.exception()
    if error is None:
        return future.result()
    return [Result(error=error if isinstance(error, Exception) else RuntimeError(str(error)))] * count
