"""A worker: requests of many streams come in, batches of them go to the model, answers come out.

The event loop decides, in a `Scheduler`. Threads do what takes time; see `Runtime`. All bookkeeping is on the loop.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric
from torch import Tensor

from tribe.health import Event
from tribe.methods.pipeline import Pipeline
from tribe.serve.batches import Outcome, is_shadowed, predict_versions, step_versions
from tribe.serve.config import Policy
from tribe.serve.controls import Controls
from tribe.serve.errors import BadInput, NotFound, Unavailable, UnknownStream
from tribe.serve.jobs import Job
from tribe.serve.protocol import InferResult
from tribe.serve.runtime import Runtime, StreamSession
from tribe.serve.security import Principal
from tribe.serve.sessions import Sessions, new_owner
from tribe.serve.store import BEFORE, StreamStore
from tribe.serve.versions import Versions
from tribe.streams import Fleet
from tribe.streams.names import check_stream_name
from tribe.streams.shadow import DEMOTED

STATES = ("learning", "frozen", "followed", "unreachable", "unfit", "resting", "lease", "lag")
log = logging.getLogger("tribe.serve")


class Worker:
    """Serves the streams of a fleet, on one event loop. Without a store nothing is stored, and it owns every stream.

    ``owner`` is its name in the store, for one start of one process; ``clock`` is the time of the event loop.
    """

    def __init__(
        self,
        fleet: Fleet | Versions,
        store: StreamStore | None = None,
        *,
        policy: Policy | None = None,
        owner: str | None = None,
        model: str = "tribe",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fleet, self.store, self.policy, self.clock = Versions.of(fleet), store, policy or Policy(), clock
        own, first = new_owner() if owner is None else owner, self.fleet.default
        self.runtime = Runtime(self.fleet, store, self.policy, own, model, clock, first)
        self.runtime.on_progress = self._advance
        for each in self.fleet.fleets.values():
            each.checks.any_range = True  # requests are checked one by one: an error of one would fail a whole step
        self.metrics, self.log, self.scheduler = self.runtime.metrics, self.runtime.events, self.runtime.scheduler
        self.sessions = Sessions(self.runtime, self._place_again)
        self.scheduler.blocked = self.sessions.blocked
        self.control = Controls(self.sessions, self.drained, self.stream)
        self._filters = Pipeline.of(self.fleet.method).filter is not None  # then also a frozen stream changes
        self._alarms: deque[Event] = deque()  # appended in the thread that steps, taken out on the event loop
        self._chores: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._progress = asyncio.Event()  # set and replaced whenever a batch ends
        self._accepting = self._stopped = False
        self.unstored: list[str] = []  # after `stop`: streams that have learned what the store does not have

    async def start(self) -> None:
        """Begin to serve, in the running event loop."""
        self._accepting = True
        for each in self.fleet.fleets.values():
            each.listeners.append(self._alarms.append)
        chores: list[tuple[Callable[[], Any], float]] = [(self.sessions.release_idle, max(0.1, self.policy.idle / 10))]
        if self.fleet.several:
            chores.append((self.control.moves.collect, max(0.1, min(60.0, self.policy.keep_moved / 10))))
        if self.store is not None:
            chores += [(self.write_round, self.policy.write_every), (self.sessions.renew, self.policy.renew)]
        self._chores = [asyncio.get_running_loop().create_task(self._repeat(*chore)) for chore in chores]
        self.runtime.start(self.sessions.check_stored())

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

    async def alive(self) -> None:
        """Return after the threads that run the model have answered; a thread that hangs never answers.

        A worker that stops is alive: how long that may take is bounded elsewhere.
        """
        if self._accepting:
            await asyncio.gather(*(self.runtime.run(thread, lambda: None) for thread in ("step", "predict")))

    async def stop(self) -> None:
        """Refuse new requests, finish those that came, store every stream, and release them all."""
        self._accepting = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.policy.drain):
                await self.runtime.finished()  # a request whose stream is being opened is not in the scheduler yet
                await self.drained()
        self._stopped = True
        for job in self.scheduler.abandon():
            _refuse(job, Unavailable("the server stops", 1.0))
        self._advance()  # an action may wait for the abandoned requests
        for task in self._chores:
            task.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        await self.runtime.finished()
        for session in list(self.sessions.by_name.values()):
            try:
                await self.sessions.release(session)
            except Exception as error:  # of this stream or of the store: the others are tried all the same
                self.log.add("not-released", "it was not released", session.name, logging.ERROR, error)
            if self.store is not None and session.changed:
                self.unstored.append(session.name)
                self.log.add("not-stored", "it was not stored, and goes on from its last stored state", session.name)
        if self._timer is not None:
            self._timer.cancel()
        for each in self.fleet.fleets.values():
            with contextlib.suppress(ValueError):  # it was not started
                each.listeners.remove(self._alarms.append)
        self.runtime.close()

    async def drained(self, stream: str | None = None) -> None:
        """Wait until no request waits or is to be learned, of one stream or of all."""
        while self._is_busy(stream):
            await self._progress.wait()

    def _is_busy(self, stream: str | None) -> bool:
        if stream is not None:
            return bool(self.scheduler.unlearned(stream))
        queued = any(queue.jobs for queue in self.scheduler.queues.values())
        return bool(queued or self.scheduler.waiting or self.scheduler.stepping)

    async def write_round(self) -> None:
        """Store streams that changed."""
        if self.sessions.writer is not None:
            await self.sessions.writer.round(self.sessions.by_name.values())

    async def infer(
        self,
        stream: str | None,
        images: Tensor,
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        learn: bool = True,
        user: Principal | None = None,
        version: str | None = None,
    ) -> InferResult:
        """Predict images (B, ...) in [0, 1], and let their stream learn from them; see `InferRequest`.

        Another ``version`` than the stream's predicts with its source model, and the stream does not learn.

        Users share the model, and open streams as far as they may; None may everything.
        ``deadline`` is a time of the event loop: `Unavailable` is raised if the answer cannot be there by then.
        """
        if not self._accepting:
            raise Unavailable("the server stops, or has not started", 1.0)
        now = self.clock()
        if deadline is None:
            deadline = math.inf if self.policy.deadline is None else now + self.policy.deadline
        share, reply = 1.0 if user is None else user.token.learning_share, asyncio.get_running_loop().create_future()
        job = Job(stream, images, now, deadline, learn, request_id, user, share, reply, version=version)
        try:
            await self._place(job)
            result: InferResult = await job.reply
        except asyncio.CancelledError:
            if self.scheduler.answer(job):
                self.metrics.requests["canceled"].inc()
            raise
        except (Unavailable, NotFound):
            self.metrics.requests["refused"].inc()
            raise
        except Exception:
            self.metrics.requests["failed"].inc()
            raise
        return result

    async def _place(self, job: Job) -> None:
        """Open the stream of a request if need be, and give the request to the scheduler."""
        if job.stream is not None:
            session = self.sessions.ready(job.stream, job.user)
            if session is None:
                left = None if job.deadline == math.inf else job.deadline - self.clock()
                try:
                    async with asyncio.timeout(left):
                        session = await self.sessions.open(check_stream_name(job.stream), job.user, job.version)
                except TimeoutError:
                    raise Unavailable("the stream could not be opened in time", 1.0) from None
                if job.reply.done():
                    return  # refused or cancelled meanwhile
            session.images += job.size
            job.source = not session.loaded
            id = job.request_id
            unlearned = (each.request_id for each in self.scheduler.unlearned(session.name))
            repeated = id is not None and (id in session.recent or id in unlearned)
            own = job.version in (None, self.fleet.version_of(session.name))
            job.learn = job.learn and own and not repeated and self.sessions.blocked(session.name) is None
        if self._stopped:
            raise Unavailable("the server stops", 1.0)
        for displaced, error in self.scheduler.offer(job, self.clock()).items():
            _refuse(displaced, error)
        self.pump()

    def pump(self) -> None:
        """Launch what can be launched now, and come back when the next thing is due."""
        if self._stopped:
            return
        now = self.clock()
        for job, error in self.scheduler.refuse_late(now).items():
            _refuse(job, error)
        for _ in range(2):  # twice: the choice of a step may turn requests into predictions
            jobs, late = self.scheduler.next_prediction(now)
            for job, error in late.items():
                _refuse(job, error)
            if jobs:
                self.runtime.run("predict", partial(predict_versions, self.fleet, jobs)).add_done_callback(
                    self._predicted
                )
            if jobs := self.scheduler.next_step(now):
                self.metrics.batch_streams.observe(len(jobs))
                work = partial(step_versions, self.fleet, jobs, self.runtime.after_commit)
                self.runtime.run("step", work).add_done_callback(self._stepped)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        moment = self.scheduler.wake(now)
        if moment < math.inf:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, moment - now), self.pump)

    def _stepped(self, future: "asyncio.Future[list[Outcome]]") -> None:
        now, running = self.clock(), self.scheduler.stepping
        assert running is not None
        rare = Pipeline.of(self.fleet.method).rare
        self.metrics.step_seconds.observe(now - running.since)
        for job, outcome in zip(running.jobs, future.result(), strict=True):
            session = self.sessions.by_name.get(job.stream or "")
            if session is not None and isinstance(outcome, InferResult) and outcome.clock is not None:
                lost = self.store is not None and session.claim is None  # during the step: it will not be stored
                before = session.clock
                # A report that could not be read holds the steps alone; the step is committed all the same.
                report = outcome.health or {}
                report = report if "images" in report else session.report | report
                with self.runtime.after_commit.isolated("what changed in its health", session.name):
                    self._note_health(session, report)
                session.note_report(report, changed=None if report.get("frozen") and not self._filters else now)
                self.control.moves.note_estimate(session)
                if job.request_id is not None:
                    session.recent.append(job.request_id)
                # A frozen stream, or one whose images were all bad, has the clock from before.
                due = rare is None or before % rare.learn_every == 0
                learned = session.clock != before and due and not lost
                if learned and job.user is not None:
                    job.user.used["learned"] += job.size
                outcome = outcome._replace(adapted=learned and not is_shadowed(outcome), clock=session.clock)
            kind = "adapted" if isinstance(outcome, InferResult) and outcome.adapted else "unchanged"
            self._answer(job, outcome, "shadow" if is_shadowed(outcome) else kind, now)
        while self._alarms:  # the log ``tribe.health`` has them already
            event = self._alarms.popleft()
            with self.runtime.after_commit.isolated("an alarm of it", str(event.stream)):
                numbers = {"image": event.image, "since": event.since} | event.numbers
                if event.kind == DEMOTED:
                    self.metrics.demotions["policy"].inc()
                    self.log.add(DEMOTED, event.words, str(event.stream), logging.DEBUG, **numbers)
                    continue
                self.metrics.alarm_began(event.kind)
                self.log.add(f"alarm-{event.kind}", event.words, str(event.stream), logging.DEBUG, **numbers)
                self.control.moves.note_alarm(str(event.stream), event.kind)
        self.scheduler.step_done(now)
        self._advance()

    def _predicted(self, future: "asyncio.Future[list[Outcome]]") -> None:
        now, running = self.clock(), self.scheduler.predicting
        assert running is not None
        self.metrics.predict_seconds.observe(now - running.since)
        for job, outcome in zip(running.jobs, future.result(), strict=True):
            if isinstance(outcome, UnknownStream) and not job.reply.done():
                self.scheduler.take_back(job, "lease")  # the stream was lost while the request waited
                self.runtime.start(self._offer_again(job))
            else:
                kind = "shadow" if is_shadowed(outcome) and not job.source else "predicted"
                self._answer(job, outcome, "source" if job.stream is None else kind, now)
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
            _refuse(job, BadInput(str(outcome)) if isinstance(outcome, ValueError) else outcome)
        elif now > job.deadline:
            _refuse(job, Unavailable(f"the answer was {now - job.deadline:.3f} s late", now - job.arrived))
        else:
            session = self.sessions.by_name.get(job.stream) if job.stream is not None else None
            if session is not None:
                health = None if outcome.health is None else session.report | outcome.health
                outcome = outcome._replace(generation=session.generation, health=health)
            job.reply.set_result(outcome)
            self.metrics.requests[kind].inc()
            self.metrics.images += job.size
            self.metrics.version_images[outcome.version] += job.size
            self.metrics.request_seconds.observe(now - job.arrived)
            self.metrics.queue_seconds.observe(job.launched - job.arrived)

    def _place_again(self, stream: str) -> None:
        """Place the requests of a stream again, after it was lost."""
        for job in self.scheduler.withdraw(stream, "lease"):
            self.runtime.start(self._offer_again(job))

    async def _offer_again(self, job: Job) -> None:
        try:
            await self._place(job)
        except Exception as error:
            _refuse(job, error)

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
        version = self.fleet.version_of(session.name)
        return session.report | {
            "name": session.name,
            "state": self._state(session),
            "version": version if session.loaded else None,
            "moved": session.kept is not None and session.kept.place == BEFORE,
            "clock": session.clock,
            "generation": session.generation,
            "received": session.images,
            "holding": session.holding,
            "owner": self.runtime.owner if session.role == "owned" else None,
            "lag": session.lag(now),
            "queued": 0 if queue is None else len(queue.jobs),
            "idle": now - session.used,
            "snapshots": [each.clock for each in session.snapshots if each.version == version],
        }

    def _state(self, session: StreamSession) -> str:
        """Return one of `STATES`; lease and lag say why it does not learn."""
        if session.role != "owned":
            return session.role
        if session.resting:
            return "resting"
        return "frozen" if session.report.get("frozen") else self.sessions.blocked(session.name) or "learning"

    def _streams_by_version(self) -> dict[str, int]:
        """Return how many streams that are open here are in each version."""
        loaded = [session.name for session in self.sessions.by_name.values() if session.loaded]
        return dict.fromkeys(self.fleet.names, 0) | Counter(map(self.fleet.version_of, loaded))

    async def stored(self, prefix: str = "", after: str = "") -> list[str]:
        """Return the names of streams in the store that begin so and come after one, in order: at most `PAGE`."""
        store = self.store
        if store is None:
            return []
        return [entry.stream for entry in await self.runtime.run("lookups", lambda: store.list(prefix, after=after))]

    def metrics_text(self, streams: bool = False, more: Iterable[Metric] = ()) -> str:
        """Return the metrics as Prometheus reads them, and ``more``.

        ``streams``: with gauges of single streams, up to a limit.
        """
        now, gauge, sessions = self.clock(), self.metrics.read, self.sessions.by_name.values()
        scheduler, backlog = self.scheduler, len(self.scheduler.backlog)
        lag = max((session.lag(now) for session in sessions), default=0.0)
        states = dict.fromkeys(STATES, 0) | Counter(self._state(session) for session in sessions)
        shadowed = sum(bool(session.report.get("shadow")) for session in sessions)
        alarms = Counter(kind for session in sessions for kind in session.report.get("alarms", ()))
        dropped = "Requests that were answered and never learned, by reason."
        unlearned = "Images that were predicted without learning, because of load."
        current = [
            gauge("nv_inference_pending_request_count", "Requests without an answer.", scheduler.waiting),
            gauge("tribe_streams", "Streams by state.", states, "state"),
            gauge("tribe_streams_shadow", "Streams in shadow: the source model answers.", shadowed),
            gauge("tribe_streams_limit", "Most streams that may be open.", self.policy.open_streams),
            gauge(
                "tribe_streams_refused_total",
                "Streams that were not opened: too many.",
                self.sessions.refused_streams,
                kind=CounterMetricFamily,
            ),
            gauge("tribe_learning_backlog", "Requests that were answered and not learned yet.", backlog),
            gauge("tribe_learning_backlog_bytes", "Bytes of their images.", scheduler.backlog_bytes),
            gauge("tribe_persist_lag_seconds", "Age of the oldest step that is not stored.", lag),
            gauge("tribe_streams_alarmed", "Streams that have an alarm now.", alarms, "kind"),
            gauge("tribe_learning_dropped_total", dropped, scheduler.dropped, "reason", CounterMetricFamily),
            gauge("tribe_unlearned_images_total", unlearned, scheduler.only_predicted, kind=CounterMetricFamily),
        ]
        current += self.metrics.of_versions(self._streams_by_version())
        if streams:
            some = list(sessions)[: self.policy.stream_metrics]
            current += self.metrics.stream_gauges({session.name: self._describe(session) for session in some})
        return self.metrics.text([*current, *more])


def _refuse(job: Job, error: Exception) -> None:
    if not job.reply.done():
        job.reply.set_exception(error)
