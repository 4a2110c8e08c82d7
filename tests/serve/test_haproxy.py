"""Two workers on one store behind a real HAProxy with deploy/haproxy.cfg: one stream, one worker, also after a kill."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from functools import partial

import numpy as np
import pytest
import torch
from http_calls import exchange, status, web
from small_server import serving, small_fleet

from networks import at_once
from places import ROOT
from processes import Process
from tribe.serve.client import Client, ClientError
from tribe.serve.config import Policy
from tribe.serve.plain import encode_npy
from tribe.serve.store.sqlite import SqliteStore
from tribe.serve.worker import Worker

HAPROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
pytestmark = pytest.mark.skipif(HAPROXY is None, reason="needs haproxy: apt-get install haproxy")
CONFIG = (ROOT / "deploy/haproxy.cfg").read_text()
POLICY = "lease=1.0, renew=0.2, margin=0.3, write_every=0.05, staleness=0.1, retry=0.05"
WORKER = f"""
import sys
from tribe.serve import Server
from tribe.serve.config import Policy
from tribe.testing import small_network

options = {{"h0": 2.0, "exact": True, "policy": Policy({POLICY})}}
server = Server(small_network(), name="small", data=sys.argv[1], shape=(3, 8, 8), port=int(sys.argv[2]), **options)
server.run(lambda: print("listens", flush=True))
"""
STREAMS = [f"cam{i}" for i in range(6)]


def free_ports(count):
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in taken]


def batch(stream, number):
    """The images of one request; every stream and every request has others."""
    seed = 1000 * int(stream.removeprefix("cam")) + number
    return np.random.default_rng(seed).random((2, 3, 8, 8), np.float32)


def replay(stream, count):
    """Logits of the next request after `count` learned ones, by the library alone."""
    alone = small_fleet()
    for number in range(count):
        alone({stream: torch.from_numpy(batch(stream, number))})
    return alone.predict({stream: torch.from_numpy(batch(stream, count))})[stream].numpy()


def with_ports(text, **ports):
    """The configuration with other ports: `p8000=...` stands in place of 8000. Nothing listens on those not given."""
    shipped = ("8000", "8001", "8101", "8102", "8201", "8202")
    assert all(text.count(each) for each in shipped)
    others = dict(zip(shipped, free_ports(len(shipped)), strict=True))
    others |= {name[1:]: port for name, port in ports.items()}
    return re.sub("|".join(shipped), lambda found: str(others[found[0]]), text)


@contextlib.contextmanager
def proxied(folder, text):
    """HAProxy with a configuration."""
    (folder / "haproxy.cfg").write_text(text)
    proxy = subprocess.Popen([HAPROXY, "-db", "-f", folder / "haproxy.cfg"])
    try:
        yield
    finally:
        proxy.terminate()
        proxy.wait()


@contextlib.contextmanager
def balanced(tmp_path):
    """HAProxy with the shipped configuration and two workers: one in a process of its own, one here."""
    front, here, other = free_ports(3)
    text = with_ports(CONFIG, p8000=front, p8101=here, p8102=other)
    (tmp_path / "worker.py").write_text(WORKER)
    reader, writer = os.pipe()
    process = Process(tmp_path / "worker.py", tmp_path / "data", other, stdout=writer, cwd=tmp_path)
    os.close(writer)
    store = SqliteStore(tmp_path / "data")
    worker = Worker(small_fleet(), store, policy=eval(f"Policy({POLICY})", {"Policy": Policy}))
    with serving(worker, port=here) as server, os.fdopen(reader) as said:
        assert said.readline() == "listens\n"
        try:
            with proxied(tmp_path, text):
                url = f"http://127.0.0.1:{front}"
                wait_for(lambda: _answers(f"{url}/v2/health/ready"))
                yield url, server, f"http://127.0.0.1:{other}", process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.end()
    store.close()


def wait_for(condition):
    """Ask until it is so; a test that waits forever is stopped by hand."""
    while not condition():
        time.sleep(0.05)


def _answers(url):
    try:
        return web.get(url).status_code == 200
    except Exception:
        return False


def states(url):
    return {each["name"]: each for each in web.get(f"{url}/v1/streams").json()["streams"]}


def test_the_shipped_configuration_is_valid(tmp_path):
    found = subprocess.run([HAPROXY, "-c", "-f", ROOT / "deploy/haproxy.cfg"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert re.search(r"WARNING|ALERT", found.stderr) is None, found.stderr


def test_headers_that_are_too_long_or_too_slow_are_refused(tmp_path):
    """By HAProxy: the server has no such limits."""
    (port,) = free_ports(1)
    text = with_ports(CONFIG, p8000=port).replace("http-request 10s", "http-request 300ms")
    assert text.count("300ms") == 1
    with proxied(tmp_path, text):
        wait_for(lambda: _listens(port))
        start = b"GET /v2 HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        assert status(exchange(port, start + b"X-Long: " + b"x" * 20_000)) == 400
        assert status(exchange(port, start + b"X-Many: 1\r\n" * 100 + b"\r\n")) == 400
        assert status(exchange(port, start)) == 408


def _listens(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True


def test_a_stream_lands_on_one_worker_and_another_takes_it_over_when_that_one_is_killed(tmp_path):
    with balanced(tmp_path) as (url, server, other, process):
        for number in range(3):
            for stream in STREAMS:
                with Client(url, "small") as client:
                    assert client.infer(stream, batch(stream, number)).facts["tribe_adapted"] is True
        here, there = states(server.url), states(other)
        assert set(here) | set(there) == set(STREAMS)
        assert not set(here) & set(there)
        assert here
        assert there
        assert {each["state"] for each in (*here.values(), *there.values())} == {"learning"}
        assert {each["clock"] for each in (*here.values(), *there.values())} == {3}
        moved = min(there)
        plain = web.post(f"{url}/v1/streams/{moved}/predict?learn=false", content=encode_npy(batch(moved, 3))).json()
        assert np.argmax(replay(moved, 3), 1).tolist() == plain["classes"]  # the path led to the same worker
        assert moved not in states(server.url)
        assert web.get(f"{url}/v1/streams").status_code == 404

        wait_for(lambda: all(each["lag"] == 0 for each in states(other).values()))  # all is stored
        os.kill(process.pid, signal.SIGKILL)
        answers = {stream: [] for stream in there}

        def go_on(stream):
            """Predict until the stream learns again; every answer must be this stream's."""
            with Client(url, "small") as client:
                while not any(adapted for adapted, _ in answers[stream]):
                    with contextlib.suppress(ClientError, OSError):
                        found = client.infer(stream, batch(stream, 3))
                        answers[stream].append((found.facts["tribe_adapted"], found.logits))
                    time.sleep(0.02)

        at_once(*(partial(go_on, stream) for stream in there))
        taken = states(server.url)
        for stream, before in there.items():
            wanted = replay(stream, 3)
            for _, logits in answers[stream]:
                np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-5)  # logits of another stream differ
            assert (taken[stream]["clock"], taken[stream]["generation"]) == (4, before["generation"] + 1)
        one, two = replay(STREAMS[0], 3), replay(STREAMS[1], 3)
        assert not np.allclose(one, two, rtol=1e-4, atol=1e-5)
        assert {stream: taken[stream]["clock"] for stream in here} == dict.fromkeys(here, 3)
