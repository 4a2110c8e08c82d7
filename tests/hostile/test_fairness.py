"""One user sends as much as it can, and another one gets its share all the same; quotas bound what a user may ask for.

The scheduler is driven with a clock of its own, the worker and the server with requests that are counted.
"""

import asyncio
import contextlib
import heapq
import json
import math
import socket
import threading
from collections import Counter
from itertools import count

import pytest
import torch
from http_calls import IMAGES, head, infer, refused, status, web
from hypothesis import given, settings
from hypothesis import strategies as st
from replays import POLICY, batch, new_fleet, working
from small_server import MODEL, has_grpc, listening, serving, small_fleet, token

from stores import Clock
from tribe.serve.config import Limits, Policy
from tribe.serve.errors import NotFound, TooMany, Unavailable
from tribe.serve.fairness import Shares, Tally, Turns
from tribe.serve.jobs import BatchTimes, Job
from tribe.serve.plain import encode_npy
from tribe.serve.protocol import InferRequest
from tribe.serve.scheduler import Scheduler
from tribe.serve.security import Access, Principal, Token, read_tokens
from tribe.serve.service import Service
from tribe.serve.store.sqlite import SqliteStore
from tribe.serve.worker import Worker

PIXELS = torch.zeros(1024, 1, 2, 2)
COST = {"step": 0.004, "predict": 0.001}  # seconds of an image
BODY = encode_npy(IMAGES)


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
        again = max(pause, 0.01 if outcome == "refused" else 0.0)
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


# -- bytes, requests, streams ------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(sent=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 300)), max_size=60))
def test_a_newcomer_finds_room_whatever_another_user_takes(sent):
    shares = Shares(900, "{used} {own} {limit}", alone=False)
    for user, count_ in sent:
        with contextlib.suppress(Unavailable):
            shares.take(user, count_)
        assert shares.used <= 900
    first = [user for user, _ in sent][:1]
    for newcomer in {"a", "b", "c"} - set(first):
        if not shares.of.get(newcomer):
            shares.take(newcomer, 1)
    assert Shares(900, "", alone=True).take("a", 900) == 900


class Slow:
    """A connection that sends all of a body but its last byte."""

    def __init__(self, server, name, size):
        self.connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        headers = f"Authorization: Bearer {name}", f"Content-Length: {size}", "Content-Type: application/x-npy"
        self.connection.sendall(head("POST /v1/predict", *headers) + bytes(size - 1))

    def refused(self):
        """Whether the server has answered, which it does only to refuse."""
        self.connection.setblocking(False)
        try:
            return status(self.connection.recv(2**16)) == 503
        except BlockingIOError:
            return False


def test_slow_bodies_of_one_user_leave_bytes_for_another():
    """Three bodies that did not end were a 503 for everybody."""
    tokens = [token("greedy", role="predict"), token("camera", role="learn")]
    with listening(tokens=tokens, limits=Limits(bodies=3_000_000)) as server, contextlib.ExitStack() as stack:
        bodies, slow = server.app.handlers.bodies, []
        for _ in range(3):
            before = bodies.used
            slow.append(Slow(server, "greedy", 999_990))
            stack.callback(slow[-1].connection.close)
            while bodies.used < before + 999_989 and not slow[-1].refused():
                pass
        assert bodies.used <= 2_000_000
        large = encode_npy(IMAGES.repeat(50, 0))
        for _ in range(5):
            answer = web.post(f"{server.url}/v1/predict", content=large, headers={"authorization": "Bearer camera"})
            assert answer.status_code == 200, answer.text
    with listening(tokens=tokens[:1], limits=Limits(bodies=3_000_000)) as server, contextlib.ExitStack() as stack:
        bodies = server.app.handlers.bodies
        for i in range(3):  # a single user may have them all
            stack.callback(Slow(server, "greedy", 999_990).connection.close)
            while bodies.used < (i + 1) * 999_989:
                pass


def test_open_requests_of_one_user_leave_places_for_another():
    """Each stream of events held a place until its client went away."""
    tokens = [token("greedy", role="predict"), token("camera", role="learn")]
    with listening(tokens=tokens, limits=Limits(connections=12)) as server, contextlib.ExitStack() as stack:
        answers = []
        for _ in range(10):
            request = web.build_request("GET", f"{server.url}/v1/events", headers={"authorization": "Bearer greedy"})
            answers.append(web.send(request, stream=True))
            stack.callback(answers[-1].close)
        codes = Counter(each.status_code for each in answers)
        assert codes == {200: 8, 503: 2}
        for each in answers:
            if each.status_code == 503:
                each.close()
        answer = infer(server, sequence_id="c", headers={"authorization": "Bearer camera"})
        assert answer.status_code == 200, answer.text
    with listening(tokens=tokens, limits=Limits(connections=12)) as server:
        for _ in range(30):  # each gives its place back
            assert infer(server, sequence_id="c", headers={"authorization": "Bearer camera"}).status_code == 200
        assert server.app.handlers.requests.of.get("camera", 0) == 0


@contextlib.asynccontextmanager
async def served(store, *tokens, fleet=None, policy=POLICY, **options):
    """A service with these tokens, and its users by name."""
    async with working(fleet, store, policy, **options) as worker:
        service = Service(worker, MODEL, Access(tokens))
        service.ready = True
        yield service, {each.name: service.access.identify(f"Bearer {each.name}") for each in tokens}


def ask(service, user, stream, seed=0, **fields):
    return service.infer(InferRequest(batch(seed), stream=stream, **fields), user, service.worker.clock())


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    """None, or a store."""
    if request.param == "memory":
        yield None
    else:
        with contextlib.closing(SqliteStore(tmp_path / "data")) as kept:
            yield kept


CAMERA = token("camera", streams="a-", role="learn", most_streams=5)
WATCHER = token("watcher", streams="a-", role="predict")
GREEDY = token("greedy", streams="g-", role="learn")


async def test_a_token_makes_exactly_as_many_streams_as_it_may_however_many_it_asks_for_at_once(store):
    """Sixty requests at the same time made 59 streams, where five were the limit."""
    async with served(store, CAMERA) as (service, users):
        for _ in range(2):
            asked = [ask(service, users["camera"], f"a-{i}") for i in range(60)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
        kinds = Counter(type(each).__name__ for each in answers)
        assert kinds == {"InferResult": 5, "TooMany": 55}
        assert next(each for each in answers if isinstance(each, TooMany)).headers["retry-after"] == "60"
        assert len(service.worker.sessions.by_name) == 5
        await service.worker.control("drop", next(iter(service.worker.sessions.by_name)))
        again = [ask(service, users["camera"], f"a-again-{i}") for i in range(5)]
        assert Counter(map(type, await asyncio.gather(*again, return_exceptions=True)))[TooMany] == 4


async def test_two_workers_together_make_at_most_one_stream_too_many(tmp_path):
    with (
        contextlib.closing(SqliteStore(tmp_path / "data")) as first,
        contextlib.closing(SqliteStore(tmp_path / "data")) as second,
    ):
        async with served(first, CAMERA) as (one, users), served(second, CAMERA) as (two, others):
            asked = [ask(one, users["camera"], f"a-{i}") for i in range(30)]
            asked += [ask(two, others["camera"], f"a-{i}") for i in range(30, 60)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            assert 5 <= sum(not isinstance(each, Exception) for each in answers) <= 6
            assert first.count("a-") <= 6


async def test_a_request_does_not_fail_because_another_user_may_not_open_its_stream(store):
    async with served(store, CAMERA, WATCHER) as (service, users):
        mixed = [ask(service, users[name], "a-new") for name in ("watcher", "camera", "watcher", "camera")]
        answers = await asyncio.gather(*mixed, return_exceptions=True)
        assert [isinstance(answers[i], NotFound) for i in (0, 2)].count(False) <= 1
        assert answers[1].adapted
        assert answers[3].adapted


async def test_the_server_has_a_number_of_open_streams_which_tokens_share(store):
    policy = Policy(**{**vars(POLICY), "open_streams": 9})
    async with served(store, GREEDY, CAMERA, policy=policy) as (service, users):
        asked = [ask(service, users["greedy"], f"g-{i}") for i in range(40)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert Counter(map(type, answers))[Unavailable] == 34
        assert (await ask(service, users["camera"], "a-1")).adapted
        text = service.worker.metrics_text()
        assert 'tribe_streams_limit{model="tribe",version="1"} 9.0' in text
        assert 'tribe_streams_refused_total{model="tribe",version="1"} 34.0' in text
    async with served(store, policy=policy) as (service, _):
        user = service.access.identify(None)
        answers = await asyncio.gather(*(ask(service, user, f"x-{i}") for i in range(40)), return_exceptions=True)
        assert Counter(map(type, answers))[Unavailable] == 31
        assert len(service.worker.sessions.by_name) == 9


async def test_the_store_has_a_number_of_streams(tmp_path):
    policy = Policy(**{**vars(POLICY), "stored_streams": 4})
    with contextlib.closing(SqliteStore(tmp_path / "data")) as store:
        async with served(store, policy=policy) as (service, _):
            user = service.access.identify(None)
            answers = await asyncio.gather(*(ask(service, user, f"x-{i}") for i in range(9)), return_exceptions=True)
            assert Counter(map(type, answers))[Unavailable] == 5
        assert store.count() == 4


# -- tokens that only predict ------------------------------------------------------------------------------------------


async def test_a_token_that_only_predicts_claims_no_stream(tmp_path):
    """It claimed streams on the wrong worker, and the right one could not learn."""
    with contextlib.closing(SqliteStore(tmp_path / "data")) as store:
        async with (
            served(store, CAMERA, WATCHER, owner="right") as (right, users),
            served(store, CAMERA, WATCHER, owner="wrong") as (wrong, others),
        ):
            await ask(right, users["camera"], "a-1")
            await right.worker.control("end", "a-1")
            answer = await ask(wrong, others["watcher"], "a-1", seed=1)
            assert (answer.adapted, answer.clock) == (False, 1), "it predicts with the stored state"
            assert store.entry("a-1").owner is None
            for seed in range(1, 4):
                assert not (await ask(right, users["watcher"], "a-1", seed)).adapted
                assert (await ask(right, users["camera"], "a-1", seed)).adapted, "also on the same worker, at once"
            assert store.entry("a-1").owner == "right"
            with pytest.raises(NotFound):
                await ask(wrong, others["watcher"], "a-none")
            assert store.entry("a-none") is None


# -- the worker --------------------------------------------------------------------------------------------------------


class Paused:
    """A fleet whose steps wait until a test lets them go."""

    def __init__(self):
        self.fleet, self.go = new_fleet(), threading.Event()

    def __call__(self, images):
        self.go.wait()
        return self.fleet(images)

    def __getattr__(self, name):
        return getattr(self.fleet, name)

    def __contains__(self, name):
        return name in self.fleet


async def test_a_full_worker_answers_the_user_with_less_and_refuses_the_one_with_more():
    fleet, policy = Paused(), Policy(**{**vars(POLICY), "waiting": 20})
    async with served(None, GREEDY, CAMERA, fleet=fleet, policy=policy, clock=Clock()) as (service, users):
        try:
            greedy = [asyncio.create_task(ask(service, users["greedy"], f"g-{i}")) for i in range(40)]
            while service.worker.scheduler.waiting + sum(task.done() for task in greedy) < 40:
                await asyncio.sleep(0)
            camera = [asyncio.create_task(ask(service, users["camera"], "a-1", seed)) for seed in range(8)]
            while service.worker.scheduler.waiting_of.get(users["camera"], 0) + sum(each.done() for each in camera) < 8:
                await asyncio.sleep(0)
        finally:
            fleet.go.set()
        answers = await asyncio.gather(*camera, return_exceptions=True)
        assert [getattr(each, "adapted", each) for each in answers] == [True] * 8
        answers = await asyncio.gather(*greedy, return_exceptions=True)
        assert sum(isinstance(each, Unavailable) for each in answers) == 28
        assert users["greedy"].used["refused"] == 28
        assert users["camera"].used == {"requests": 1, "refused": 0, "images": 16, "learned": 16}


# -- quotas ------------------------------------------------------------------------------------------------------------

LIMITED = [
    token("few", requests_per_second=1e-6),
    token("small", predicted_images_per_second=1e-6),
    token("narrow", bytes_in_flight=10_000),
    token("part", streams="p-", role="learn", learning_share=0.5),
    token("operator"),
]


@pytest.fixture(scope="module")
def limited():
    with listening(tokens=LIMITED, grpc_port=0 if has_grpc() else None) as found:
        yield found


def posted(server, name, content=BODY, path="/v1/predict", **headers):
    return web.post(server.url + path, content=content, headers={"authorization": f"Bearer {name}", **headers})


def test_beyond_a_quota_the_answer_is_429_and_says_when_to_come_back(limited):
    for name, words in (("few", "requests a second"), ("small", "images a second")):
        assert posted(limited, name).status_code == 200
        answer = posted(limited, name)
        refused(answer, 429, words, repr(name))
        assert int(answer.headers["retry-after"]) >= 3600
    assert posted(limited, "narrow").status_code == 200
    answer = posted(limited, "narrow", encode_npy(IMAGES.repeat(10, 0)))
    refused(answer, 429, "10,000 bytes")
    assert int(answer.headers["retry-after"]) >= 1
    assert posted(limited, "narrow").status_code == 200, "what was taken is given back"


@pytest.mark.skipif(not has_grpc(), reason="grpcio and protobuf are not installed: make test-serve")
def test_a_quota_holds_over_grpc_too():
    import grpc

    from tribe.serve import open_inference_pb2 as messages

    with listening(tokens=[token("few", requests_per_second=1e-6)], grpc_port=0) as server:
        request = messages.ModelInferRequest(model_name="small")
        request.inputs.add(name="images", datatype="FP32", shape=IMAGES.shape)
        request.raw_input_contents.append(IMAGES.tobytes())
        with grpc.insecure_channel(server.grpc_address) as channel:
            call = channel.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                request_serializer=messages.ModelInferRequest.SerializeToString,
                response_deserializer=messages.ModelInferResponse.FromString,
            )
            metadata = [("authorization", "Bearer few")]
            assert call(request, metadata=metadata).raw_output_contents
            with pytest.raises(grpc.RpcError) as caught:
                call(request, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert int(dict(caught.value.trailing_metadata())["retry-after"]) >= 3600


def test_a_rate_holds_over_time():
    now = [0.0]
    user = Principal(Token("x", "", requests_per_second=5.0), clock=lambda: now[0])
    passed, waits = 0, set()
    for _ in range(1000):  # 50 seconds, with 20 requests in each
        try:
            user.count_request()
            passed += 1
        except TooMany as error:
            waits.add(error.retry_after)
        now[0] += 0.05
    assert 0 < min(waits) <= max(waits) <= 0.21
    assert 250 <= passed <= 256
    assert user.used["refused"] == 1000 - passed
    closed = Principal(Token("x", "", requests_per_second=0.0))
    with pytest.raises(TooMany):
        closed.count_request()


def test_tokens_see_what_they_use_and_an_admin_of_all_streams_sees_everybody(limited):
    posted(limited, "part", path="/v1/streams/p-1/predict")

    def users(name):
        answer = web.get(f"{limited.url}/v1/streams", headers={"authorization": f"Bearer {name}"}).json()
        assert answer["open_streams"] == 10_000
        return {each["name"]: each for each in answer["tokens"]}

    assert set(users("operator")) == {each.name for each in LIMITED}
    (own,) = users("part").values()
    assert (own["images"], own["learned"], own["open"], own["waiting"], own["bytes"]) == (2, 2, 1, 0, 0)
    assert (own["streams"], own["role"], own["learning_share"]) == ("p-", "learn", 0.5)
    assert "digest" not in own
    text = web.get(f"{limited.url}/metrics", headers={"authorization": "Bearer operator"}).text
    assert 'tribe_token_learned_total{model="tribe",token="part",version="1"} 2.0' in text
    assert 'tribe_token_open{model="tribe",token="part",version="1"} 1.0' in text
    assert "tribe_token" not in web.get(f"{limited.url}/metrics", headers={"authorization": "Bearer x"}).text


def test_metrics_of_tokens_are_bounded_and_add_up_by_name():
    tokens = [token(f"user-{i}") for i in range(30)]
    tokens.append(Token("user-0", "0" * 64))  # the next secret of the same user
    worker = Worker(small_fleet(), policy=Policy(stream_metrics=10))
    with serving(worker, tokens=tokens) as server:
        posted(server, "user-0")
        text = web.get(f"{server.url}/metrics", headers={"authorization": "Bearer user-0"}).text
    assert text.count("tribe_token_requests_total{") == 10
    assert text.count('tribe_token_images_total{model="tribe",token="user-0",version="1"} 2.0') == 1


def test_quotas_come_from_the_file(tmp_path):
    quotas = {"most_streams": 3, "images_per_second": 2.5, "predicted_images_per_second": 9.0}
    quotas |= {"requests_per_second": 4.0, "bytes_in_flight": 100, "learning_share": 2.0}
    entry = {"name": "cam", "streams": "a-", "role": "learn", "sha256": "0" * 64}
    (tmp_path / "t").write_text(json.dumps({"tokens": [entry | quotas]}))
    (found,) = read_tokens(tmp_path / "t")
    assert found == Token("cam", "0" * 64, "a-", "learn", **quotas)
    for wrong in ({"requests_per_second": -1}, {"bytes_in_flight": 1.5}, {"learning_share": 0}):
        (tmp_path / "t").write_text(json.dumps({"tokens": [entry | wrong]}))
        with pytest.raises(ValueError, match="docs/serving"):
            read_tokens(tmp_path / "t")


# -- names that contradict each other ----------------------------------------------------------------------------------


def test_a_header_that_names_another_stream_than_the_path_is_refused():
    """A proxy sends it to the worker of one stream, and the worker answered for the other."""
    with listening() as server:
        for method, path in (("POST", "/predict"), ("POST", "/reset"), ("PUT", ""), ("DELETE", "")):
            body = BODY if path == "/predict" else b""
            url = f"{server.url}/v1/streams/a{path}"
            for named in ("b", ""):
                refused(
                    web.request(method, url, content=body, headers={"x-tribe-stream": named}), 400, "x-tribe-stream"
                )
        assert web.get(f"{server.url}/v1/streams/a").status_code == 404
        url = f"{server.url}/v1/streams/a/predict"
        assert web.post(url, content=BODY, headers={"x-tribe-stream": "a"}).status_code == 200
