"""gRPC under clients that no library of clients is: what it holds for them is bounded, and all others are served."""

import contextlib
import gzip
import logging

import pytest
from hosted_grpc import TOKENS, hosted
from http2_frames import SERVICE, Connection, message
from http_calls import web
from small_server import listening, token

from tribe.serve.config import Limits

grpc = pytest.importorskip("grpc", reason="grpcio is not installed: make test-serve")
messages = pytest.importorskip("tribe.serve.open_inference_pb2", reason="protobuf is not installed: make test-serve")


VICTIM, ATTACKER = TOKENS
OK, INVALID, DEADLINE, EXHAUSTED, UNIMPLEMENTED, UNAVAILABLE, UNAUTHENTICATED = 0, 3, 4, 8, 12, 14, 16
USERS = [token(name, streams=f"{name[:6]}-", role="learn") for name in TOKENS]
MEGABYTE = 2**20


def bearer(name):
    return ("authorization", f"Bearer {name}")


def request(stream=None, **fields):
    """A valid request of one image."""
    made = messages.ModelInferRequest(model_name="small", **fields)
    made.inputs.add(name="images", datatype="UINT8", shape=(1, 3, 8, 8))
    made.raw_input_contents.append(bytes(range(192)))
    if stream is not None:
        made.parameters["sequence_id"].string_param = stream
    return made


def call(port, method="ModelInfer", content=None, *metadata, timeout=60):
    """The status of a call by gRPC's own client."""
    raw = request().SerializeToString() if content is None else content
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(method if method[0] == "/" else SERVICE + method)(
                raw, metadata=metadata, timeout=timeout
            )
        except grpc.RpcError as error:
            return error.code().value[0]
    return OK


def attacks(stack, port, connections, calls, method, *headers, begin=b"", window=2**31 - 1):
    """Begin calls that never end, on some connections; the connections with their calls."""
    begun = []
    for _ in range(connections):
        connection = stack.enter_context(Connection(port, window))
        assert connection.settled()
        begun.append((connection, [connection.open(method, *headers, content=begin, end=False) for _ in range(calls)]))
    for connection, _ in begun:
        assert connection.settled()
    return begun


@pytest.fixture(scope="module")
def server():
    """A server with two tokens, in this process: its log and its budget can be looked at."""
    limits = Limits(body=MEGABYTE, bodies=12 * MEGABYTE, connections=16, body_seconds=60.0)
    with listening(tokens=USERS, limits=limits, grpc_port=0) as made:
        yield made
        assert made.app.handlers.bodies.used == 0


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A server with two tokens, in a process of its own: its memory can be looked at."""
    with hosted(tmp_path_factory.mktemp("small"), body=8 * MEGABYTE, bodies=48 * MEGABYTE) as made:
        assert call(made.grpc_port, "ModelInfer", None, bearer(VICTIM)) == OK
        yield made


def lines(caplog):
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


# -- who calls is asked before anything is read ------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
@pytest.mark.parametrize("content", [None, b"", message(b"\xff" * 9), message(bytes(500)), b"\xff" * 3])
def test_a_stranger_is_refused_before_a_message_is_read(server, caplog, method, content):
    """An idle stream of a stranger was open for good; a message that is not one logged a traceback."""
    for headers in ((), [bearer("another-16-chars!")]):
        with Connection(server.grpc_port) as connection:
            stream = connection.open(method, *headers, content=content, end=False)
            assert connection.status(stream) == UNAUTHENTICATED
    assert lines(caplog) == []


@pytest.mark.parametrize("method", ["ModelInfer", "ModelReady", "ModelMetadata", "ModelConfig"])
def test_a_message_that_cannot_be_read_is_refused_in_words(server, caplog, method):
    valid = request().SerializeToString()
    for content in (b"\xff" * 9, b"\x0a\xff", b"\x0a\x02\xc3\x28", b"\x0b" * 999, valid[:-1], b"\x0a" + b"\xff" * 11):
        status = call(server.grpc_port, method, content, bearer(VICTIM))
        assert status == INVALID
    assert lines(caplog) == []


def test_a_call_without_its_message_is_refused(server, caplog):
    with Connection(server.grpc_port) as connection:
        for method in ("ModelInfer", "ModelReady"):
            assert connection.status(connection.open(method, bearer(VICTIM), content=b"", end=True)) == INVALID
        assert connection.status(connection.open("ModelStreamInfer", bearer(VICTIM), content=b"", end=True)) == OK
    assert lines(caplog) == []


def test_a_name_of_a_method_that_is_not_text_does_not_end_the_server(server, caplog):
    """One such call, without a token, ended gRPC for everybody."""
    for name in (b"/\xff", b"/inference.GRPCInferenceService/\xff\xfe", "/x", "/", "Unknown", "/" + "x" * 5000):
        with Connection(server.grpc_port) as connection:
            assert connection.status(connection.open(name, content=b"", end=True)) == UNIMPLEMENTED
    assert call(server.grpc_port, "ServerLive", b"") == OK
    assert lines(caplog) == []


def test_metadata_that_is_not_text_is_logged_once_without_a_traceback(server, caplog):
    for i in range(50):
        with Connection(server.grpc_port) as connection:
            status = connection.status(connection.open("ModelInfer", ("authorization", b"Bearer \xff"), content=b""))
            assert status == UNAUTHENTICATED, i
    assert len(lines(caplog)) <= 1
    assert caplog.text.count("Traceback") == 0


def test_metadata_that_cannot_be_read_does_not_fill_the_log(small):
    before = small.log.stat().st_size
    odd = [("te", "x"), ("grpc-encoding", "x"), ("grpc-timeout", "x"), ("X", "x"), ("authorization", b"\xff")]
    for pair in odd * 10:
        with Connection(small.grpc_port) as connection:
            connection.status(connection.open("ModelInfer", pair, content=b""))
    assert call(small.grpc_port, "ModelInfer", None, bearer(VICTIM)) == OK
    assert small.log.stat().st_size - before < 1000


@pytest.mark.parametrize("name", ["authorization", "x-tribe-stream"])
def test_metadata_that_names_a_user_or_a_stream_occurs_once(server, name):
    """The same value twice was read; a proxy may have read another."""
    value = {"authorization": f"Bearer {VICTIM}", "x-tribe-stream": "victim-1"}
    first = dict(value)
    assert call(server.grpc_port, "ModelInfer", None, *first.items()) == OK
    assert call(server.grpc_port, "ModelInfer", None, *first.items(), (name, value[name])) == INVALID


# -- calls that do not end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "ModelReady", "ServerLive"])
def test_idle_calls_of_strangers_block_nobody(method):
    """510 of them were enough."""
    with listening(tokens=USERS, grpc_port=0) as server, contextlib.ExitStack() as stack:
        attacks(stack, server.grpc_port, 6, 90, method)
        assert call(server.grpc_port, "ModelInfer", None, bearer(VICTIM)) == OK
        assert call(server.grpc_port, "ServerLive", b"") == OK
        assert web.get(f"{server.url}/v2/health/live").status_code == 200


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_idle_calls_of_one_token_block_no_other(method):
    with listening(tokens=USERS, grpc_port=0) as server, contextlib.ExitStack() as stack:
        attacks(stack, server.grpc_port, 6, 90, method, bearer(ATTACKER))
        for stream in ("victim-1", "victim-2"):
            content = request(stream).SerializeToString()
            assert call(server.grpc_port, "ModelInfer", content, bearer(VICTIM)) == OK
            assert call(server.grpc_port, "ModelStreamInfer", content, bearer(VICTIM)) == OK


def test_idle_streams_block_no_call_of_a_server_without_tokens():
    with listening(grpc_port=0) as server, contextlib.ExitStack() as stack:
        attacks(stack, server.grpc_port, 6, 90, "ModelStreamInfer")
        assert call(server.grpc_port) == OK


def test_answers_that_nobody_takes_block_nobody():
    """The window of HTTP/2 is zero: the answer cannot be sent."""
    limits = Limits(connections=32)
    with listening(tokens=USERS, limits=limits, grpc_port=0) as server, contextlib.ExitStack() as stack:
        attacks(stack, server.grpc_port, 4, 90, "ServerLive", begin=message(b""), window=0)
        name = messages.ModelReadyRequest(name="small").SerializeToString()
        attacks(stack, server.grpc_port, 4, 90, "ModelReady", begin=message(name), window=0)
        content = message(request().SerializeToString())
        attacks(stack, server.grpc_port, 4, 90, "ModelInfer", bearer(ATTACKER), begin=content, window=0)
        assert call(server.grpc_port, "ModelInfer", None, bearer(VICTIM)) == OK


def test_a_message_or_a_stream_that_does_not_go_on_is_ended():
    with listening(limits=Limits(body_seconds=0.2, idle_seconds=0.5), grpc_port=0) as server:
        content = message(request().SerializeToString())
        for method, begin in (("ModelInfer", b""), ("ModelInfer", content[:-1]), ("ModelStreamInfer", content)):
            with Connection(server.grpc_port) as connection:
                assert connection.status(connection.open(method, content=begin, end=False)) == DEADLINE
        assert server.app.handlers.bodies.used == 0


def test_what_a_client_leaves_is_not_counted_for_good(server):
    bodies, content = server.app.handlers.bodies, message(request("attack-1").SerializeToString())
    for method in ("ModelInfer", "ModelStreamInfer"):
        for begin in (b"", content[:-1], content):
            with contextlib.ExitStack() as stack:
                attacks(stack, server.grpc_port, 2, 20, method, bearer(ATTACKER), begin=begin)
    while bodies.used:  # until the server has read that the connections are closed
        assert call(server.grpc_port, "ServerLive", b"") == OK
    assert call(server.grpc_port, "ModelStreamInfer", None, bearer(ATTACKER)) == OK


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_unfinished_messages_take_no_more_than_the_budget(small, method):
    """60 messages of 31 MB, less one byte each, took 1.85 GB."""
    calls, limit = 60, 48 * MEGABYTE
    part = message(bytes(8 * MEGABYTE - 100))[:-1]
    with contextlib.ExitStack() as stack:
        before = small.begin_peak()
        begun = attacks(stack, small.grpc_port, 6, calls // 6, method, bearer(ATTACKER))
        sent = {(i, number): 0 for i, (_, numbers) in enumerate(begun) for number in numbers}
        rounds = 0
        while rounds < 3:  # until the server allows no more bytes
            rounds += 1
            for i, number in sent:
                if count := begun[i][0].send(number, part[sent[i, number] : sent[i, number] + MEGABYTE]):
                    sent[i, number] += count
                    rounds = 0
            assert all(connection.settled() for connection, _ in begun)
        assert sum(sent.values()) < limit
        assert small.memory("VmHWM") - before < limit + 32 * MEGABYTE
        assert call(small.grpc_port, "ModelInfer", None, bearer(VICTIM)) == OK
    while call(small.grpc_port, method, None, bearer(ATTACKER)) != OK:  # until the server knows that they are closed
        assert small.process.poll() is None


def test_a_message_of_many_small_parts_is_refused_before_it_is_read(small):
    """7 MB of empty inputs became more than 400 MB."""
    before, count = small.begin_peak(), 7 * MEGABYTE // 2
    inner = request().inputs[0].SerializeToString() + b"\x22\x00" * (count - MEGABYTE // 4)
    nested = b"\x0a\x05small\x2a" + _varint(len(inner)) + inner
    for content in (b"\x2a\x00" * count, b"\x3a\x00" * count, nested):
        assert call(small.grpc_port, "ModelInfer", content, bearer(ATTACKER)) == EXHAUSTED
        assert call(small.grpc_port, "ModelStreamInfer", content, bearer(ATTACKER)) == OK  # the error is the answer
    assert call(small.grpc_port, "ModelReady", b"\x2a\x00" * count) == EXHAUSTED
    assert small.memory("VmHWM") - before < 80 * MEGABYTE


def _varint(value):
    found = b""
    while value > 127:
        value, found = value >> 7, found + bytes((value & 127 | 128,))
    return found + bytes((value,))


def test_a_message_is_bounded_while_it_is_unpacked(small):
    """60 kB of gzip are 60 MB. The library bounds them."""
    before, bomb = small.begin_peak(), message(gzip.compress(bytes(60 * MEGABYTE)), 1)
    for _ in range(5):
        with Connection(small.grpc_port) as connection:
            headers = bearer(ATTACKER), ("grpc-encoding", "gzip")
            assert connection.settled()
            assert connection.status(connection.open("ModelInfer", *headers, content=bomb)) == EXHAUSTED
    assert small.memory("VmHWM") - before < 40 * MEGABYTE
    with grpc.insecure_channel(f"127.0.0.1:{small.grpc_port}", compression=grpc.Compression.Gzip) as channel:
        content = request().SerializeToString()
        assert channel.unary_unary(SERVICE + "ModelInfer")(content, metadata=[bearer(VICTIM)], timeout=60)


def test_messages_count_in_the_budget_of_bodies(server):
    bodies = server.app.handlers.bodies
    with bodies.hold(bodies.limit - MEGABYTE + 1):  # as bodies of HTTP do
        assert call(server.grpc_port, "ModelInfer", None, bearer(VICTIM)) == UNAVAILABLE
        assert call(server.grpc_port, "ModelStreamInfer", None, bearer(VICTIM)) == UNAVAILABLE
        assert call(server.grpc_port, "ServerLive", b"") == OK
    assert call(server.grpc_port, "ModelInfer", None, bearer(VICTIM)) == OK
    with contextlib.ExitStack() as stack:
        attacks(stack, server.grpc_port, 2, 20, "ModelStreamInfer", bearer(ATTACKER))
        attacks(stack, server.grpc_port, 2, 20, "ModelInfer", bearer(ATTACKER))
        most = 0
        for _ in range(100):  # while the server reads what was sent
            assert call(server.grpc_port, "ServerLive", b"") == OK
            most = max(most, bodies.used)
        assert 0 < most <= bodies.limit * 2 // 3
    while bodies.used:
        assert call(server.grpc_port, "ServerLive", b"") == OK


# -- connections -------------------------------------------------------------------------------------------------------


def test_connections_are_bounded():
    """3,000 were open at the same time."""
    with listening(tokens=USERS, limits=Limits(connections=40), grpc_port=0) as server, contextlib.ExitStack() as stack:
        opened = [stack.enter_context(Connection(server.grpc_port)) for _ in range(400)]
        assert sum(each.settled() for each in opened) == 40
        assert web.get(f"{server.url}/v2/health/live").status_code == 200
        stack.close()
        while call(server.grpc_port, "ServerLive", b"") != OK:  # until the server knows that they are closed
            pass


def test_connections_leave_files_for_http(tmp_path):
    """HTTP could not be reached, and each try to accept a connection was logged: 76 MB in 40 s."""
    with hosted(tmp_path, files=240) as server, contextlib.ExitStack() as stack:
        opened = [stack.enter_context(Connection(server.grpc_port)) for _ in range(400)]
        assert sum(each.settled() for each in opened) == 60
        for _ in range(20):
            assert server.answers_http()
        assert server.log.stat().st_size < 10_000
