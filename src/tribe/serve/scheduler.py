"""Decide which requests run next: stepped together, only predicted, or refused. No threads, and no clock of its own.

The requests of a stream form a queue. The first of each queue may be stepped, so a stream is stepped at most once at a
time and in the order of arrival. Requests of different streams are stepped together.

A request whose deadline does not allow for a step is predicted at once and stays in its queue: its images are learned
later, before those of later requests. Answered requests in queues are the backlog, which is bounded: the oldest are
dropped. If even a prediction would be late, the request is refused.

Under load the server learns less before it refuses: while half of the requests that may wait await a step, further ones
of users who send most are only predicted, by the last states. Their images are counted in `Scheduler.only_predicted`.

Users share the model: they take turns, in predictions and in steps, and where something is full, the one who has most
of it gives way. So a user who asks for less than an equal share gets it, whatever the others send.

The caller passes the time to every method, so a test can drive a scheduler moment by moment.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from itertools import count
from typing import Any, NamedTuple

from tribe.serve.config import Policy
from tribe.serve.errors import Unavailable
from tribe.serve.fairness import Tally, Turns
from tribe.serve.jobs import WAITING, BatchTimes, Job, JobState, StreamQueue

RECENT = 10.0  # seconds: users whose last request is not older share the model


class RunningBatch(NamedTuple):
    """A batch that was launched."""

    jobs: list[Job]
    images: int  # of all of them
    since: float
    until: float  # when it should be done


Refused = dict[Job, Unavailable]  # requests that get no answer, and why


class Scheduler:
    """Queues of requests, the batches that run, and the choice of the next ones.

    ``blocked`` returns why a stream must not learn now; None: it may.
    """

    def __init__(
        self, policy: Policy, times: BatchTimes, blocked: Callable[[str], str | None] = lambda stream: None
    ) -> None:
        self.policy, self.times, self.blocked = policy, times, blocked
        self.queues: dict[Any, StreamQueue] = {}  # by the name of the stream
        self.predictions: deque[Job] = deque()  # to be predicted, in order of arrival
        self._predicted = Tally()  # images of these requests
        self.backlog: dict[Job, None] = {}  # the oldest first
        self._backlog_of = Tally()  # its requests
        self.backlog_bytes = 0
        self.dropped = dict.fromkeys(("full", "owner", "lease", "lag", "refused", "closed"), 0)  # by reason
        self.waiting = 0  # requests without an answer
        self.waiting_of = Tally()
        self.stepping: RunningBatch | None = None
        self.predicting: RunningBatch | None = None
        self._relief = dict[Hashable, float]()  # until then requests of a user with a deadline are only predicted
        self._seen = dict[Hashable, float]()  # when a user's last request came
        self._streams_of = Tally()  # queues, by the user who sent the first request
        self._prediction_turns = Turns[Job](lambda job: job.user, lambda job: job.images.numel())
        self._step_turns = Turns[Job](lambda job: job.user, lambda job: job.images.numel() / job.share)
        self._awaiting = 0  # requests that await a step, in all queues
        self.only_predicted = 0  # images that were only predicted, because of load
        self._moments: list[tuple[float, int, Job]] = []  # a heap: when a waiting request must be looked at again
        self._order = count()

    def offer(self, job: Job, now: float) -> Refused:
        """Accept a request, to be stepped, predicted or both, or refuse it: `Unavailable`.

        Return a request of another user that is refused in its place.
        """
        user = job.user
        self._seen[user] = now
        if job.deadline <= now:
            raise Unavailable("the deadline has passed already", self._drain_time(user, now))
        displaced = self._displaced_by(job, now) if self.waiting >= self.policy.waiting else None
        learns = job.stream is not None and job.learn
        if loaded := learns and self._is_loaded_by(user):
            learns = False
        predicts = not learns
        if learns and job.deadline < math.inf:
            queue, others = self.queues.get(job.stream), self._streams_of.before(user, 1)
            free = now if self.stepping is None else max(now, self.stepping.until)
            rounds = 1 + max(0 if queue is None else len(queue.jobs), others // self.policy.streams)
            done = free + rounds * self.times.expect("step", job.size * min(1 + others, self.policy.streams))
            predicts = self._is_relieved(user, now) or done > job.deadline
        # An idle model tries a prediction anyway: else an estimate from one slow moment would never be corrected.
        busy = self.predicting is not None or self.predictions
        if predicts and busy and (done := self._predicted_by(user, job.size, now)) > job.deadline:
            self._relief[user] = now + self.policy.relief
            words = f"the answer would take {done - now:.3f} s, and {job.deadline - now:.3f} s are left"
            raise Unavailable(words, self._drain_time(user, now))
        refused = {} if displaced is None else {displaced: self._refuse(displaced, now, self._full)}
        if loaded:
            job.learn, self.only_predicted = False, self.only_predicted + job.size
        if learns:
            idle = self.stepping is None and not self._awaiting and not self.backlog
            job.launch_by = now if idle else now + self.policy.max_batch_delay
            self._queue(job.stream, user).jobs.append(job)
        if predicts:
            self._queue_prediction(job, queued=learns)
        else:
            self._move(job, JobState.STEP, queued=True)
        if job.deadline < math.inf:
            self._look_again(job, job.deadline)
            if not predicts:
                slack = 2 * self.times.expect("predict", job.size) + self.policy.max_batch_delay
                self._look_again(job, job.deadline - slack)
        return refused

    def _is_loaded_by(self, user: Hashable) -> bool:
        """Return whether the queue for steps is long, and a user has at least an equal share of all that wait."""
        long = self._awaiting >= max(self.policy.waiting // 2, 1)
        return long and self.waiting_of.get(user, 0) * len(self.waiting_of) >= self.waiting

    @property
    def _full(self) -> str:
        return f"{self.waiting} requests wait, and the policy allows {self.policy.waiting}"

    def _displaced_by(self, job: Job, now: float) -> Job:
        """Return which request gives its place to another one: the newest of the user with most of them.

        If no other user has more, the other one is refused.
        """
        places = [each for queue in self.queues.values() for each in queue.jobs if each.awaits_step]
        places += [each for each in self.predictions if each.state is JobState.PREDICTION]
        least = self.waiting_of.get(job.user, 0) + 1
        heavier = [each for each in places if self.waiting_of[each.user] > least]
        if not heavier:
            self._relief[job.user] = now + self.policy.relief
            raise Unavailable(self._full, self._drain_time(job.user, now))
        return max(heavier, key=lambda each: (self.waiting_of[each.user], each.arrived))

    def _queue(self, stream: Any, user: Hashable) -> StreamQueue:
        if stream not in self.queues:
            self.queues[stream] = StreamQueue(user=user)
            self._streams_of.add(user, 1)
        return self.queues[stream]

    def _is_relieved(self, user: Hashable, now: float) -> bool:
        return now < self._relief.get(user, -math.inf)

    def _longest_batch(self, now: float) -> float:
        """Return how long a batch may take: while several users send requests, each waits for those of others."""
        return self.policy.turn if sum(now - seen <= RECENT for seen in self._seen.values()) > 1 else math.inf

    def _predicted_by(self, user: Hashable, images: int, now: float) -> float:
        """Return when a prediction of this many images would be done, if it joined the user's line now."""
        free = now if self.predicting is None else max(now, self.predicting.until)
        return free + self._predictions_take(images + self._predicted.before(user, images))

    def _predictions_take(self, images: int) -> float:
        most, expect = self.policy.images, self.times.expect
        return images // most * expect("predict", most) + (expect("predict", images % most) if images % most else 0)

    def _drain_time(self, user: Hashable, now: float) -> float:
        """Return in how many seconds a user's requests that wait now are done."""
        free = 0.0 if self.stepping is None else max(0.0, self.stepping.until - now)
        return max(free, self._predicted_by(user, 1, now) - now)

    def _move(self, job: Job, state: JobState, queued: bool) -> None:
        """Change the state of a job, and the counts and the backlog that follow from it."""
        if change := (state in WAITING) - (job.state in WAITING):
            self.waiting += change
            self.waiting_of.add(job.user, change)
        awaited = job.awaits_step
        job.state, job.queued = state, queued
        if change := job.awaits_step - awaited:
            self._awaiting += change
            self.queues[job.stream].awaiting += change
        in_backlog = queued and state is not JobState.STEP  # only to be learned: its answer does not come from a step
        if in_backlog and job not in self.backlog:
            self.backlog[job] = None
            self._backlog_of.add(job.user, 1)
            self.backlog_bytes += job.images.nbytes
            self._trim_backlog(job)
        elif not in_backlog and job in self.backlog:
            del self.backlog[job]
            self._backlog_of.add(job.user, -1)
            self.backlog_bytes -= job.images.nbytes

    def _trim_backlog(self, newest: Job) -> None:
        """Drop what is beyond the limits of the policy: of the user with the largest backlog, and of the newest
        request's queue, the oldest first.
        """
        while (many := len(self.backlog) > self.policy.backlog) or self.backlog_bytes > self.policy.backlog_bytes:
            held = self._backlog_of if many else _tally(self.backlog, lambda job: job.images.nbytes)
            largest = max(held, key=held.__getitem__)
            self._drop(next(job for job in self.backlog if job.user == largest), "full")
        if not newest.queued:
            return
        jobs = self.queues[newest.stream].jobs
        together = min(len(self.queues), self.policy.streams)  # a round of steps learns one request of each stream
        takes = self.times.expect("step", newest.size * together)
        while len(jobs) > 1 and len(jobs) * takes > self.policy.backlog_seconds and jobs[0] in self.backlog:
            self._drop(jobs[0], "full")

    def _queue_prediction(self, job: Job, queued: bool = True) -> None:
        """Answer a request by a prediction; ``queued``: it stays in its stream's queue, to be learned later."""
        self.predictions.append(job)
        self._predicted.add(job.user, job.size)
        self._move(job, JobState.PREDICTION, queued)

    def _drop(self, job: Job, reason: str) -> None:
        """Remove a request from its queue: it will not be learned."""
        if not job.queued:
            return
        self._move(job, job.state, queued=False)
        self.dropped[reason] += 1
        self.queues[job.stream].jobs.remove(job)
        self._remove_if_empty(job.stream)

    def unlearned(self, stream: str) -> list[Job]:
        """Return the requests of a stream that are in its queue or are being stepped."""
        queued = self.queues[stream].jobs if stream in self.queues else ()
        stepping = () if self.stepping is None else self.stepping.jobs
        return [*queued, *(job for job in stepping if job.stream == stream)]

    def _remove_if_empty(self, stream: str | None) -> None:
        queue = self.queues[stream]
        if not (queue.jobs or queue.busy or queue.holders):
            del self.queues[stream]
            self._streams_of.add(queue.user, -1)

    def withdraw(self, stream: str, reason: str) -> list[Job]:
        """Drop a stream's queue, and return the requests that awaited a step, to be offered again."""
        jobs = list(self.queues[stream].jobs) if stream in self.queues else []
        awaiting = [job for job in jobs if job.awaits_step]
        for job in jobs:
            self._drop(job, reason)
        for job in awaiting:
            self._move(job, JobState.NEW, queued=False)
        return awaiting

    def take_back(self, job: Job, reason: str) -> None:
        """Forget a request that waits, so that it can be offered again."""
        self._drop(job, reason)
        self._move(job, JobState.NEW, queued=False)

    def abandon(self) -> list[Job]:
        """Drop all queues, and return the requests that wait and are not in a batch that runs."""
        abandoned = [job for stream in list(self.queues) for job in self.withdraw(stream, "closed")]
        predictions = [job for job in self.predictions if job.state is not JobState.DONE]
        for job in predictions:
            self.take_back(job, "closed")
        self.predictions.clear()
        self._predicted.clear()
        return abandoned + predictions

    def next_step(self, now: float) -> list[Job]:
        """Return the requests to step together now; empty: none, or not yet."""
        if self.stepping is not None or (not self._awaiting and not self._has_time_to_learn(now)):
            return []
        chosen, size, tightest, shape = list[Job](), 0, math.inf, None
        longest = self._longest_batch(now)
        for job in self._heads(now):
            kind = (job.images.shape[1:], job.images.dtype)
            if shape not in (None, kind):
                continue
            until = min(tightest, job.deadline if job.awaits_step else math.inf)
            full = len(chosen) >= self.policy.streams or size + job.size > self.policy.images
            takes = self.times.expect("step", size + job.size)
            if chosen and (full or takes > longest or now + takes > until):
                continue
            chosen.append(job)
            size, tightest, shape = size + job.size, until, kind
        awaited = [job.launch_by for job in chosen if self.queues[job.stream].awaiting]
        full = len(chosen) >= self.policy.streams or size >= self.policy.images
        if not chosen:
            return []
        if awaited and not full and min(awaited) > now:
            return []  # it waits for more requests
        for job in chosen:
            queue = self.queues[job.stream]
            self._move(job, job.state, queued=False)
            queue.jobs.popleft()
            queue.busy, job.launched = True, now
        self._step_turns.charge(chosen, {queue.jobs[0].user for queue in self.queues.values() if queue.jobs})
        self.stepping = RunningBatch(chosen, size, now, now + self.times.expect("step", size))
        return chosen

    def _heads(self, now: float) -> list[Job]:
        """Return the first request of every free queue: users take turns, with those that await a step first, then
        the oldest.
        """
        free = [(stream, queue) for stream, queue in self.queues.items() if queue.jobs and not queue.busy]
        for stream, _ in free:
            if (reason := self.blocked(stream)) is not None:
                for job in self.withdraw(stream, reason):
                    self._queue_prediction(job, queued=False)
        for _, queue in free:
            for job in list(queue.jobs) if queue.awaiting else ():
                if not job.awaits_step or job.deadline == math.inf:
                    continue
                if self._is_relieved(job.user, now) or now + self.times.expect("step", job.size) > job.deadline:
                    self._queue_prediction(job)
        left = [queue for _, queue in free if queue.jobs]  # limits of the backlog may have emptied some
        heads = sorted(
            ((not queue.awaiting, queue.jobs[0].arrived, queue.jobs[0]) for queue in left), key=lambda h: h[:2]
        )
        learning = {job.user for late, _, job in heads if not late}  # a step of theirs also takes their backlog
        learning |= {user for user in self._backlog_of if self._may_learn(user, now)}
        return self._step_turns.order(job for _, _, job in heads if job.user in learning)

    def _may_learn(self, user: Hashable, now: float) -> bool:
        """Return whether a user's backlog may be stepped alone: not under overload, nor while predictions wait."""
        return not self._is_relieved(user, now) and user not in self._predicted

    def _has_time_to_learn(self, now: float) -> bool:
        return any(self._may_learn(user, now) for user in self._backlog_of)

    def step_done(self, now: float) -> None:
        """End a step, whether it failed or not: its streams are free again."""
        assert self.stepping is not None
        running, self.stepping = self.stepping, None
        self.times.observe("step", running.images, now - running.since)
        for job in running.jobs:
            self.release(job.stream)

    def next_prediction(self, now: float) -> tuple[list[Job], Refused]:
        """Return the requests to predict together now, which may be none, and those that would be late."""
        if self.predicting is not None or not self.predictions:
            return [], {}
        candidates, later, late = list[Job](), list[Job](), list[Job]()
        names, size, longest = set[str | None](), 0, self._longest_batch(now)
        for job in self._prediction_turns.order(j for j in self.predictions if j.state is not JobState.DONE):
            full = len(candidates) >= self.policy.streams or (
                candidates
                and (size + job.size > self.policy.images or self.times.expect("predict", size + job.size) > longest)
            )
            if now + self.times.expect("predict", job.size) > job.deadline:
                late.append(job)
            elif full or (job.stream is not None and job.stream in names):
                later.append(job)
            else:
                candidates.append(job)
                size += job.size
                names.add(job.stream)
        chosen, given_up = self._choose(candidates, later, now)
        late += given_up
        if not chosen and late:  # nothing else to do: try one, so that a pessimistic estimate is corrected
            chosen = [late.pop(0)]
        taken = {*chosen, *late}
        self.predictions = deque(j for j in self.predictions if j.state is not JobState.DONE and j not in taken)
        self._predicted = _tally(self.predictions, lambda job: job.size)
        refused = {job: self._refuse(job, now) for job in late}
        for job in chosen:
            job.launched = now
        if chosen:
            size = _images(chosen)
            self._prediction_turns.charge(chosen, self._predicted)
            self.predicting = RunningBatch(chosen, size, now, now + self.times.expect("predict", size))
        return chosen, refused

    def _choose(self, candidates: list[Job], later: list[Job], now: float) -> tuple[list[Job], list[Job]]:
        """Return the requests of the next prediction, in order, and those to give up.

        A batch grows as long as all its requests are in time. If the rest would then be late, and a larger batch
        answers more requests a second, the larger one is taken, without those that it would make late. These are
        requests of users who have most images in it: others need not give way.
        """
        small, size, tightest = list[Job](), 0, math.inf
        for job in candidates:
            until = min(tightest, job.deadline)
            if not small or now + self.times.expect("predict", size + job.size) <= until:
                small.append(job)
                size, tightest = size + job.size, until
        if len(small) == len(candidates):
            return small, []
        rest = [*(job for job in candidates if job not in small), *later]
        takes_small, takes_all = (self.times.expect("predict", _images(jobs)) for jobs in (small, candidates))
        if now + takes_small + self._predictions_take(_images(rest)) <= min(job.deadline for job in rest):
            return small, []
        large = [job for job in candidates if job.deadline >= now + takes_all]
        if len(large) * takes_small <= len(small) * self.times.expect("predict", _images(large)):
            return small, []
        given_up, held = [job for job in candidates if job not in large], _tally(candidates, lambda job: job.size)
        if any(held[job.user] < max(held.values()) for job in given_up):
            return small, []
        return large, given_up

    def prediction_done(self, now: float) -> None:
        """End a prediction, whether it failed or not."""
        assert self.predicting is not None
        running, self.predicting = self.predicting, None
        self.times.observe("predict", running.images, now - running.since)

    def answer(self, job: Job) -> bool:
        """Note that a request has its answer; return False if it had one already."""
        if job.state is JobState.DONE:
            return False
        self._move(job, JobState.DONE, job.queued)
        return True

    def _refuse(self, job: Job, now: float, words: str | None = None) -> Unavailable:
        """End a request without an answer; its images are not learned, so that a retry may be."""
        self._drop(job, "refused")
        self._move(job, JobState.DONE, queued=False)
        self._relief[job.user] = now + self.policy.relief
        return Unavailable(
            words or f"no answer within {job.deadline - job.arrived:.3f} s", self._drain_time(job.user, now)
        )

    def _look_again(self, job: Job, moment: float) -> None:
        if len(self._moments) > 64 + 4 * self.waiting:  # answered long before their deadline: release the images
            self._moments = [each for each in self._moments if each[2].state is not JobState.DONE]
            heapq.heapify(self._moments)
        heapq.heappush(self._moments, (moment, next(self._order), job))

    def refuse_late(self, now: float) -> Refused:
        """Refuse requests whose deadline has passed, and predict those for which it is time. Call it at `wake`."""
        refused = {}
        while self._moments and self._moments[0][0] <= now:
            _, _, job = heapq.heappop(self._moments)
            if job.state is JobState.DONE:
                continue
            if job.deadline <= now:
                refused[job] = self._refuse(job, now)
            elif job.awaits_step:
                self._queue_prediction(job)
        return refused

    def wake(self, now: float) -> float:
        """Return when something must be looked at again if nothing happens before; infinity: never."""
        while self._moments and self._moments[0][2].state is JobState.DONE:
            heapq.heappop(self._moments)
        moment = self._moments[0][0] if self._moments else math.inf
        if self.stepping is None:
            if self._awaiting:
                free = (queue for queue in self.queues.values() if queue.awaiting and not queue.busy)
                moment = min((moment, *(queue.jobs[0].launch_by for queue in free)))
            ends = (self._relief.get(user, now) for user in self._backlog_of)
            moment = min((moment, *(end for end in ends if end > now)))
        return moment

    def hold(self, stream: str, granted: Callable[[], None]) -> None:
        """Keep a stream from being stepped, from the moment ``granted`` is called until `release`."""
        queue = self._queue(stream, None)
        if queue.busy:
            queue.holders.append(granted)
        else:
            queue.busy = True
            granted()

    def release(self, stream: str | None) -> None:
        """End a step or a hold of a stream; the next holder gets it, or its requests go on."""
        queue = self.queues[stream]
        if queue.holders:
            queue.holders.popleft()()
        else:
            queue.busy = False
            self._remove_if_empty(stream)


def _images(jobs: Iterable[Job]) -> int:
    """Return how many images the requests have."""
    return sum(job.size for job in jobs)


def _tally(jobs: Iterable[Job], amount: Callable[[Job], int]) -> Tally:
    """Return the amounts of each user's requests."""
    tally = Tally()
    for job in jobs:
        tally.add(job.user, amount(job))
    return tally
