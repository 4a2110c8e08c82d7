"""What a client without a token can do to the connection itself: hold it, fill it, and speak past its end."""

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import threading
import time

import pytest
from http_calls import IMAGES, exchange, head, infer, refused, status, web
from small_server import MODEL, listening, serving, small_fleet, token

from processes import Process
from tribe.serve import server as server_module
from tribe.serve.config import Limits
from tribe.serve.edge import LOGGED, LogLimit, choose_parser
from tribe.serve.plain import encode_npy
from tribe.serve.server import Listener, new_access
from tribe.serve.service import Service
from tribe.serve.store.sqlite import SqliteStore
from tribe.serve.worker import Worker

SECONDS = 20  # a test that waits longer for the server to act fails
MEGABYTE = 2**20
BODY = encode_npy(IMAGES)
PARSERS = ["h11", *({choose_parser(loopback=True)} - {"h11"})]
SERVER = """
import sys
from tribe.serve import Server
from tribe.serve.config import Limits
from tribe.testing import small_network

server = Server(small_network(), name="small", shape=(3, 8, 8), port=0, limits=Limits(**eval(sys.argv[1])))
server.run(lambda: print(server.port, flush=True))
"""


@pytest.fixture(params=PARSERS)
def parser(request):
    """A parser of HTTP that a server may have."""
    return request.param


@contextlib.contextmanager
def process(tmp_path, **limits):
    """A server in a process of its own: its port, and the process."""
    (tmp_path / "server.py").write_text(SERVER)
    reader, writer = os.pipe()
    started = Process(tmp_path / "server.py", limits, stdout=writer, cwd=tmp_path)
    os.close(writer)
    with os.fdopen(reader) as said:
        try:
            yield int(said.readline()), started
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(started.pid, signal.SIGKILL)
            started.end()


def resident(pid):
    """The bytes of memory that a process has."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def push(connection, content, most):
    """Send some bytes again and again until so many are sent, or the server takes no more; return how many."""
    connection.setblocking(False)
    sent, left = 0, memoryview(content)
    with contextlib.suppress(OSError):
        while sent < most and select.select([], [connection], [], 2)[1]:
            count = connection.send(left)
            sent, left = sent + count, left[count:] or memoryview(content)
    return sent


def ends(connection):
    """Whether the server ends a connection, after whatever it sends."""
    connection.settimeout(SECONDS)
    try:
        while connection.recv(2**16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass  # it was reset
    return True


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=SECONDS)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_trailers_without_an_end_are_not_kept(tmp_path, parser):
    """They were: 101 MB on one connection took 2.9 GB, for good."""
    with process(tmp_path, parser=parser) as (port, server), connect(port) as connection:
        before = resident(server.pid)
        connection.sendall(head("POST /v1/predict", "Transfer-Encoding: chunked") + b"5\r\nhello\r\n0\r\n")
        trailers = b"".join(b"x-%d: %s\r\n" % (i, b"v" * 20) for i in range(4000))
        assert push(connection, trailers, 24 * MEGABYTE) < 24 * MEGABYTE
        assert resident(server.pid) - before < 40 * MEGABYTE
        assert status(exchange(port, head("GET /v2/health/live", "Connection: close"))) == 200


def test_pipelined_requests_wait_in_the_client(tmp_path, parser):
    """They waited in the server: 14 MB of them took 1.1 GB, and other clients waited 3.4 s."""
    with process(tmp_path, parser=parser) as (port, server), connect(port) as connection:
        before = resident(server.pid)
        push(connection, head("GET /") * 1000, 12 * MEGABYTE)
        assert resident(server.pid) - before < 60 * MEGABYTE
        assert status(exchange(port, head("GET /v2/health/live", "Connection: close"))) == 200


def test_headers_are_bounded(parser):
    with listening(limits=Limits(parser=parser)) as server:
        found = b"HTTP/1.1 400"
        with contextlib.suppress(ConnectionError):  # the server may close before all is sent
            found = exchange(server.port, head("GET /v2", "X-Long: " + "x" * 10**6))
        assert status(found) == 400


# -- connections that nobody uses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v3", "/v1/streams/a/state", "/v1/streams/a/freeze", "/v2"])
def test_a_body_that_nobody_wants_does_not_hold_a_connection(path, parser):
    with listening(tokens=[token("x" * 16)], limits=Limits(parser=parser)) as server, connect(server.port) as client:
        client.sendall(head(f"POST {path}", "Content-Length: 1000000000") + b"a few bytes")
        assert ends(client)
        while server._server.server_state.connections:
            time.sleep(0.01)


def test_an_early_answer_reaches_a_client_that_sends_its_whole_body_first():
    with listening() as server:
        answer = exchange(server.port, head("POST /v3", f"Content-Length: {MEGABYTE}") + bytes(MEGABYTE))
        assert status(answer) == 404
        assert b"connection: close" in answer


def test_a_connection_without_a_request_is_closed(parser):
    with listening(limits=Limits(head_seconds=0.5, idle_seconds=0.5, parser=parser)) as server:
        for content in (b"", b"GET / HT", head("GET /v2")[:-2], head("GET /v2") + b"GET /"):
            with connect(server.port) as client:
                client.sendall(content)
                assert ends(client)


def test_headers_that_arrive_byte_by_byte_are_not_waited_for(parser):
    with listening(limits=Limits(head_seconds=0.5, parser=parser)) as server, connect(server.port) as client:
        until, ended = time.monotonic() + SECONDS, False
        client.sendall(b"GET / HTTP/1.1\r\nX: ")
        while not ended and time.monotonic() < until:
            time.sleep(0.05)
            try:
                client.sendall(b"x")
            except ConnectionError:
                ended = True
        assert ended


def test_a_client_that_reads_nothing_is_left(parser):
    """It held its connection, and the answers to it, for good."""
    with listening(limits=Limits(send_seconds=0.5, parser=parser)) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        assert push(client, head("GET /page.js") * 100, 64 * MEGABYTE) < 64 * MEGABYTE
        until = time.monotonic() + SECONDS
        while server._server.server_state.connections and time.monotonic() < until:
            time.sleep(0.01)
        assert not server._server.server_state.connections


def test_silent_connections_do_not_keep_others_out():
    """Hundreds of them meant 503 for everybody, until their clients went away."""
    with listening(limits=Limits(connections=8, head_seconds=60.0)) as server, contextlib.ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(connect(server.port))
        until = time.monotonic() + SECONDS
        while (found := status(exchange(server.port, head("GET /v2", "Connection: close")))) == 503:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert found == 200


# -- what comes after the headers --------------------------------------------------------------------------------------


def chunked(path, trailer, *headers):
    body = b"%x\r\n%s\r\n0\r\n%s\r\n\r\n" % (len(BODY), BODY, trailer)
    return head(f"POST {path}", "Transfer-Encoding: chunked", "Connection: close", *headers) + body


@pytest.fixture
def proxied(tmp_path):
    """A function that starts the shipped HAProxy before a server, and returns its port."""
    program = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        pytest.skip("needs haproxy: apt-get install haproxy")
    from test_haproxy import CONFIG, free_ports, with_ports

    with contextlib.ExitStack() as stack:

        def start(server):
            (port,) = free_ports(1)
            text = with_ports(CONFIG, p8000=port, p8101=server.port, p8102=server.port)
            text = text.replace("check inter 1s", "check inter 100ms")
            (tmp_path / "haproxy.cfg").write_text(text)
            proxy = subprocess.Popen([program, "-db", "-f", tmp_path / "haproxy.cfg"], stderr=subprocess.DEVNULL)
            stack.callback(proxy.wait)
            stack.callback(proxy.terminate)
            for _ in range(600):
                with contextlib.suppress(OSError):
                    if status(exchange(port, head("GET /v2/health/ready", "Connection: close"))) == 200:
                        return port
                assert proxy.poll() is None, "HAProxy ended"
                time.sleep(0.05)
            raise AssertionError("HAProxy found no worker in 30 s")

        yield start


def obeyed_trailers(port):
    """The statuses and the streams of requests whose trailers name a token or a stream."""
    secret = "Authorization: Bearer " + "x" * 16
    token_alone = exchange(port, chunked("/v1/predict", secret.encode()))
    named = exchange(port, chunked("/v1/predict", b"x-tribe-stream: cam", secret))
    sized = exchange(port, chunked("/v1/predict", b"content-encoding: gzip", secret))
    return (
        status(token_alone),
        status(named),
        json.loads(named.rpartition(b"\r\n")[2]).get("stream"),
        status(sized) in (200, 400),
    )


def test_trailers_are_not_obeyed(parser):
    """A proxy that checks the headers does not check them."""
    with listening(tokens=[token("x" * 16)], limits=Limits(parser=parser)) as server:
        assert obeyed_trailers(server.port) == (401, 200, None, True)


def test_trailers_are_not_obeyed_behind_the_proxy(proxied):
    with listening(tokens=[token("x" * 16)]) as server:
        assert obeyed_trailers(proxied(server)) == (401, 200, None, True)


def test_paths_are_the_same_to_the_proxy_and_the_workers(proxied):
    """/%6detrics passed the rule against /metrics."""
    with listening() as server:
        port = proxied(server)
        for path in (
            "/metrics",
            "/%6detrics",
            "/%6D%65trics",
            "/v1/%65vents",
            "/v1%2Fstreams",
            "/v1/streams?stored=true",
        ):
            answer = exchange(port, head(f"GET {path}", "Connection: close"))
            assert status(answer) == 404, path
            assert b"ask each worker" in answer, path


def test_a_client_that_sends_no_more_is_answered_behind_the_proxy(proxied):
    """uvicorn closes such a connection; HAProxy keeps it."""
    with listening() as server:
        request = head("POST /v1/streams/half/predict", f"Content-Length: {len(BODY)}") + BODY
        assert status(exchange(proxied(server), request, finish=True)) == 200


# -- the log -----------------------------------------------------------------------------------------------------------


def test_what_is_not_http_is_logged_a_few_times(caplog):
    with listening() as server:
        for _ in range(5 * LOGGED):
            assert status(exchange(server.port, b"this is not HTTP\r\n\r\n")) == 400
    assert len([each for each in caplog.records if "Invalid HTTP" in each.message]) == LOGGED


def test_the_log_says_how_much_it_left_out(caplog):
    log, now = logging.getLogger("tribe.test"), [0.0]
    with LogLimit(lambda: now[0]).on("tribe.test"):
        for i in range(100):
            if i == 99:
                now[0] = 61.0
            log.warning("wrong: %d", i)
    assert [each.message for each in caplog.records][-2:] == [
        "wrong: 9",
        f"wrong: 99 (and {99 - LOGGED} more like it since 61 s)",
    ]


# -- the end -----------------------------------------------------------------------------------------------------------


def test_streams_are_stored_while_clients_hold_on(tmp_path, monkeypatch):
    """Clients without a token delayed the storing of all streams to 20 s."""
    monkeypatch.setattr(server_module, "DRAIN", 60.0)
    held = head("POST /v1/streams/cam/predict", f"Content-Length: {len(BODY)}") + BODY[:-1]
    with contextlib.closing(SqliteStore(tmp_path)) as store, contextlib.closing(SqliteStore(tmp_path)) as other:
        server = serving(Worker(small_fleet(), store)).start()
        assert infer(server, sequence_id="cam").status_code == 200
        with connect(server.port) as client:
            client.sendall(held)
            while not server.app.handlers.bodies.used:
                time.sleep(0.01)
            stopping = threading.Thread(target=server.stop)
            stopping.start()
            until = time.monotonic() + SECONDS
            while other.claim("cam", "another", 10) is None:
                assert time.monotonic() < until
                time.sleep(0.01)
            client.sendall(BODY[-1:])
            answer = b"".join(iter(lambda: client.recv(2**16), b""))
        stopping.join()
    assert status(answer) == 503
    assert b"stops" in answer


# -- who may reach it --------------------------------------------------------------------------------------------------


def test_a_server_that_others_reach_has_tokens_or_says_twice_that_it_needs_none():
    worker = Worker(small_fleet())
    for host in ("0.0.0.0", "::", "192.0.2.1", "cameras.example"):
        with pytest.raises(ValueError, match="open"):
            Listener(Service(worker, MODEL, new_access(None, host)), host=host)
        Listener(Service(worker, MODEL, new_access(None, host), Limits(open=True)), host=host)
        Listener(Service(worker, MODEL, new_access([token("a" * 16)], host)), host=host)
    Listener(Service(worker, MODEL, new_access(None)))


def test_pages_of_other_sites_see_nothing():
    """An image element of any page showed a thumbnail."""
    with listening(limits=Limits(thumbnails=10**6)) as server:
        infer(server, sequence_id="cam")
        url = f"{server.url}/v1/streams/cam/thumbnail"
        for site in ("cross-site", "same-site"):
            refused(web.get(url, headers={"sec-fetch-site": site}), 403, "another site")
        for site in ("same-origin", "none"):
            assert web.get(url, headers={"sec-fetch-site": site}).status_code == 200
        for path in ("/", "/page.js", "/v2", "/v3", "/metrics", "/v1/streams/cam/thumbnail", "/v1/streams/no"):
            answer = web.get(f"{server.url}{path}")
            assert answer.headers["cross-origin-resource-policy"] == "same-origin", path


def test_a_user_with_a_token_gets_in_among_connections_of_strangers():
    """With more connections than the limit every request got 503, also on connections that were there before."""
    limits = Limits(connections=8, head_seconds=60.0)
    with listening(limits=limits, tokens=[token("camera")]) as server, contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connect(server.port)).sendall(b"GET / HTTP/1.1\r\n")
        asked = head("GET /v1/streams", "Authorization: Bearer camera", "Connection: close")
        assert status(exchange(server.port, asked)) == 200
        assert b"connection: close" in exchange(server.port, head("GET /v1/streams")).lower()


def test_a_query_that_is_not_text_is_a_bad_request():
    """The words of the error were made from the whole address, which is not text: a 500 with a traceback."""
    with listening(limits=Limits(parser=PARSERS[-1])) as server:
        target = head("POST /v1/predict?tim~out=1", "Content-Length: 0", "Connection: close").replace(b"~", b"\xa4")
        assert status(exchange(server.port, target)) == 400
