"""Errors: they tell a client about its own request, and nothing of the server, of others, or of their streams."""

import contextlib
import json
import subprocess
import sys
import textwrap

import pytest
from http_calls import infer, refused, web
from replays import working
from small_server import serving, small_fleet, token

from places import ROOT
from stores import KINDS, RedisServer, need_redis, open_kind
from tribe.serve.errors import NotOwner, as_serve_error
from tribe.serve.store import Fenced
from tribe.serve.store.redis import RedisStore
from tribe.serve.store.sqlite import SqliteStore
from tribe.serve.worker import Worker


class Overtaken:
    """A store where another worker claims a stream just before this one deletes it."""

    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        return getattr(self.store, name)

    def delete(self, claim):
        self.store.release(claim)
        assert self.store.claim(claim.stream, "the other worker", 100) is not None
        self.store.delete(claim)


@pytest.fixture(params=KINDS)
def store(request, tmp_path):
    with contextlib.closing(open_kind(request.param, tmp_path)()) as found:
        yield found


@pytest.mark.parametrize("opened", [True, False])
async def test_a_delete_that_another_worker_overtakes_is_a_conflict(store, opened):
    """It was a 500, and its log named the workers."""
    claim = store.claim("cam", "earlier", 100)
    store.release(claim)
    async with working(store=Overtaken(store)) as worker:
        if opened:
            await worker.control("create", "cam")
        with pytest.raises((Fenced, NotOwner)) as caught:
            await worker.control("drop", "cam")
        answer = as_serve_error(caught.value)
        assert isinstance(answer, NotOwner)
        assert answer.status == 409
        assert "another worker" in str(answer)
        assert "the other" not in str(answer)
        assert worker.runtime.owner not in str(answer)


def test_an_error_names_no_other_stream():
    """A 404 listed all streams of the server."""
    names = "a-secret-1", "b-1"
    tokens = [token("of a", streams="a-", role="admin"), token("of b", streams="b-", role="admin")]
    with serving(Worker(small_fleet()), tokens=tokens) as server:
        for name in names:
            sent = {"authorization": f"Bearer of {name[0]}"}
            assert infer(server, headers=sent, sequence_id=name).status_code == 200
        server.service.worker.fleet.drop("b-1")  # as at the moment when another worker claims it
        for method, path in (("GET", "/state"), ("POST", "/snapshot"), ("POST", "/freeze"), ("POST", "/reset")):
            answer = web.request(method, f"{server.url}/v1/streams/b-1{path}", headers=sent)
            words = refused(answer, 404, "b-1")
            assert "secret" not in words


def calls(server):
    """The answers to one request of each kind, to a stream that is open and to another."""
    for name in ("cam", "new"):
        url = f"{server.url}/v1/streams/{name}"
        yield infer(server, sequence_id=name, sequence_end=name == "cam")
        for method, path in (("GET", ""), ("GET", "/state"), ("PUT", ""), ("DELETE", "")):
            yield web.request(method, url + path)
        for action in ("reset", "snapshot", "rollback", "freeze", "unfreeze", "end"):
            yield web.post(f"{url}/{action}")
    yield web.get(f"{server.url}/v1/streams?stored=true")


def events(server):
    """All events so far, as a client gets them."""
    found = ""
    with web.stream("GET", f"{server.url}/v1/events") as answer:
        for line in answer.iter_lines():
            found += line
            if "the last one" in line:
                return found


def test_an_error_tells_no_path_of_the_server(tmp_path):
    """A 503 told where the ledger is, a 500 where a state was."""
    folder = tmp_path / "hidden"
    store = SqliteStore(folder)
    with serving(Worker(small_fleet(), store)) as server:
        assert infer(server, sequence_id="cam").status_code == 200
        assert web.post(f"{server.url}/v1/streams/cam/end").status_code == 200
        for path in folder.glob("blobs/*/*"):
            path.write_bytes(path.read_bytes()[:-1])
        damaged = list(calls(server))
        store.close()
        down = list(calls(server))
        server.service.worker.log.add("test", "the last one")
        shown = events(server)
    assert {answer.status_code for answer in damaged} >= {200, 500}
    assert {answer.status_code for answer in down} >= {200, 503}
    for text in (shown, *(answer.text for answer in damaged + down)):
        assert "hidden" not in text
        assert str(tmp_path) not in text


def test_an_error_tells_no_address_of_redis():
    need_redis()
    redis = RedisServer()
    try:
        with contextlib.closing(RedisStore(redis.address)) as store, serving(Worker(small_fleet(), store)) as server:
            assert infer(server, sequence_id="cam").status_code == 200
            redis.kill()
            answers = list(calls(server))
            server.service.worker.log.add("test", "the last one")
            shown = events(server)
    finally:
        redis.remove()
    assert 503 in {answer.status_code for answer in answers}
    assert "store-down" in shown
    assert not [text for text in (shown, *(a.text for a in answers)) if str(redis.folder) in text]


# -- memory ------------------------------------------------------------------------------------------------------------

HUNGRY = """
    import resource, sys, torch
    from torch import nn
    import tribe
    from http_calls import web
    from tribe.serve import Server
    from tribe.serve.config import Limits, Policy
    from tribe.serve.plain import encode_npy
    import numpy as np, json

    torch.set_num_threads(1)
    net = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
                        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4))
    limits = Limits(body=2**30, bodies=2**32)
    with Server(net, h0=2.0, port=0, shape=(3, None, None), limits=limits, policy=Policy(max_batch_delay=0)) as server:
        draw = np.random.default_rng(0)
        bodies = {n: encode_npy(draw.random((1, 3, n, n), np.float32)) for n in (16, 1200)}

        def post(stream, pixels, learn=True):
            path = f"{server.url}/v1/streams/{stream}/predict{'' if learn else '?learn=false'}"
            return web.post(path, content=bodies[pixels])

        fleet = server.service.worker.fleet
        for name in ("cam", "victim"):
            post(name, 16).raise_for_status()
        before = [fleet.digest(name) for name in ("cam", "victim")]
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
        found = []
        for learn in (True, False, True):
            answer = post("cam", 1200, learn)
            found.append([answer.status_code, answer.headers.get("retry-after"), answer.json()["error"]])
        same = before == [fleet.digest(name) for name in ("cam", "victim")]
        later = [post(name, 16).status_code for name in ("cam", "victim")]
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(json.dumps({"found": found, "same": same, "later": later}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are those of Linux")
def test_a_request_without_memory_gets_503_and_changes_nothing():
    """A network that could not allocate was a 400: it blamed the images."""
    code = textwrap.dedent(HUNGRY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "tests" / "serve")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    for status, retry_after, words in answer["found"]:
        assert (status, retry_after) == (503, "1"), words
        assert "memory" in words
        assert "bytes" not in words
    assert answer["same"]
    assert answer["later"] == [200, 200]
    assert "Traceback" not in done.stderr
