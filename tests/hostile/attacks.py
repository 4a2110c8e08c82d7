"""A table of attacks: each is a function of one round, which a test or the process `main` repeats.

An attacker has the weakest token that its attack needs, or none. It gets a `Stop`, which holds its connections open.
"""

import contextlib
import gzip
import importlib.util
import json
import math
import os
import random
import select
import socket
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tribe.io import states, tensors

LEAKS = b"Traceback", b"root:", b"root\\x", b"site-packages", b"victim-"  # what no client should read
HELD = 150  # most connections that one attack holds
INFER, SIZE = "/v2/models/compact/infer", "Inference-Header-Content-Length"
SECONDS = 10  # that an attacker waits for an answer
IMAGE = {"name": "images", "shape": [1, 1, 28, 28], "datatype": "UINT8", "parameters": {"binary_data_size": 784}}


def secret(name):
    """The secret of a token."""
    return f"secret-of-{name}".ljust(20, ".")


class Target(NamedTuple):
    """Where a server listens, as far as an attacker knows."""

    port: int
    grpc_port: int | None
    model: str = "compact"

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"


class Stop:
    """When an attack ends: after some rounds, or when `event` is set. It also keeps what the attack opened and saw."""

    def __init__(self, rounds=math.inf, pause=0.0):
        self.rounds, self.pause, self.round, self.event = rounds, pause, 0, threading.Event()
        self.held, self.statuses, self.leaks = [], Counter(), []

    def hold(self, connection):
        """Keep a connection open until the attack ends, or the server closes it."""
        self.held.append(connection)
        if len(self.held) >= HELD:
            poll = select.poll()
            for each in self.held:
                poll.register(each, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
            closed = {number for number, _ in poll.poll(0)}
            for each in [each for each in self.held if each.fileno() in closed]:
                each.close()
                self.held.remove(each)
            while len(self.held) >= HELD and not self.event.wait(0.1):
                self.held.pop(0).close()

    def saw(self, answer):
        """Count the status of an answer, and keep it if it says what no client should know."""
        if answer.startswith(b"HTTP/1.1 "):
            self.statuses[int(answer[9:12])] += 1
        if answer.startswith(b"HTTP/1.1 500") or any(word in answer for word in LEAKS):
            self.leaks.append(answer[:2000])

    def close(self):
        for each in self.held:
            each.close()
        self.held = []


class Attack(NamedTuple):
    """An attack, and the name of the token that it uses; None: it has none."""

    name: str
    token: str | None
    function: Callable[[Target, Stop], None]
    needs_grpc: bool = False


TABLE: dict[str, Attack] = {}


def attack(token=None, needs_grpc=False):
    def register(function):
        TABLE[function.__name__] = Attack(function.__name__, token, function, needs_grpc)
        return function

    return register


def attack_repeatedly(name, target, stop):
    """Attack until the end. A server that closes connections or answers nothing is what an attacker expects."""
    try:
        while stop.round < stop.rounds and not stop.event.is_set():
            with contextlib.suppress(OSError):
                TABLE[name].function(target, stop)
            stop.round += 1
            stop.event.wait(stop.pause)
    finally:
        stop.close()


# -- bytes -------------------------------------------------------------------------------------------------------------


def connected(port, receive=None):
    connection = socket.socket()
    connection.settimeout(SECONDS)
    if receive is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    connection.connect(("127.0.0.1", port))
    return connection


def head(line, token=None, *headers):
    given = [] if token is None else [f"Authorization: Bearer {secret(token)}"]
    return "\r\n".join((f"{line} HTTP/1.1", "Host: 127.0.0.1", *given, *headers, "", "")).encode("latin-1")


def request(line, token=None, body=b"", *headers):
    return head(line, token, f"Content-Length: {len(body)}", "Connection: close", *headers) + body


def read_all(connection, most=2**20):
    found = b""
    while len(found) < most and (part := connection.recv(2**16)):
        found += part
    return found


def exchange(target, stop, content):
    with connected(target.port) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have answered already
            connection.sendall(content)
        answer = read_all(connection)
    stop.saw(answer)
    return answer


def at_once(target, stop, contents):
    """Send requests over a connection each, and read the answers when all are sent."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connected(target.port)) for _ in contents]
        for connection, content in zip(connections, contents, strict=True):
            connection.sendall(content)
        for connection in connections:
            with contextlib.suppress(ConnectionResetError):
                stop.saw(read_all(connection))


def infer(stream, token, images=None, **parameters):
    """A request with some images as bytes, by default a black one."""
    images = np.zeros((1, 1, 28, 28), np.uint8) if images is None else images
    tensor = IMAGE | {"shape": images.shape, "parameters": {"binary_data_size": images.nbytes}}
    text = json.dumps({"inputs": [tensor], "parameters": {"sequence_id": stream, **parameters}}).encode()
    return request(f"POST {INFER}", token, text + images.tobytes(), f"{SIZE}: {len(text)}")


# -- connections that are held -----------------------------------------------------------------------------------------


def holding(name, token=None, content=b"", receive=None, needs_grpc=False):
    """Register an attack that opens connections, sends the same over each, and waits; now and then a byte follows."""

    def hold(target, stop):
        for _ in range(5):
            connection = connected(target.grpc_port if needs_grpc else target.port, receive)
            connection.setblocking(False)
            stop.hold(connection)
            with contextlib.suppress(BlockingIOError):
                connection.send(content)
        for each in stop.held[::7] if content else ():
            with contextlib.suppress(OSError):
                each.send(b"a")

    TABLE[name] = Attack(name, token, hold, needs_grpc)


LONG_BODY = "Content-Length: 4000000"
holding("idle_connections")
holding("slow_headers", None, b"GET /v2 HTTP/1.1\r\nHost: 127.0.0.1\r\nX-")
holding("unread_bodies", None, head("POST /v1/predict", None, LONG_BODY) + b"x" * 1000)
holding("slow_bodies", "predict", head("POST /v1/predict", "predict", LONG_BODY) + b"x" * 1000)
holding("never_reading", None, head("GET /page.js") * 40, receive=2048)
holding("unread_events", "predict", head("GET /v1/events", "predict"), receive=2048)
holding("grpc_connections", needs_grpc=True)


# -- bytes of HTTP -----------------------------------------------------------------------------------------------------


@attack()
def chunked_trailers(target, stop):
    with connected(target.port) as connection:
        connection.sendall(head("POST /v1/predict", None, "Transfer-Encoding: chunked") + b"1\r\nx\r\n0\r\n")
        for _ in range(32):
            connection.sendall(b"t:\r\n" * 2**16)
        connection.sendall(b"\r\n")
        stop.saw(connection.recv(2**16))


@attack()
def pipelining(target, stop):
    with connected(target.port) as connection:
        connection.setblocking(False)
        content, sent = head("GET /v2") * 4000, 0
        while sent < len(content) and select.select([], [connection], [], 1)[1]:  # else it waits for the client to read
            sent += connection.send(content[sent:])


@attack()
def malformed_http(target, stop):
    draw = random.Random(stop.round)
    starts = b"", b"GET ", b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01", b"\0"
    for start in starts * 10:
        exchange(target, stop, start + draw.randbytes(draw.randrange(100)) + b"\r\n\r\n")


@attack()
def wrong_tokens(target, stop):
    for text in ("x", "x" * 10_000, "Bearer", "\xe9\xff", "a" * 20, secret("victim")[:-1], "null", "{}") * 4:
        content = head("GET /v1/streams", None, "Connection: close", f"Authorization: Bearer {text}")
        exchange(target, stop, content)


@attack("predict")
def oversized_names(target, stop):
    name = "n" * 20_000
    for given in (
        request(f"GET /v1/streams/{name}"),
        request(f"POST /v1/streams/{name}/predict", "predict", b"x"),
        request("POST /v1/predict", "predict", b"x", f"X-Tribe-Stream: {name}"),
        infer(name, "predict"),
        request("GET /v2", None, b"", *(f"X-{i}: {name}" for i in range(40))),
        request("GET /v2", None, b"", *(f"X-{i}: {i}" for i in range(5000))),
        request(f"GET /v1/streams?after={name}", "predict"),
    ):
        exchange(target, stop, given)


# -- requests ----------------------------------------------------------------------------------------------------------


@attack("predict")
def repeated_outputs(target, stop):
    given = {"inputs": [IMAGE | {"parameters": None, "data": [0] * 784}], "outputs": [{"name": "logits"}] * 20_000}
    exchange(target, stop, request(f"POST {INFER}", "predict", json.dumps(given).encode()))


@attack("admin")
def gzip_bombs(target, stop):
    bomb, packed = gzip.compress(bytes(32 * 2**20), 9), "Content-Encoding: gzip"
    for path in ("/v1/predict", INFER, "/v1/streams/bad-bomb/predict"):
        at_once(target, stop, [request(f"POST {path}", "predict", bomb, packed)] * 4)
    exchange(target, stop, request("PUT /v1/streams/bad-a-bomb/state", "admin", bomb, packed))


@attack("predict")
def unknown_streams(target, stop):
    for i in range(10):
        exchange(target, stop, infer(f"bad-unknown-{i}", "predict"))
        exchange(target, stop, request(f"GET /v1/streams/bad-unknown-{i}", "predict"))
    exchange(target, stop, request("GET /v1/streams?stored=true", "predict"))


@attack("admin")
def deep_json(target, stop):
    for text in (b"[" * 100_000, b'{"a":' * 100_000, b'{"inputs":' + b"[" * 50_000 + b"]" * 50_000 + b"}"):
        exchange(target, stop, request(f"POST {INFER}", "predict", text))
        exchange(target, stop, request("POST /v1/streams/bad-a-json/rollback", "admin", text[:60_000]))


@attack("learn")
def forty_connections(target, stop):
    images = np.random.default_rng(stop.round).integers(0, 256, (1, 1, 28, 28), np.uint8)
    at_once(target, stop, [infer(f"bad-l-{i % 5}", "learn", images) for i in range(40)])


@attack("learn")
def big_tensors(target, stop):
    draw = np.random.default_rng(stop.round)
    for shape in ((32, 1, 28, 28), (1024, 1, 28, 28), (1, 1, 2000, 2000)):
        exchange(target, stop, infer("bad-l-0", "learn", draw.integers(0, 256, shape, np.uint8)))
    for shape in ([2**31 - 1, 1, 28, 28], [1, 1, 2**30, 2**30], [-1, 1, 28, 28], [0], [1] * 60, [2**62] * 4):
        text = json.dumps({"inputs": [IMAGE | {"shape": shape}]}).encode()
        exchange(target, stop, request(f"POST {INFER}", "learn", text + bytes(784), f"{SIZE}: {len(text)}"))


@attack("learn")
def late_learning(target, stop):
    """Requests that cannot wait are learned later: the queue of those is bounded."""
    images = np.random.default_rng(stop.round).integers(0, 256, (16, 1, 28, 28), np.uint8)
    at_once(target, stop, [infer("bad-l-0", "learn", images, timeout=20_000) for _ in range(20)])


@attack("race")
def creation_races(target, stop):
    at_once(target, stop, [request(f"PUT /v1/streams/bad-r-{i}", "race") for i in range(24)])
    at_once(target, stop, [infer(f"bad-r-{i}", "race") for i in range(24)])


@attack("admin")
def mode_switches(target, stop):
    """Switch the streams of a token, and those of others, between modes and versions."""
    exchange(target, stop, infer("bad-a-mode", "admin"))
    version = "/v2/models/compact/versions/1"
    for path in (
        "/v1/demote",
        "/v1/promote?after=a",
        f"{version}/move",
        f"{version}/back",
        "/v1/streams/bad-a-mode/move",
    ):
        for token in ("admin", "learn", "predict", None):
            for body in (b"", b'{"to": "1"}', b'{"share": 1.0}'):
                exchange(target, stop, request(f"POST {path}", token, body))
    for action in ("demote", "promote", "move", "back"):
        answer = exchange(target, Stop(), request(f"POST /v1/streams/victim-0/{action}", "admin"))
        if not answer.startswith(b"HTTP/1.1 403"):  # it repeats the name that was asked for
            stop.saw(answer or LEAKS[0])


# -- state files -------------------------------------------------------------------------------------------------------


def saved_state(target, stop):
    """A state file of the attacker's own stream."""
    exchange(target, stop, infer("bad-a-good", "admin"))
    answer = exchange(target, stop, request("GET /v1/streams/bad-a-good/state", "admin"))
    if not answer.startswith(b"HTTP/1.1 200"):
        raise OSError("the server gives no state")
    return states.decode(answer.partition(b"\r\n\r\n")[2])


def encoded(saved):
    """A state file with a valid digest, whatever it holds."""
    header = saved._asdict()
    return tensors.encode(states.STATE, header, header.pop("tensors"))


def put_and_use(target, stop, saved):
    """Put a state, and let its stream learn beside those of others."""
    exchange(target, stop, request("PUT /v1/streams/bad-a-bad/state", "admin", encoded(saved)))
    at_once(target, stop, [infer("bad-a-bad", "admin")] * 3)
    for path in ("bad-a-bad", "bad-a-bad/state", "?stored=true"):
        exchange(target, stop, request(f"GET /v1/streams/{path}".replace("/?", "?"), "admin"))
    exchange(target, stop, request("DELETE /v1/streams/bad-a-bad", "admin"))


@attack("admin")
def crafted_states(target, stop):
    saved = saved_state(target, stop)
    names = sorted(name for name, tensor in saved.tensors.items() if not tensor.is_floating_point())
    name = ["guard.watch.estimate.rings.predicted", *names][stop.round % (1 + len(names))]
    for value in (-1, 2**62, 11):
        changed = saved.tensors[name].clone().fill_(value)
        put_and_use(target, stop, saved._replace(tensors=saved.tensors | {name: changed}))


@attack("admin")
def foreign_paths(target, stop):
    saved = saved_state(target, stop)
    path = ("/etc/passwd", "/proc/self/environ", "/dev/zero")[stop.round % 3]
    for field in ("calibration", "rule", "knowledge", "augment"):
        put_and_use(target, stop, saved._replace(fields=saved.fields | {field: path}))
    put_and_use(target, stop, saved._replace(method=f"{path}:Class"))


# -- gRPC --------------------------------------------------------------------------------------------------------------

SERVICE = "/inference.GRPCInferenceService"


class GrpcConnection:
    """A connection with open calls, which `Stop` can hold."""

    def __init__(self, target):
        self.socket = connected(target.grpc_port)
        self.send(4, 0, 0, b"", start=b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")

    def send(self, kind, flags, stream, content, start=b""):
        """Send a frame of HTTP/2."""
        self.socket.sendall(start + struct.pack(">IBBI", len(content), kind, flags, stream)[1:] + content)

    def call(self, number, path):
        """Begin a call; header fields are literals that are not indexed."""
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "a"}
        fields |= {"content-type": "application/grpc", "te": "trailers"}
        texts = [bytes([0, len(a)]) + a.encode() + bytes([len(b)]) + b.encode() for a, b in fields.items()]
        self.send(1, 4, number, b"".join(texts))

    def fileno(self):
        return self.socket.fileno()

    def close(self):
        self.socket.close()


@attack(needs_grpc=True)
def grpc_idle_streams(target, stop):
    connection = GrpcConnection(target)
    stop.hold(connection)
    for number in range(40):
        connection.call(2 * number + 1, f"{SERVICE}/ModelStreamInfer")


@attack(needs_grpc=True)
def grpc_unfinished_messages(target, stop):
    """A call announces a message of 3 MB, of which as much comes as the server lets it send at first."""
    connection = GrpcConnection(target)
    stop.hold(connection)
    connection.call(1, f"{SERVICE}/ModelInfer")
    connection.send(0, 0, 1, struct.pack(">BI", 0, 3 * 2**20))
    for _ in range(4):
        connection.send(0, 0, 1, bytes(16_000))


@attack(needs_grpc=True)
def malformed_protobuf(target, stop):
    import grpc

    draw = random.Random(stop.round)
    with grpc.insecure_channel(f"127.0.0.1:{target.grpc_port}") as channel:
        for method in ("ModelInfer", "ServerLive", "ModelMetadata", "NoSuchMethod"):
            for _ in range(8):
                with contextlib.suppress(grpc.RpcError):
                    channel.unary_unary(f"{SERVICE}/{method}")(draw.randbytes(draw.randrange(200)), timeout=SECONDS)
            with contextlib.suppress(grpc.RpcError):
                list(channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(iter([b"\xff" * 20]), timeout=SECONDS))


def available():
    """The names of the attacks that can run here."""
    has_grpc = importlib.util.find_spec("grpc") is not None
    return [each.name for each in TABLE.values() if has_grpc or not each.needs_grpc]


def main(port, grpc_port, model, names, seconds, pause):
    """Attack in all ways at once, with little of the machine's time: the server's is what an attack should cost."""
    os.nice(19)
    target, stops = Target(port, grpc_port, model), {name: Stop(pause=pause) for name in names}
    threads = [threading.Thread(target=attack_repeatedly, args=(n, target, s), daemon=True) for n, s in stops.items()]
    for thread in threads:
        thread.start()
    threads[0].join(seconds)
    for stop in stops.values():
        stop.event.set()
    for thread in threads:
        thread.join(2 * SECONDS)
    facts = {n: {"rounds": s.round, "statuses": s.statuses, "leaks": repr(s.leaks)} for n, s in stops.items()}
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
