"""One user sends as much as it can, and another one gets its turns of the model all the same, on a clock of its own."""

import contextlib
import heapq
import math
from collections import Counter
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tribe.serve.config import Policy
from tribe.serve.errors import Unavailable
from tribe.serve.fairness import Tally, Turns
from tribe.serve.jobs import BatchTimes, Job
from tribe.serve.scheduler import Scheduler

PIXELS = torch.zeros(1024, 1, 2, 2)
COST = {"step": 0.004, "predict": 0.001}  # seconds of an image


def scheduler(blocked=lambda stream: None, **policy):
    """A scheduler that knows how long batches take."""
    times = BatchTimes()
    for kind, cost in COST.items():
        for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
            for _ in range(60):  # until the deviation is gone
                times.observe(kind, size, cost * size)
    return Scheduler(Policy(**{"max_batch_delay": 0, **policy}), times, blocked)


def job(user, stream="s", arrived=0.0, deadline=math.inf, size=1, **more):
    return Job(stream, PIXELS[:size], arrived, deadline, user=user, **more)


class Clients:
    """Clients that send a request, wait for its answer, pause, and send the next one, for some seconds of a clock."""

    def __init__(self, sched, seconds):
        self.sched, self.seconds, self.now = sched, seconds, 0.0
        self.events, self.order, self.owners = [], count(), {}
        self.answers, self.waits, self.learned = Counter(), {}, Counter()

    def add(self, user, connections=1, patience=math.inf, pause=0.0, size=1, streams=1, learn=True):
        for i in range(connections):
            stream = f"{user}-{i % streams}" if streams else None
            self.at(0.0, self.send, (user, stream, patience, pause, size, learn))

    def at(self, moment, what, *arguments):
        heapq.heappush(self.events, (moment, next(self.order), what, arguments))

    def send(self, client):
        user, stream, patience, _, size, learn = client
        if self.now >= self.seconds:
            return
        each = job(user, stream, self.now, self.now + patience, size, learn=learn)
        self.owners[each] = client
        try:
            displaced = self.sched.offer(each, self.now)
        except Unavailable:
            self.end(each, "refused")
        else:
            for other in displaced:
                self.end(other, "refused")

    def end(self, each, outcome):
        user, pause = each.user, self.owners[each][3]
        self.answers[user, outcome] += 1
        self.waits.setdefault(user, []).append(self.now - each.arrived)
        again = max(pause, 0.05 if outcome == "refused" else 0.0)
        self.at(self.now + again, self.send, self.owners[each])

    def batch_ends(self, kind):
        running = self.sched.stepping if kind == "step" else self.sched.predicting
        for each in running.jobs:
            if self.sched.answer(each):
                self.end(each, kind)
            if kind == "step":
                self.learned[each.user] += each.size
        (self.sched.step_done if kind == "step" else self.sched.prediction_done)(self.now)

    def pump(self):
        for each in self.sched.refuse_late(self.now):
            self.end(each, "refused")
        for _ in range(2):
            jobs, late = self.sched.next_prediction(self.now)
            for each in late:
                self.end(each, "refused")
            for kind, chosen in (("predict", jobs), ("step", self.sched.next_step(self.now))):
                if chosen:
                    self.at(self.now + COST[kind] * sum(j.size for j in chosen), self.batch_ends, kind)

    def play(self):
        timer = math.inf
        while self.events or timer < math.inf:
            if self.events and self.events[0][0] <= timer:
                self.now, _, what, arguments = heapq.heappop(self.events)
                what(*arguments)
            else:
                self.now = timer
            if self.now > self.seconds + 100:
                break
            self.pump()
            timer = self.sched.wake(self.now)
        return self


# -- turns of the model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("learn", [True, False], ids=["learning", "predicting"])
@pytest.mark.parametrize("size", [1, 16, 32])
def test_forty_connections_of_one_user_do_not_keep_the_camera_of_another_out(size, learn):
    """All 333 requests of the camera were refused: those of the other user would have made them late."""
    world = Clients(scheduler(), seconds=4.0)
    world.add("greedy", connections=40, size=size, streams=40 if learn else 0, patience=1.0, learn=learn)
    world.add("camera", patience=0.25, pause=0.03)
    world.play()
    sent = sum(number for (user, _), number in world.answers.items() if user == "camera")
    assert sent > 25
    assert world.answers["camera", "refused"] == 0
    assert max(world.waits["camera"]) <= 0.25
    assert world.answers["greedy", "step"] + world.answers["greedy", "predict"] > 40, "it is served too"


ATTACKS = {"no deadline": {"streams": 200}, "deadline": {"streams": 200, "patience": 0.3}, "predict": {"streams": 0}}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_camera_learns_while_another_user_sends_all_it_can(attack):
    """Its images were predicted, put into the learning queue and dropped there."""
    alone = Clients(scheduler(), seconds=4.0)
    alone.add("camera", patience=0.5, pause=0.1)
    alone.play()
    world = Clients(scheduler(), seconds=4.0)
    world.add("camera", patience=0.5, pause=0.1)
    world.add("greedy", connections=200, size=8, **ATTACKS[attack])
    world.play()
    assert world.answers["camera", "refused"] == 0
    assert world.learned["camera"] >= 0.5 * alone.learned["camera"]


def test_users_who_send_all_they_can_learn_equally_or_by_their_shares():
    for shares in ((1.0, 1.0, 1.0), (1.0, 2.0, 4.0)):
        sched, learned = scheduler(images=8), Counter()
        for user, share, streams in zip("abc", shares, (1, 30, 300), strict=True):
            for i in range(300):
                sched.offer(job(user, f"{user}-{i % streams}", share=share), 0.0)
        now = 0.0
        while all(any(each.user == user for queue in sched.queues.values() for each in queue.jobs) for user in "abc"):
            learned.update(each.user for each in sched.next_step(now))
            sched.step_done(now := now + 0.01)
        if shares == (1.0, 1.0, 1.0):  # one stream is stepped once at a time: it gets no more than that
            assert abs(learned["b"] - learned["c"]) <= 8
        else:
            assert learned["c"] == pytest.approx(2 * learned["b"], rel=0.15)


SENT = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), min_size=1, max_size=80)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(sent=SENT, images=st.integers(1, 12))
def test_no_user_who_waits_is_behind_another_by_more_than_a_batch_and_a_request(sent, images):
    sched, served = scheduler(images=images, waiting=1000, turn=1e9), Counter()
    for user, size in sent:
        sched.offer(job(user, None, size=size), 0.0)
    left = Counter(user for user, _ in sent)
    while +left:
        jobs, _ = sched.next_prediction(0.0)
        assert jobs
        for each in jobs:
            served[each.user] += each.size
            left[each.user] -= 1
        sched.prediction_done(0.0)
        for each in jobs:
            sched.answer(each)
        waiting = +left
        for user in waiting:
            assert all(served[other] - served[user] <= images + 9 for other in "abc")


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(sent=SENT)
def test_turns_of_one_user_are_in_the_order_of_arrival(sent):
    turns = Turns[tuple](lambda each: each[0], lambda each: each[1])
    ordered = turns.order([(user, size, i) for i, (user, size) in enumerate(sent)])
    for user in "abc":
        own = [i for name, _, i in ordered if name == user]
        assert own == sorted(own)
    assert sorted(i for _, _, i in ordered) == list(range(len(sent)))


def test_time_without_requests_is_not_saved_up():
    turns = Turns[str](lambda each: each, lambda each: 1)
    for _ in range(1000):
        turns.charge(["busy"], {"busy"})
    ordered = turns.order(["busy"] * 10 + ["new"] * 10)
    assert ordered[:4].count("new") == 2


def test_a_request_that_would_wait_behind_others_has_a_share_of_the_time():
    assert Tally(greedy=10_000).before("camera", 4) == 4
    assert Tally(greedy=10_000, camera=4).before("greedy", 10) == 10_004


def test_several_users_get_shorter_batches_and_one_alone_the_longest():
    for users, longest in (("a", 64), ("ab", 12)):
        sched = scheduler(turn=0.05)
        for user in users:
            for i in range(64):
                sched.offer(job(user, f"{user}-{i}"), 0.0)
        sizes = [len(sched.next_step(0.0))]
        sched.step_done(0.1)
        assert 8 <= sizes[0] <= longest


def test_a_batch_gives_up_requests_of_the_user_who_fills_it():
    """To answer more requests a second it gave up one with a tight deadline."""
    sched = scheduler(turn=1e9)
    sched.next_prediction(0.0)
    camera = job("camera", None, deadline=0.02, size=2)
    greedy = [job("greedy", None, deadline=0.05, size=1) for _ in range(60)]
    for each in (*greedy, camera):
        with contextlib.suppress(Unavailable):
            sched.offer(each, 0.0)
    chosen, late = sched.next_prediction(0.0)
    assert camera in chosen
    assert camera not in late


# -- places in queues --------------------------------------------------------------------------------------------------


def test_the_request_that_is_refused_is_one_of_the_user_with_most():
    sched = scheduler(waiting=10)
    greedy = [job("greedy", f"g-{i}", arrived=i) for i in range(10)]
    for each in greedy:
        assert sched.offer(each, each.arrived) == {}
    for i in range(5):
        assert list(sched.offer(job("camera", f"c-{i}"), 10.0)) == [greedy[9 - i]]
    for user in ("camera", "greedy"):
        with pytest.raises(Unavailable, match="wait"):
            sched.offer(job(user, "more"), 10.0)
    assert sched.waiting == 10
    assert sched.waiting_of == {"greedy": 5, "camera": 5}


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(sent=st.lists(st.tuples(st.sampled_from("aaaabbc"), st.booleans()), max_size=120))
def test_a_user_with_less_than_its_share_of_the_places_always_gets_one(sent):
    sched, mine = scheduler(waiting=12), Counter()
    for i, (user, hurried) in enumerate(sent):
        deadline = 1e6 if hurried else math.inf
        try:
            for other in sched.offer(job(user, f"{user}-{i}", i, deadline), 0.0):
                assert mine[other.user] > mine[user] + 1
                mine[other.user] -= 1
            mine[user] += 1
        except Unavailable:
            assert mine[user] >= 12 // 3 - 1
    assert sched.waiting_of == +mine
    assert sched.waiting <= 12


def test_one_user_does_not_drop_the_learning_queue_of_another():
    for limit in ({"backlog": 6}, {"backlog_bytes": 6 * 16}):
        sched = scheduler(**limit)
        camera = [job("camera", f"c-{i}", deadline=0.0035) for i in range(2)]
        for each in camera:
            sched.offer(each, 0.0)
        assert sched.next_prediction(0.0)[0] == camera
        with pytest.raises(Unavailable, match="left"):
            sched.offer(job("greedy", None, deadline=0.001), 0.0)
        for i in range(100):  # its requests are only predicted now, and learned later
            sched.offer(job("greedy", f"g-{i}", deadline=1e6), 0.0)
        assert [each for each in sched.backlog if each.user == "camera"] == camera
        assert len(sched.backlog) <= 6


def test_the_overload_of_one_user_does_not_stop_the_learning_of_another():
    sched = scheduler()
    sched.offer(job("greedy", None, deadline=2.0, size=512), 0.0)
    sched.next_prediction(0.0)
    with pytest.raises(Unavailable, match="left"):
        sched.offer(job("greedy", None, deadline=0.1, size=512), 0.0)
    camera = job("camera", "c", deadline=0.3)
    sched.offer(camera, 0.0)
    assert sched.next_step(0.0) == [camera]
