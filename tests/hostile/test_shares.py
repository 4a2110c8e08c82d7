"""What users share besides turns: bytes, requests, places in queues, and streams, of a real worker and server."""

import asyncio
import contextlib
import socket
from collections import Counter

import pytest
from http_calls import IMAGES, head, infer, status, web
from hypothesis import given, settings
from hypothesis import strategies as st
from replays import POLICY, Paused, batch, working
from small_server import MODEL, listening, token

from stores import Clock
from tribe.serve.config import Limits, Policy
from tribe.serve.errors import NotFound, TooMany, Unavailable
from tribe.serve.fairness import Shares
from tribe.serve.plain import encode_npy
from tribe.serve.protocol import InferRequest
from tribe.serve.security import Access
from tribe.serve.service import Service
from tribe.serve.store.sqlite import SqliteStore

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


async def test_a_full_worker_answers_the_user_with_less_and_refuses_the_one_with_more():
    fleet, policy = Paused(), Policy(**{**vars(POLICY), "waiting": 20})
    fleet.go.clear()
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
        refused = sum(isinstance(each, Unavailable) for each in answers)
        assert refused <= 28  # less, as far as some were only predicted while others waited
        assert users["greedy"].used["refused"] == refused
        assert users["camera"].used == {"requests": 1, "refused": 0, "images": 16, "learned": 16}
