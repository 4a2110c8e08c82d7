"""A worker: requests of many streams come in, batches of them go to the model, answers come out.

The event loop decides, in a `Scheduler`. Threads do what takes time; see `Runtime`. All bookkeeping is on the loop.
"""

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from torch import Tensor

from tribe.health import Event
from tribe.methods.pipeline import Pipeline
from tribe.serve import execution
from tribe.serve.config import Policy
from tribe.serve.controls import Action, Controls
from tribe.serve.errors import Overloaded, UnknownStream
from tribe.serve.execution import InferResult, Outcome
from tribe.serve.runtime import Runtime
from tribe.serve.scheduler import Job
from tribe.serve.session import StreamSession
from tribe.serve.sessions import Sessions, new_owner
from tribe.serve.store import StreamStore
from tribe.streams import Fleet
from tribe.streams.names import check_stream_name

STATES = ("learning", "frozen", "followed", "unreachable", "lease", "lag")
log = logging.getLogger("tribe.serve")


class Worker:
    """Serves the streams of a fleet. Use it on one event loop.

    Args:
        fleet: the network and the states of its streams.
        store: holds states and claims; None: nothing is stored, and this worker owns every stream.
        policy: how it trades latency, adaptation and safety.
        owner: its name in the store, for one start of one process; None: a new one.
        model: the name of the model in metrics.
        clock: the time in seconds, as deadlines have it: that of the event loop.
    """

    def __init__(
        self,
        fleet: Fleet,
        store: StreamStore | None = None,
        *,
        policy: Policy | None = None,
        owner: str | None = None,
        model: str = "tribe",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fleet, self.store, self.policy, self.clock = fleet, store, policy or Policy(), clock
        self.runtime = Runtime(fleet, store, self.policy, new_owner() if owner is None else owner, model, clock)
        self.runtime.on_progress = self._advance
        self.metrics, self.log, self.scheduler = self.runtime.metrics, self.runtime.events, self.runtime.scheduler
        self.sessions = Sessions(self.runtime, self._return_jobs)
        self.scheduler.blocked = self.sessions.blocked
        self._controls = Controls(self.sessions, self.drained, self.stream)
        self._filters = Pipeline.of(fleet.method).filter is not None  # then also a frozen stream changes
        self._alarms: deque[Event] = deque()  # appended in the thread that steps, taken out on the event loop
        self._chores: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._progress = asyncio.Event()  # set and replaced whenever a batch ends
        self._accepting = self._stopped = False

    # -- life cycle ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to serve, in the running event loop."""
        self._accepting = True
        self.fleet.listeners.append(self._alarms.append)
        chores: list[tuple[Callable[[], Any], float]] = [(self.release_idle, max(0.1, self.policy.idle / 10))]
        if self.store is not None:
            chores += [(self.write_round, self.policy.write_every), (self.sessions.renew, self.policy.renew)]
        self._chores = [asyncio.get_running_loop().create_task(self._repeat(*chore)) for chore in chores]

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
                await self.runtime.finished()  # a request whose stream is being opened is not in the scheduler yet
                await self.drained()
        self._stopped = True
        for job in self.scheduler.abandon():
            _refuse(job, Overloaded("the server stops", 1.0))
        self._advance()  # an action may wait for the abandoned requests
        for task in self._chores:
            task.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        await self.runtime.finished()
        for session in list(self.sessions.by_name.values()):
            try:
                await self.sessions.release(session)
            except Exception as error:  # of this stream or of the store: the others are tried all the same
                self.log.add("not-stored", f"it was not stored: {error}", session.name, logging.ERROR)
        if self._timer is not None:
            self._timer.cancel()
        with contextlib.suppress(ValueError):  # it was not started
            self.fleet.listeners.remove(self._alarms.append)
        self.runtime.close()

    async def drained(self, stream: str | None = None) -> None:
        """Wait until no request waits or is to be learned, of one stream or of all."""
        while self._is_busy(stream):
            await self._progress.wait()

    def _is_busy(self, stream: str | None) -> bool:
        queues, stepping = self.scheduler.queues, self.scheduler.stepping
        if stream is None:
            return bool(self.scheduler.waiting or stepping or any(queue.jobs for queue in queues.values()))
        running = stepping is not None and any(job.stream == stream for job in stepping.jobs)
        return running or (stream in queues and bool(queues[stream].jobs))

    async def write_round(self) -> None:
        """Store streams that changed."""
        if self.sessions.writer is not None:
            await self.sessions.writer.round(self.sessions.by_name.values())

    async def release_idle(self) -> None:
        """Store and release streams that had no request for a while."""
        await self.sessions.release_idle(self._is_busy)

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
        now = self.clock()
        if deadline is None:
            deadline = math.inf if self.policy.deadline is None else now + self.policy.deadline
        job = Job(stream, images, now, deadline, learn, request_id, asyncio.get_running_loop().create_future())
        try:
            await self._place(job)
            result: InferResult = await job.reply
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
        return result

    async def _place(self, job: Job) -> None:
        """Open the stream of a request if need be, and give the request to the scheduler."""
        if job.stream is not None:
            session = self.sessions.ready(job.stream)
            if session is None:
                session = await self._open(check_stream_name(job.stream), job.deadline)
                if job.reply.done():
                    return  # refused or cancelled meanwhile
            session.images += job.size
            job.source = not session.loaded
            if job.learn:
                job.learn = not self._is_repeated(job, session) and self.sessions.blocked(session.name) is None
        if self._stopped:
            raise Overloaded("the server stops", 1.0)
        self.scheduler.offer(job, self.clock())
        self.pump()

    async def _open(self, stream: str, deadline: float) -> StreamSession:
        left = None if deadline == math.inf else deadline - self.clock()
        try:
            async with asyncio.timeout(left):
                return await self.sessions.open(stream)
        except TimeoutError:
            raise Overloaded("the stream could not be opened in time", 1.0) from None

    def _is_repeated(self, job: Job, session: StreamSession) -> bool:
        known = job.request_id
        return known is not None and (known in session.recent or self.scheduler.will_learn(session.name, known))

    # -- batches ------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Launch what can be launched now, and come back when the next thing is due."""
        if self._stopped:
            return
        now = self.clock()
        for job, error in self.scheduler.refuse_late(now).items():
            _refuse(job, error)
        self._launch_prediction(now)
        if jobs := self.scheduler.next_step(now):
            self.metrics.batch_streams.observe(len(jobs))
            self._launch(functools.partial(execution.step, self.fleet, jobs), "step", self._stepped)
            self._launch_prediction(now)  # of requests that the choice of the step has turned into predictions
        self._set_timer(now)

    def _launch_prediction(self, now: float) -> None:
        jobs, late = self.scheduler.next_prediction(now)
        for job, error in late.items():
            _refuse(job, error)
        if jobs:
            self._launch(functools.partial(execution.predict, self.fleet, jobs), "predict", self._predicted)

    def _launch(self, run: Callable[[], list[Outcome]], thread: str, done: Callable[[Any], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.run_in_executor(self.runtime.threads[thread], run).add_done_callback(done)  # type: ignore[index]

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        moment = self.scheduler.wake(now)
        if moment < math.inf:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, moment - now), self.pump)

    def _stepped(self, future: "asyncio.Future[list[Outcome]]") -> None:
        now, running = self.clock(), self.scheduler.stepping
        assert running is not None
        self.metrics.ran("step", now - running.since)
        for job, outcome in zip(running.jobs, _outcomes(future, len(running.jobs)), strict=True):
            session = self.sessions.by_name.get(job.stream or "")
            if session is not None and isinstance(outcome, InferResult):
                lost = self.store is not None and session.claim is None  # during the step: it will not be stored
                before = session.clock
                self._note_step(session, job, outcome.health or {}, now)
                # A frozen stream, or one whose images were all bad, has the clock from before.
                outcome = outcome._replace(adapted=session.clock != before and not lost, clock=session.clock)
            kind = "adapted" if isinstance(outcome, InferResult) and outcome.adapted else "unchanged"
            self._answer(job, outcome, kind, now)
        while self._alarms:
            self._note_alarm(self._alarms.popleft())
        self.scheduler.step_done(now)
        self._advance()

    def _note_step(self, session: StreamSession, job: Job, report: dict[str, Any], now: float) -> None:
        if not report:  # it could not be read; the step is committed all the same
            report = session.report | {"steps": session.clock + 1}
        self._note_health(session, report)
        session.note_report(report)
        session.note_learned(job.request_id, self.policy.requests)
        if not session.frozen or self._filters:
            session.touch(now)

    def _predicted(self, future: "asyncio.Future[list[Outcome]]") -> None:
        now, running = self.clock(), self.scheduler.predicting
        assert running is not None
        self.metrics.ran("predict", now - running.since)
        for job, outcome in zip(running.jobs, _outcomes(future, len(running.jobs)), strict=True):
            if isinstance(outcome, UnknownStream) and not job.reply.done():
                self.scheduler.take_back(job, "lease")  # the stream was lost while the request waited
                self._place_again(job)
            else:
                self._answer(job, outcome, "source" if job.stream is None else "predicted", now)
        self.scheduler.prediction_done(now)
        self._advance()

    def _advance(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()
        self.pump()

    def _answer(self, job: Job, outcome: Outcome, kind: str, now: float) -> None:
        if not self.scheduler.answer(job) or job.reply.done():
            return
        if not isinstance(outcome, InferResult):
            job.reply.set_exception(outcome)
        elif now > job.deadline:
            late = f"the answer was {now - job.deadline:.3f} s late"
            _refuse(job, Overloaded(late, now - job.arrived))
        else:
            session = self.sessions.by_name.get(job.stream) if job.stream is not None else None
            if session is not None:
                health = None if outcome.health is None else session.report | outcome.health
                outcome = outcome._replace(generation=session.generation, health=health)
            job.reply.set_result(outcome)
            self.metrics.answered(kind, job.size, job.arrived, job.launched, now)

    def _return_jobs(self, stream: str) -> None:
        """Place the requests of a stream again, after it was lost."""
        for job in self.scheduler.withdraw(stream, "lease"):
            self._place_again(job)

    def _place_again(self, job: Job) -> None:
        async def again() -> None:
            try:
                await self._place(job)
            except Exception as error:
                if not job.reply.done():
                    job.reply.set_exception(error)

        self.runtime.start(again())

    # -- alarms -------------------------------------------------------------------------------------------------------

    def _note_alarm(self, event: Event) -> None:
        """Count an alarm of the fleet, and add it to the events; the log ``tribe.health`` has it already."""
        self.metrics.alarm_began(event.kind)
        numbers = {"image": event.image, "since": event.since} | event.numbers
        self.log.add(f"alarm-{event.kind}", event.words, str(event.stream), logging.DEBUG, **numbers)

    def _note_health(self, session: StreamSession, report: dict[str, Any]) -> None:
        """Add events for what changes in a stream's health: alarms that are over, and actions of the guard."""
        before, alarms = session.report, report.get("alarms", [])
        for kind in before.get("alarms", ()):
            if kind not in alarms:
                self.log.add(f"over-{kind}", f"the alarm is over: {kind}", session.name)
        held, returned = (report.get(name, 0) - before.get(name, 0) for name in ("held", "returned"))
        if held > 0:
            self.metrics.held.inc(held)
            if not session.holding:
                which = f" ({', '.join(alarms)})" if alarms else ""
                words = f"the guard lets it learn nothing from such frames{which}; predictions go on"
                self.log.add("guard-held", words, session.name, logging.WARNING, held=report["held"])
        session.holding = held > 0
        if returned > 0:
            self.metrics.returned.inc(returned)
            words = "the guard returned it to its last good state, because something had gone wrong"
            self.log.add("guard-returned", words, session.name, logging.WARNING, returned=report["returned"])

    # -- streams ------------------------------------------------------------------------------------------------------

    async def control(self, action: Action, stream: str, **arguments: Any) -> dict[str, Any]:
        """Do something to a stream; see `tribe.serve.controls.Controls`."""
        return await self._controls(action, check_stream_name(stream), **arguments)

    async def get_state(self, stream: str) -> bytes:
        """Return the state file of a stream: `tribe.load` opens it."""
        return await self._controls.get_state(check_stream_name(stream))

    async def put_state(self, stream: str, data: bytes) -> dict[str, Any]:
        """Replace the state of a stream by that of a file, or make a stream of it."""
        return await self._controls.put_state(check_stream_name(stream), data)

    def streams(self) -> list[dict[str, Any]]:
        """Return the descriptions of the streams that this worker answers for."""
        return [self._describe(session) for session in self.sessions.by_name.values()]

    def stream(self, name: str) -> dict[str, Any]:
        """Return the description of one stream; `UnknownStream` if this worker does not answer for it."""
        session = self.sessions.by_name.get(name)
        if session is None:
            raise UnknownStream(f"no stream {name!r} here: its first request makes it")
        return self._describe(session)

    def _describe(self, session: StreamSession) -> dict[str, Any]:
        now, queue = self.clock(), self.scheduler.queues.get(session.name)
        return session.report | {
            "name": session.name,
            "state": self._state(session),
            "clock": session.clock,
            "generation": session.generation,
            "received": session.images,
            "owner": self.runtime.owner if session.role == "owned" else None,
            "lag": self.sessions.lag(session, now),
            "queued": 0 if queue is None else len(queue.jobs),
            "idle": now - session.used,
            "snapshots": [snapshot.clock for snapshot in session.snapshots],
        }

    def _state(self, session: StreamSession) -> str:
        """Return one word: learning, frozen, followed, unreachable, or why it does not learn (lease, lag)."""
        if session.role != "owned":
            return session.role
        return "frozen" if session.frozen else self.sessions.blocked(session.name) or "learning"

    async def stored(self, prefix: str = "") -> set[str]:
        """Return the names of the streams in the store that begin so; without a store there are none."""
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

        return await self.runtime.run("claims", names)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the last events, then every new one, until the worker stops."""
        async for event in self.log.listen():
            yield event._asdict()

    def metrics_text(self, streams: bool = False) -> str:
        """Return the metrics as Prometheus reads them; ``streams``: with gauges of single streams, up to a limit."""
        now, gauge, sessions = self.clock(), self.metrics.gauge, self.sessions.by_name.values()
        scheduler, backlog = self.scheduler, len(self.scheduler.backlog)
        lag = max((self.sessions.lag(session, now) for session in sessions), default=0.0)
        states = dict.fromkeys(STATES, 0) | Counter(self._state(session) for session in sessions)
        alarms = Counter(kind for session in sessions for kind in session.report.get("alarms", ()))
        dropped = "Requests that were answered and never learned, by reason."
        current = [
            gauge("nv_inference_pending_request_count", "Requests without an answer.", scheduler.waiting),
            gauge("tribe_streams", "Streams by state.", states, "state"),
            gauge("tribe_learning_backlog", "Requests that were answered and not learned yet.", backlog),
            gauge("tribe_learning_backlog_bytes", "Bytes of their images.", scheduler.backlog_bytes),
            gauge("tribe_persist_lag_seconds", "Age of the oldest step that is not stored.", lag),
            gauge("tribe_alarms", "Streams that have an alarm now.", alarms, "kind"),
            self.metrics.counter("tribe_learning_dropped_total", dropped, scheduler.dropped, "reason"),
        ]
        if streams:
            some = list(sessions)[: self.policy.stream_metrics]
            current += self.metrics.stream_gauges({session.name: self._describe(session) for session in some})
        return self.metrics.text(current)


def _refuse(job: Job, error: Overloaded) -> None:
    if not job.reply.done():
        job.reply.set_exception(error)


def _outcomes(future: "asyncio.Future[list[Outcome]]", count: int) -> list[Outcome]:
    """Return the results of a thread; an error that it raised, for every request."""
    error = future.exception()
    if error is None:
        return future.result()
    return [error if isinstance(error, Exception) else RuntimeError(str(error))] * count
