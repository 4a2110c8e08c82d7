"""The scheduler, moment by moment: who is stepped, predicted, refused, in which order, and that no answer is late."""

import heapq
import math
import random
from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tribe.serve.config import Policy
from tribe.serve.errors import Unavailable
from tribe.serve.jobs import WAITING, BatchTimes, Job, JobState
from tribe.serve.scheduler import Scheduler

ZEROS = torch.zeros(32, 1, 2, 2)


def job(stream, arrived=0.0, deadline=math.inf, size=1, **more):
    return Job(stream, ZEROS[:size], arrived, deadline, **more)


def scheduler(step=None, predict=None, blocked=lambda stream: None, **policy):
    times = BatchTimes()
    for kind, seconds in (("step", step), ("predict", predict)):
        if seconds is not None:
            for _ in range(100):  # until the deviation is gone
                times.observe(kind, 1, seconds)
                times.observe(kind, 64, seconds)
    return Scheduler(Policy(**policy), times, blocked)


def offer(sched, *jobs, now=0.0):
    for each in jobs:
        sched.offer(each, now)
    return jobs


# -- batches ----------------------------------------------------------------------------------------------------------


def test_an_idle_model_steps_at_once_and_those_who_come_meanwhile_are_stepped_together():
    sched = scheduler()
    a, b, c = job("a"), job("b", 0.001), job("c", 0.001)
    offer(sched, a)
    assert sched.next_step(0.0) == [a]
    offer(sched, b, c, now=0.001)
    assert sched.next_step(0.001) == []  # the model is busy
    sched.step_done(0.010)
    assert sched.next_step(0.010) == [b, c]


def test_a_request_that_came_while_the_model_was_busy_waits_two_milliseconds_for_company():
    sched = scheduler(max_batch_delay=0.002)
    a, b, c = job("a"), job("b", 0.010), job("c", 0.0115)
    offer(sched, a)
    sched.next_step(0.0)
    offer(sched, b, now=0.010)
    sched.step_done(0.0105)
    assert sched.next_step(0.0105) == []
    assert sched.wake(0.0105) == pytest.approx(0.012)
    offer(sched, c, now=0.0115)
    assert sched.next_step(0.0115) == []
    assert sched.next_step(0.012) == [b, c]


def test_a_full_batch_does_not_wait():
    sched = scheduler(max_batch_delay=10.0, streams=2)
    a, b, c = job("a"), job("b"), job("c")
    offer(sched, a)
    sched.next_step(0.0)
    offer(sched, b, c, now=0.001)
    sched.step_done(0.002)
    assert sched.next_step(0.002) == [b, c]


def test_requests_without_a_stream_are_predicted_together():
    sched = scheduler()
    jobs = offer(sched, *(job(None) for _ in range(5)))
    assert sched.next_prediction(0.0) == (list(jobs), {})
    assert sched.next_step(0.0) == []


# -- deadlines --------------------------------------------------------------------------------------------------------


def test_a_request_that_has_time_is_stepped():
    sched = scheduler(step=0.1, predict=0.01)
    (a,) = offer(sched, job("a", deadline=0.2))
    assert sched.next_prediction(0.0) == ([], {})
    assert sched.next_step(0.0) == [a]


def test_a_request_without_time_for_a_step_is_predicted_at_once_and_learned_later():
    sched = scheduler(step=0.1, predict=0.01)
    (a,) = offer(sched, job("a", deadline=0.05))
    assert sched.next_prediction(0.0) == ([a], {})
    assert list(sched.backlog) == [a]
    sched.prediction_done(0.01)
    sched.answer(a)
    assert sched.next_step(0.01) == [a]
    assert not sched.backlog


def test_a_request_that_would_wait_too_long_for_its_step_is_predicted_at_once():
    sched = scheduler(step=0.1, predict=0.01)
    offer(sched, job("a"))
    sched.next_step(0.0)
    (b,) = offer(sched, job("b", 0.02, deadline=0.15), now=0.02)  # the step ends at 0.1, the next one at 0.2
    assert sched.next_prediction(0.02) == ([b], {})


def test_a_later_request_is_not_stepped_before_what_its_stream_has_still_to_learn():
    sched = scheduler(step=0.1, predict=0.01)
    (early,) = offer(sched, job("a", deadline=0.05))
    sched.next_prediction(0.0)
    (late,) = offer(sched, job("a"))
    assert sched.next_step(0.0) == [early]
    sched.step_done(0.1)
    assert sched.next_step(0.1) == [late]


def test_a_request_is_not_joined_by_others_that_would_make_it_late():
    times = BatchTimes()
    for _ in range(100):
        for size in (1, 2, 4, 8):
            times.observe("step", size, 0.1 * size)
    sched = Scheduler(Policy(), times)
    a, b, c = offer(sched, job("a", deadline=0.25), job("b"), job("c"))
    assert sched.next_step(0.0) == [a, b]
    sched.step_done(0.2)
    assert sched.next_step(0.2) == [c]


def test_a_prediction_that_would_be_late_is_refused_and_says_when_to_come_back():
    sched = scheduler(step=1.0, predict=0.1)
    offer(sched, job(None, deadline=1.0))
    sched.next_prediction(0.0)
    with pytest.raises(Unavailable, match="left") as error:
        sched.offer(job(None, deadline=0.15), 0.0)
    assert error.value.retry_after == pytest.approx(0.2)


def test_a_deadline_that_has_passed_is_refused_at_once():
    with pytest.raises(Unavailable, match="passed"):
        scheduler().offer(job("a", 1.0, deadline=1.0), 1.0)


def test_too_many_waiting_requests_are_refused():
    sched = scheduler(waiting=2)
    offer(sched, job("a"), job("a"))
    with pytest.raises(Unavailable, match="wait"):
        sched.offer(job("a"), 0.0)


def test_under_load_it_learns_less_before_it_refuses():
    sched = scheduler(waiting=8)
    offer(sched, *(job(name) for name in "abcdefg"))
    assert sched.only_predicted == 3  # four wait for a step, which is half of what may wait
    chosen, refused = sched.next_prediction(0.0)
    assert ([each.stream for each in chosen], refused) == (["e", "f", "g"], {})
    for each in chosen:
        sched.answer(each)
    sched.prediction_done(0.1)
    stepped = sched.next_step(0.1)
    assert [each.stream for each in stepped] == ["a", "b", "c", "d"]
    offer(sched, job("e", 0.1), now=0.1)  # the queue is short again
    assert sched.only_predicted == 3
    assert sched.unlearned("e")


def test_under_load_a_user_who_sends_little_goes_on_learning():
    sched = scheduler(waiting=8)
    offer(sched, *(job(f"a{i}", user="a") for i in range(4)))
    (light,) = offer(sched, job("b", user="b"))
    (heavy,) = offer(sched, job("a5", user="a", size=3))
    assert light.awaits_step
    assert not heavy.awaits_step
    assert sched.only_predicted == 3


def test_after_a_refusal_requests_with_a_deadline_are_only_predicted_for_a_while():
    sched = scheduler(step=0.1, predict=0.1, relief=0.5)
    offer(sched, job(None, deadline=1.0))
    sched.next_prediction(0.0)
    with pytest.raises(Unavailable):
        sched.offer(job(None, deadline=0.15), 0.0)
    sched.prediction_done(0.1)
    (a,) = offer(sched, job("a", 0.1, deadline=5.0), now=0.1)
    assert sched.next_step(0.1) == []
    assert sched.next_prediction(0.1) == ([a], {})
    sched.answer(a)
    sched.prediction_done(0.2)
    assert sched.next_step(0.2) == []
    assert sched.wake(0.2) == pytest.approx(0.5)
    assert sched.next_step(0.5) == [a]


def test_a_request_whose_batch_takes_too_long_is_refused_at_its_deadline():
    sched = scheduler()
    (a,) = offer(sched, job("a", deadline=0.5))
    sched.next_step(0.0)
    assert sched.wake(0.0) <= 0.5
    assert list(sched.refuse_late(0.5)) == [a]
    assert sched.waiting == 0
    assert not sched.answer(a)


def test_a_pessimistic_estimate_is_corrected():
    sched = scheduler(step=5.0, predict=5.0)
    for moment in range(40):
        (a,) = offer(sched, job("a", moment, deadline=moment + 1.0), now=moment)
        if sched.next_prediction(moment)[0]:
            sched.prediction_done(moment + 0.01)
            sched.answer(a)
        if sched.next_step(moment + 0.01):
            sched.step_done(moment + 0.02)
            sched.answer(a)
    assert sched.times.expect("predict", 1) < 1.0
    (a,) = offer(sched, job("b", 100, deadline=101), now=100)
    assert sched.next_step(100) == [a]


def test_the_first_batch_of_a_size_is_not_typical():
    times = BatchTimes()
    for seconds in (3.0, 0.01, 0.01):  # the first one allocates, or captures a graph
        times.observe("step", 1, seconds)
    assert times.expect("step", 1) < 0.03


# -- the learning queue -----------------------------------------------------------------------------------------------


def test_the_learning_queue_is_bounded_and_drops_the_oldest():
    sched = scheduler(step=1.0, predict=0.0, backlog=2)
    a, b, c = offer(sched, *(job(name, deadline=0.5) for name in "abc"))
    assert list(sched.backlog) == [b, c]
    assert sched.dropped["full"] == 1
    assert sched.next_prediction(0.0)[0] == [a, b, c]  # all are answered
    assert sched.next_step(0.0) == [b, c]


def test_the_learning_queue_of_a_stream_holds_what_can_be_learned_in_a_second():
    sched = scheduler(step=0.3, predict=0.0, backlog_seconds=1.0)
    jobs = offer(sched, *(job("a", deadline=0.1) for _ in range(10)))
    assert list(sched.backlog) == list(jobs[-3:])
    assert sched.dropped["full"] == 7


def test_the_learning_queue_waits_while_predictions_queue_up():
    sched = scheduler(step=1.0, predict=0.1)
    (a,) = offer(sched, job("a", deadline=0.5))
    sched.next_prediction(0.0)
    offer(sched, job(None, 0.01, deadline=0.5), now=0.01)
    assert sched.next_step(0.01) == []
    sched.prediction_done(0.1)
    sched.next_prediction(0.1)
    assert sched.next_step(0.1) == [a]


def test_what_was_refused_is_not_learned_so_that_a_retry_may_be():
    sched = scheduler(step=1.0, predict=0.1)
    offer(sched, job(None, deadline=10.0))
    sched.next_prediction(0.0)
    (a,) = offer(sched, job("a", deadline=0.5, request_id="7"))
    assert sched.unlearned("a") == [a]
    assert list(sched.refuse_late(0.5)) == [a]
    assert sched.unlearned("a") == []
    assert sched.next_step(0.5) == []
    assert not sched.queues


def test_a_stream_that_must_not_learn_is_predicted_and_learns_nothing():
    blocked = {}
    sched = scheduler(blocked=blocked.get)
    a, b = offer(sched, job("a"), job("b"))
    blocked["a"] = "lease"
    assert sched.next_step(0.002) == [b]
    assert sched.next_prediction(0.002)[0] == [a]
    assert sched.dropped["lease"] == 1


# -- holding ----------------------------------------------------------------------------------------------------------


def test_a_held_stream_is_not_stepped_and_a_holder_comes_before_the_next_request():
    sched, log = scheduler(), []
    _, again, _ = offer(sched, job("a"), job("a"), job("b"))
    sched.next_step(0.0)
    sched.hold("a", lambda: log.append("first"))
    sched.hold("a", lambda: log.append("second"))
    assert log == []
    sched.step_done(0.1)
    assert log == ["first"]
    assert sched.next_step(0.1) == []
    sched.release("a")
    assert log == ["first", "second"]
    assert sched.next_step(0.1) == []
    sched.release("a")
    assert sched.next_step(0.1) == [again]
    sched.step_done(0.2)
    assert not sched.queues


def test_answered_requests_with_a_far_deadline_are_not_kept():
    sched = scheduler()
    for moment in range(1000):
        (each,) = offer(sched, job("a", moment, deadline=moment + 1e6), now=moment)
        sched.next_step(moment)
        sched.answer(each)
        sched.step_done(moment + 0.5)
    assert len(sched._moments) <= 70
    assert sched.waiting == 0


def test_what_is_abandoned_comes_back_once_and_nothing_is_left():
    sched = scheduler(step=1.0, predict=0.1)
    running, waiting = offer(sched, job("a"), job("a"))
    sched.next_step(0.0)
    predicted, source = offer(sched, job("b", deadline=0.5), job(None))
    assert set(sched.abandon()) == {waiting, predicted, source}
    assert sched.waiting == 1  # the one that runs
    sched.step_done(1.0)
    sched.answer(running)
    assert (sched.waiting, sched.queues, sched.backlog) == (0, {}, {})


# -- any history ------------------------------------------------------------------------------------------------------

STREAMS, USERS = st.sampled_from((None, "a", "b", "c")), st.sampled_from(("x", "x", "x", "y", "z"))
SIZES, SHAPES = st.integers(1, 5), st.sampled_from(((1, 2, 2), (1, 3, 3)))
IDS = st.none() | st.sampled_from("123")


class SchedulerMachine(RuleBasedStateMachine):
    """Draw what clients, batches, holders and clocks do, and check what must always hold."""

    def __init__(self):
        super().__init__()
        self.now, self.jobs, self.held, self.blocked = 0.0, [], [], set()
        limits = {"streams": 2, "images": 6, "waiting": 6, "backlog": 3, "backlog_bytes": 200, "relief": 0.05}
        self.sched = scheduler(0.02, 0.005, lambda stream: "lease" if stream in self.blocked else None, **limits)
        self.stepped, self.ended = defaultdict(list), set()

    def end(self, refused):
        for each, error in refused.items():
            assert isinstance(error, Unavailable)
            self.finish(each)

    def finish(self, each):
        assert each not in self.ended, "two answers"
        self.ended.add(each)

    @rule(
        stream=STREAMS,
        size=SIZES,
        shape=SHAPES,
        learn=st.booleans(),
        wait=st.none() | st.floats(0.0, 0.1),
        id=IDS,
        user=USERS,
    )
    def request(self, stream, size, shape, learn, wait, id, user):
        deadline = math.inf if wait is None else self.now + wait
        each = Job(
            stream, torch.zeros(size, *shape), self.now, deadline, learn, id, user, {"x": 1, "y": 2, "z": 4}[user]
        )
        try:
            self.end(self.sched.offer(each, self.now))
        except Unavailable:
            assert each.state is JobState.NEW
            assert not each.queued
        else:
            self.jobs.append(each)

    @rule(choice=st.randoms())
    def client_goes_away(self, choice):
        waiting = [each for each in self.jobs if each.state in WAITING]
        if waiting and self.sched.answer(each := choice.choice(waiting)):
            self.finish(each)

    @rule()
    def pump(self):
        self.end(self.sched.refuse_late(self.now))
        predicted, late = self.sched.next_prediction(self.now)
        self.end(late)
        names = [each.stream for each in predicted if each.stream is not None]
        assert len(set(names)) == len(names), "one request of a stream in a prediction"
        stepped = self.sched.next_step(self.now)
        assert not {each.stream for each in stepped} & (self.blocked | set(self.held))
        assert len({each.images.shape[1:] for each in stepped}) <= 1
        for batch in (predicted, stepped):
            assert len(batch) <= 2
            assert len(batch) <= 1 or sum(each.size for each in batch) <= 6
        for each in stepped:
            self.stepped[each.stream].append(each.arrived)
            assert self.stepped[each.stream] == sorted(self.stepped[each.stream]), "in the order of arrival"

    @rule(kind=st.sampled_from(("step", "predict")), seconds=st.floats(0.0, 0.03))
    def batch_ends(self, kind, seconds):
        self.now += seconds
        running = self.sched.stepping if kind == "step" else self.sched.predicting
        for each in running.jobs if running else ():
            if self.sched.answer(each):
                self.finish(each)
        if running:
            (self.sched.step_done if kind == "step" else self.sched.prediction_done)(self.now)

    @rule(seconds=st.floats(0.0, 0.1))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(stream=st.sampled_from("abc"))
    def block_or_unblock(self, stream):
        self.blocked ^= {stream}

    @rule(stream=st.sampled_from("abc"))
    def hold(self, stream):
        self.sched.hold(stream, lambda: self.held.append(stream))

    @precondition(lambda self: self.held)
    @rule()
    def let_go(self):
        self.sched.release(self.held.pop(0))

    @rule(stream=st.sampled_from("abc"))
    def stream_is_lost(self, stream):
        for each in self.sched.withdraw(stream, "lease"):
            assert each.state is JobState.NEW
            self.jobs.remove(each)
        assert not any(each.queued for each in self.jobs if each.stream == stream)

    @invariant()
    def counts_agree_with_the_states_of_the_requests(self):
        sched, queued = self.sched, [each for each in self.jobs if each.queued]
        assert sched.waiting == sum(each.state in WAITING for each in self.jobs) <= 6
        assert {each for each in self.jobs if each.state is JobState.DONE} == self.ended & set(self.jobs)
        assert set(sched.backlog) == {each for each in queued if each.state is not JobState.STEP}
        assert sched.backlog_bytes == sum(each.images.nbytes for each in sched.backlog) <= 200
        assert len(sched.backlog) <= 3
        assert sched._awaiting == sum(each.awaits_step for each in queued)
        assert sched.waiting_of == Counter(each.user for each in self.jobs if each.state in WAITING)
        assert sched._backlog_of == Counter(each.user for each in sched.backlog)
        assert sched._streams_of == Counter(queue.user for queue in sched.queues.values())
        assert sum(sched._predicted.values()) == sum(each.size for each in sched.predictions)
        assert {each for queue in sched.queues.values() for each in queue.jobs} == set(queued)
        assert all(queue.jobs or queue.busy or queue.holders for queue in sched.queues.values())
        stepping = sched.stepping.jobs if sched.stepping else []
        of_streams = [each for each in (*queued, *stepping) if each.stream is not None]
        assert all(each in sched.unlearned(each.stream) for each in of_streams)

    @invariant()
    def what_waits_has_a_reason(self):
        """A request without an answer is in a queue, to be predicted, or in a batch that runs."""
        running = [batch.jobs for batch in (self.sched.stepping, self.sched.predicting) if batch]
        places = {*self.sched.predictions, *(each for batch in running for each in batch)}
        assert all(each.queued or each in places for each in self.jobs if each.state in WAITING)

    def teardown(self):
        """At the end everything can be answered, and nothing is left."""
        self.blocked.clear()
        while self.held:
            self.sched.release(self.held.pop(0))
        for _ in range(200):
            self.pump()
            self.batch_ends("step", 0.01)
            self.batch_ends("predict", 0.01)
            while self.held:
                self.sched.release(self.held.pop(0))
            self.now += 0.02
        assert self.sched.waiting == 0
        assert (self.sched.queues, self.sched.backlog) == ({}, {})


def test_any_history():
    """Hypothesis draws the same histories every time."""
    options = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
    chosen = settings(max_examples=60, stateful_step_count=40, phases=(Phase.generate, Phase.shrink), **options)
    run_state_machine_as_test(SchedulerMachine, settings=chosen)


# -- overload ---------------------------------------------------------------------------------------------------------


class Simulation:
    """Plays arrivals against a scheduler. The model's times are drawn; the clock is this object's."""

    def __init__(self, sched, seed=0, step=0.020, predict=0.004):
        self.sched, self.random = sched, random.Random(seed)
        self.cost = {"step": step, "predict": predict}
        self.now, self.events = 0.0, []
        self.outcomes, self.learned, self.late = {}, defaultdict(list), []
        self.most_waiting = self.most_backlog = 0

    def at(self, moment, what, *arguments):
        heapq.heappush(self.events, (moment, self.random.random(), what, arguments))

    def arrive(self, each):
        try:
            self.sched.offer(each, self.now)
        except Unavailable:
            self.outcomes[each] = "refused"

    def end(self, kind):
        running = self.sched.stepping if kind == "step" else self.sched.predicting
        for each in running.jobs:
            if self.sched.answer(each):
                assert self.now <= each.deadline, "an answer after its deadline"
                self.outcomes[each] = kind
            if kind == "step":
                self.learned[each.stream].append(each)
        (self.sched.step_done if kind == "step" else self.sched.prediction_done)(self.now)

    def launch(self, kind, jobs):
        share = 0.25 + 0.75 * sum(each.size for each in jobs) / 8  # a batch of 8 costs as much as stated
        self.at(self.now + self.cost[kind] * share * self.random.uniform(0.8, 1.3), self.end, kind)

    def pump(self):
        def refuse(late):
            for each in late:
                assert self.now <= each.deadline + 1e-9, "a refusal after the deadline"
                self.outcomes[each] = "refused"

        refuse(self.sched.refuse_late(self.now))
        for _ in range(2):
            jobs, late = self.sched.next_prediction(self.now)
            refuse(late)
            if jobs:
                self.launch("predict", jobs)
            if jobs := self.sched.next_step(self.now):
                self.launch("step", jobs)
        self.timer = self.sched.wake(self.now)
        assert self.timer > self.now, "the scheduler asks to be looked at now, and has just been"
        self.most_waiting = max(self.most_waiting, self.sched.waiting)
        self.most_backlog = max(self.most_backlog, len(self.sched.backlog))

    def play(self):
        self.timer = math.inf
        while self.events or self.timer < math.inf:
            if self.events and self.events[0][0] <= self.timer:
                self.now, _, what, arguments = heapq.heappop(self.events)
                what(*arguments)
            else:
                self.now = self.timer
            self.pump()


def load(simulation, rate, seconds, streams=16, patience=0.1, start=0.0):
    """Requests at random moments, ``rate`` a second, each of one image of one of the streams."""
    jobs, moment, draw = [], start, simulation.random
    while (moment := moment + draw.expovariate(rate)) < start + seconds:
        each = job(f"s{draw.randrange(streams)}", moment, moment + patience)
        jobs.append(each)
        simulation.at(moment, simulation.arrive, each)
    return jobs


@pytest.mark.parametrize("seed", range(2))
def test_under_overload_every_request_is_answered_in_time_or_refused_and_adaptation_goes_first(seed):
    simulation = Simulation(scheduler(backlog=64, relief=0.5), seed)
    calm = load(simulation, 100, 2.0)  # a step of 8 streams takes 20 ms: room for some 300 a second
    wild = load(simulation, 10_000, 1.0, start=2.0)  # predictions of 16 streams take 7 ms: 2,300 a second
    after = load(simulation, 100, 2.0, start=5.0)  # 2 s after the overload
    simulation.play()
    outcomes = {name: Counter(simulation.outcomes[each] for each in jobs)
                for name, jobs in (("calm", calm), ("wild", wild), ("after", after))}  # fmt: skip
    assert sum(map(sum, (c.values() for c in outcomes.values()))) == len(calm) + len(wild) + len(after)
    assert outcomes["calm"]["step"] > 0.9 * len(calm)
    assert outcomes["wild"]["predict"] > 3 * outcomes["wild"]["step"]  # adaptation degrades first
    assert outcomes["wild"]["predict"] > 1.0 * 1700  # prediction goes on
    assert outcomes["wild"]["refused"] > 0
    assert outcomes["after"]["step"] > 0.9 * len(after)
    assert simulation.most_backlog <= 64
    assert simulation.most_waiting < 1024
    assert not simulation.sched.queues
    assert not simulation.sched.backlog
    assert not simulation.sched.predictions
    for jobs in simulation.learned.values():  # in the order of arrival
        assert [each.arrived for each in jobs] == sorted(each.arrived for each in jobs)
