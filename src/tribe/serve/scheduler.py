"""Which requests run next, and how: stepped together, only predicted, or refused. No threads, no clock of its own.

Requests of one stream form a line. The first of each line may be stepped, so a stream is stepped at most once at a time
and in the order of arrival. Requests of different streams are stepped together.

A request whose deadline does not allow for a step is predicted at once and stays in its line: its images are learned
later. So a later request of the stream is not stepped before them. Answered requests in lines are the learning queue,
which is bounded: the oldest are dropped. If even a prediction would be late, the request is refused.

Whoever uses a scheduler tells it the time. It may be driven by a test, moment by moment.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count

from tribe.serve.budget import Times
from tribe.serve.config import Policy
from tribe.serve.errors import Overloaded
from tribe.serve.jobs import Job, Line, Refused, Running


class Scheduler:
    """Lines of requests, what runs, and the choice of what runs next."""

    def __init__(
        self, policy: Policy, times: Times, blocked: Callable[[str], str | None] = lambda stream: None
    ) -> None:
        self.policy, self.times = policy, times
        self.blocked = blocked  # why a stream must not learn now; None: it may
        self.lines: dict[str, Line] = {}
        self.predictions: deque[Job] = deque()
        self.backlog: dict[Job, None] = {}  # answered or being predicted, not learned yet; the oldest first
        self.backlog_bytes = 0
        self.dropped = dict.fromkeys(("full", "owner", "lease", "lag", "refused", "closed"), 0)  # by reason
        self.waiting = 0  # requests without an answer
        self._queued = 0  # requests in lines
        self._asked = 0  # those of them that somebody waits for
        self._predicted_images = 0  # in the line for predictions
        self._ids: set[tuple[str, str]] = set()  # streams and ids of requests that are to be learned, or just are
        self.stepping: Running | None = None
        self.predicting: Running | None = None
        self.relief_until = -math.inf
        self._moments: list[tuple[float, int, Job]] = []  # when a waiting request must be looked at again
        self._order = count()

    # -- arrival ------------------------------------------------------------------------------------------------------

    def offer(self, job: Job, now: float) -> None:
        """Take a request: into its stream's line, to be predicted, or both. `Overloaded`: it is refused."""
        if job.deadline <= now:
            raise Overloaded("the deadline has passed already", self._drained(now))
        if self.waiting >= self.policy.waiting:
            self._feel_pressure(now)
            raise Overloaded(
                f"{self.waiting} requests wait, and the policy allows {self.policy.waiting}", self._drained(now)
            )
        step = job.stream is not None and job.learn
        if not step or (job.deadline < math.inf and self._stepped_by(job, now) > job.deadline):
            self._admit_prediction(job, now)
        job.counted = True
        self.waiting += 1
        if step:
            self._join_line(job, now)
        if job.deadline < math.inf:
            self._look_again(job, job.deadline)
            if not job.predicting:
                self._look_again(
                    job, job.deadline - 2 * self.times.expect("predict", job.size) - self.policy.max_batch_delay
                )

    def _join_line(self, job: Job, now: float) -> None:
        assert job.stream is not None
        line = self.lines.setdefault(job.stream, Line())
        idle = self.stepping is None and not self._queued
        job.launch_by = now if idle else now + self.policy.max_batch_delay
        job.learnable = True
        line.jobs.append(job)
        self._queued += 1
        if not job.predicting:
            job.asked = True
            line.asked += 1
            self._asked += 1
        if job.request_id is not None:
            self._ids.add((job.stream, job.request_id))
        if job.predicting:
            self._enter_backlog(job)

    def _stepped_by(self, job: Job, now: float) -> float:
        """When a step with this request would be done, if it joined its line now."""
        if now < self.relief_until:
            return math.inf
        assert job.stream is not None
        line = self.lines.get(job.stream)
        free = now if self.stepping is None else max(now, self.stepping.until)
        ahead = 0 if line is None else len(line.jobs)
        others = len(self.lines)
        rounds = max(ahead, others // self.policy.streams)
        together = min(1 + others, self.policy.streams)
        return free + (rounds + 1) * self.times.expect("step", job.size * together)

    def _admit_prediction(self, job: Job, now: float) -> None:
        """Put a request into the line for predictions. `Overloaded`: its answer would be late.

        An idle model tries it anyway. Otherwise an estimate from one slow moment would never be corrected.
        """
        idle = self.predicting is None and not self.predictions
        if not idle and (done := self._predicted_by(job.size, now)) > job.deadline:
            self._feel_pressure(now)
            raise Overloaded(
                f"the answer would take {done - now:.3f} s, and {job.deadline - now:.3f} s are left", self._drained(now)
            )
        self._queue_prediction(job)

    def _queue_prediction(self, job: Job) -> None:
        job.predicting = True
        self.predictions.append(job)
        self._predicted_images += job.size

    def _predicted_by(self, images: int, now: float) -> float:
        """When a prediction of this many images would be done, if it joined the line now."""
        free = now if self.predicting is None else max(now, self.predicting.until)
        return free + self._predictions_take(images + self._predicted_images)

    def _predictions_take(self, images: int) -> float:
        whole, rest = divmod(images, self.policy.images)
        seconds = whole * self.times.expect("predict", self.policy.images)
        return seconds + (self.times.expect("predict", rest) if rest else 0)

    def _drained(self, now: float) -> float:
        """In how many seconds what waits now is done."""
        free = 0.0 if self.stepping is None else max(0.0, self.stepping.until - now)
        return max(free, self._predicted_by(1, now) - now)

    def _feel_pressure(self, now: float) -> None:
        self.relief_until = now + self.policy.relief

    # -- the learning queue -------------------------------------------------------------------------------------------

    def _enter_backlog(self, job: Job) -> None:
        self.backlog[job] = None
        self.backlog_bytes += job.images.nbytes
        while len(self.backlog) > self.policy.backlog or self.backlog_bytes > self.policy.backlog_bytes:
            self._forget(next(iter(self.backlog)), "full")
        if not job.learnable:
            return  # just dropped
        assert job.stream is not None
        line = self.lines[job.stream]
        together = min(len(self.lines), self.policy.streams)  # a round of steps learns one request of each stream
        takes = self.times.expect("step", job.size * together)
        while len(line.jobs) > 1 and len(line.jobs) * takes > self.policy.backlog_seconds and not line.jobs[0].asked:
            self._forget(line.jobs[0], "full")

    def _leave_backlog(self, job: Job) -> None:
        if job in self.backlog:
            del self.backlog[job]
            self.backlog_bytes -= job.images.nbytes

    def _forget(self, job: Job, reason: str) -> None:
        """Take a request out of its line: it will not be learned."""
        self._leave_backlog(job)
        if job.learnable:
            assert job.stream is not None
            job.learnable = False
            self._discard_id(job)
            self.dropped[reason] += 1
            line = self.lines[job.stream]
            self._unask(job, line)
            line.jobs.remove(job)
            self._queued -= 1
            self._tidy(job.stream, line)

    def _unask(self, job: Job, line: Line) -> None:
        if job.asked:
            job.asked = False
            line.asked -= 1
            self._asked -= 1

    def _discard_id(self, job: Job) -> None:
        if job.stream is not None and job.request_id is not None:
            self._ids.discard((job.stream, job.request_id))

    def will_learn(self, stream: str, request_id: str) -> bool:
        """Whether a request with this id is in the stream's line or is being stepped."""
        return (stream, request_id) in self._ids

    def _tidy(self, stream: str, line: Line) -> None:
        if not (line.jobs or line.busy or line.holders):
            self.lines.pop(stream, None)

    def suspend(self, stream: str, reason: str) -> None:
        """Learn nothing of what is in a stream's line; who waits for an answer gets a prediction."""
        line = self.lines.get(stream)
        for job in list(line.jobs) if line else ():
            self._forget(job, reason)
            if not job.answered and not job.predicting:
                self._queue_prediction(job)

    def withdraw(self, stream: str, reason: str) -> list[Job]:
        """Empty a stream's line; who waits for a step comes back, to be offered again."""
        line = self.lines.get(stream)
        back = []
        for job in list(line.jobs) if line else ():
            self._forget(job, reason)
            if not job.answered and not job.predicting:
                back.append(self.take_back(job))
        return back

    def take_back(self, job: Job) -> Job:
        """A request that is to be offered again."""
        self._uncount(job)
        job.predicting = False
        return job

    def _uncount(self, job: Job) -> None:
        if job.counted:
            job.counted = False
            self.waiting -= 1

    def abandon(self) -> list[Job]:
        """Empty all lines; those who wait for an answer, and are not being answered, get none."""
        back = [job for stream in list(self.lines) for job in self.withdraw(stream, "closed")]
        back += [self.take_back(job) for job in self.predictions if not job.answered]
        self.predictions.clear()
        self._predicted_images = 0
        return back

    # -- what runs next -----------------------------------------------------------------------------------------------

    def next_step(self, now: float) -> list[Job] | None:
        """The requests to step together now; None: nothing, or not yet."""
        if self.stepping is not None or (not self._asked and not self._has_time_to_learn(now)):
            return None
        chosen: list[Job] = []
        size, tightest, shape = 0, math.inf, None
        for job in self._heads(now):
            kind = (job.images.shape[1:], job.images.dtype)
            if shape not in (None, kind):
                continue
            takes = self.times.expect("step", size + job.size)
            until = min(tightest, job.deadline if job.asked else math.inf)
            full = len(chosen) >= self.policy.streams or size + job.size > self.policy.images
            if chosen and (full or now + takes > until):
                continue
            chosen.append(job)
            size, tightest, shape = size + job.size, until, kind
        if not chosen or not self._is_due(chosen, size, now):
            return None
        for job in chosen:
            self._leave_backlog(job)
            line = self.lines[job.stream]  # type: ignore[index]
            self._unask(job, line)
            line.jobs.popleft()
            self._queued -= 1
            line.busy, job.learnable, job.launched = True, False, now
        self.stepping = Running(chosen, now, now + self.times.expect("step", size))
        return chosen

    def _heads(self, now: float) -> Iterator[Job]:
        """The first request of every free line: those with somebody waiting first, then the oldest."""
        free = [(stream, line) for stream, line in self.lines.items() if line.jobs and not line.busy]
        for stream, _ in free:
            if (reason := self.blocked(stream)) is not None:
                self.suspend(stream, reason)
        for _, line in free:
            for job in list(line.jobs) if line.asked else ():
                if job.asked and self._is_late(job, now):
                    self._predict_instead(job)
        left = [line for _, line in free if line.jobs]  # the learning queue may have dropped some
        yield from (line.jobs[0] for line in sorted(left, key=lambda line: (not line.asked, line.jobs[0].arrived)))

    def _is_late(self, job: Job, now: float) -> bool:
        if job.deadline == math.inf:
            return False
        return now < self.relief_until or now + self.times.expect("step", job.size) > job.deadline

    def _predict_instead(self, job: Job) -> None:
        """Predict a request that waits for a step; it stays in its line, to be learned later."""
        assert job.stream is not None
        self._unask(job, self.lines[job.stream])
        self._queue_prediction(job)
        self._enter_backlog(job)

    def _is_due(self, chosen: list[Job], size: int, now: float) -> bool:
        """Whether a batch is launched now, or waits for company or for predictions."""
        waiting = [job for job in chosen if self.lines[job.stream].asked]  # type: ignore[index]
        if not waiting:
            return self._has_time_to_learn(now)
        full = len(chosen) >= self.policy.streams or size >= self.policy.images
        return full or min(job.launch_by for job in waiting) <= now

    def _has_time_to_learn(self, now: float) -> bool:
        """Whether the learning queue may be stepped alone: not under overload, nor while predictions queue up."""
        return bool(self.backlog) and now >= self.relief_until and not self.predictions

    def next_prediction(self, now: float) -> tuple[list[Job] | None, list[Refused]]:
        """The requests to predict together now, or None; and those that would be late."""
        if self.predicting is not None:
            return None, []
        candidates: list[Job] = []
        later: list[Job] = []
        late: list[Job] = []
        names: set[str] = set()
        size = 0
        for job in self.predictions:
            if job.answered:
                continue
            full = len(candidates) >= self.policy.streams or (candidates and size + job.size > self.policy.images)
            if now + self.times.expect("predict", job.size) > job.deadline:
                late.append(job)
            elif full or job.stream in names:
                later.append(job)
            else:
                candidates.append(job)
                size += job.size
                if job.stream is not None:
                    names.add(job.stream)
        chosen, given_up = self._choose(candidates, later, now)
        late += given_up
        if not chosen and late:  # nothing else to do: try one, so that a pessimistic estimate is corrected
            chosen = [late.pop(0)]
        taken = {*chosen, *late}
        self.predictions = deque(job for job in self.predictions if not (job.answered or job in taken))
        self._predicted_images = sum(job.size for job in self.predictions)
        refused = [Refused(job, self._refuse(job, now)) for job in late]
        if not chosen:
            return None, refused
        for job in chosen:
            job.launched = now
        self.predicting = Running(chosen, now, now + self._takes(chosen))
        return chosen, refused

    def _choose(self, candidates: list[Job], later: list[Job], now: float) -> tuple[list[Job], list[Job]]:
        """The requests of the next prediction, in order, and those to give up.

        A batch grows as long as all its requests are in time. If what is left would then be late, and a larger batch
        answers more requests a second, the larger one is taken, without those that it would make late.
        """
        small: list[Job] = []
        size, tightest = 0, math.inf
        for job in candidates:
            until = min(tightest, job.deadline)
            if not small or now + self.times.expect("predict", size + job.size) <= until:
                small.append(job)
                size, tightest = size + job.size, until
        if len(small) == len(candidates):
            return small, []
        rest = [*(job for job in candidates if job not in small), *later]
        soonest, images = min(job.deadline for job in rest), sum(job.size for job in rest)
        if now + self._takes(small) + self._predictions_take(images) <= soonest:
            return small, []
        done = now + self._takes(candidates)
        large = [job for job in candidates if job.deadline >= done]
        if len(large) * self._takes(small) <= len(small) * self._takes(large):
            return small, []
        return large, [job for job in candidates if job.deadline < done]

    def _takes(self, jobs: list[Job]) -> float:
        return self.times.expect("predict", sum(job.size for job in jobs))

    def _refuse(self, job: Job, now: float) -> Overloaded:
        """End a request without an answer; its images are not learned, so that a retry may be."""
        job.answered = True
        self._uncount(job)
        self._forget(job, "refused")
        self._feel_pressure(now)
        return Overloaded(f"no answer within {job.deadline - job.arrived:.3f} s", self._drained(now))

    # -- time passes --------------------------------------------------------------------------------------------------

    def _look_again(self, job: Job, moment: float) -> None:
        if len(self._moments) > 64 + 4 * self.waiting:  # answered long before their deadline: do not keep the images
            self._moments = [each for each in self._moments if not each[2].answered]
            heapq.heapify(self._moments)
        heapq.heappush(self._moments, (moment, next(self._order), job))

    def refuse_late(self, now: float) -> list[Refused]:
        """Refuse requests whose deadline has passed, and predict those for which it is time. Call it at `wake`."""
        refused = []
        while self._moments and self._moments[0][0] <= now:
            _, _, job = heapq.heappop(self._moments)
            if job.answered:
                continue
            if job.deadline <= now:
                refused.append(Refused(job, self._refuse(job, now)))
            elif job.asked:
                self._predict_instead(job)
        return refused

    def wake(self, now: float) -> float:
        """When something must be looked at again, if nothing happens before; infinity: never."""
        while self._moments and self._moments[0][2].answered:
            heapq.heappop(self._moments)
        moment = self._moments[0][0] if self._moments else math.inf
        if self.stepping is None:
            if self._asked:
                free = (line for line in self.lines.values() if line.asked and not line.busy)
                moment = min((moment, *(line.jobs[0].launch_by for line in free)))
            if self.backlog and self.relief_until > now:
                moment = min(moment, self.relief_until)
        return moment

    def step_done(self, now: float) -> None:
        """A step ended, well or badly: its streams are free again."""
        assert self.stepping is not None
        running, self.stepping = self.stepping, None
        self.times.observe("step", running.size, now - running.since)
        for job in running.jobs:
            self._discard_id(job)
            self.release(job.stream)  # type: ignore[arg-type]

    def prediction_done(self, now: float) -> None:
        """A prediction ended, well or badly."""
        assert self.predicting is not None
        running, self.predicting = self.predicting, None
        self.times.observe("predict", running.size, now - running.since)

    def answer(self, job: Job) -> bool:
        """Note that a request has its answer; False: it had one already."""
        if job.answered:
            return False
        job.answered = True
        self._uncount(job)
        return True

    # -- holding a stream ---------------------------------------------------------------------------------------------

    def hold(self, stream: str, granted: Callable[[], None]) -> None:
        """Keep a stream from being stepped, from the moment ``granted`` is called until `release`."""
        line = self.lines.setdefault(stream, Line())
        if line.busy:
            line.holders.append(granted)
        else:
            line.busy = True
            granted()

    def release(self, stream: str) -> None:
        """End a step or a hold of a stream; the next holder gets it, or its requests go on."""
        line = self.lines[stream]
        if line.holders:
            line.holders.popleft()()
        else:
            line.busy = False
            self._tidy(stream, line)
