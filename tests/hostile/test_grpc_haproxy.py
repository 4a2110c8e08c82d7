"""gRPC behind a real HAProxy with deploy/haproxy.cfg: what a worker cannot bound."""

import contextlib

import pytest
from http2_frames import SERVICE, Connection, message
from small_server import listening
from test_grpc import OK, UNIMPLEMENTED, call, request
from test_haproxy import CONFIG, HAPROXY, free_ports, proxied, wait_for, with_ports

pytestmark = pytest.mark.skipif(HAPROXY is None, reason="needs haproxy: apt-get install haproxy")
grpc = pytest.importorskip("grpc", reason="grpcio is not installed: make test-serve")
messages = pytest.importorskip("tribe.serve.open_inference_pb2", reason="protobuf is not installed: make test-serve")


@pytest.fixture
def behind(tmp_path):
    """A server and the port of HAProxy for its gRPC: 5 connections one second of silence."""
    with listening(grpc_port=0) as server:
        (front,) = free_ports(1)
        text = with_ports(CONFIG, p8001=front, p8101=server.port, p8201=server.grpc_port)
        for old, new in (
            ("maxconn 500 ", "maxconn 5 "),
            ("client 75s", "client 1s"),
            ("keep-alive 75s", "keep-alive 1s"),
        ):
            assert text.count(old) == 1
            text = text.replace(old, new)
        with proxied(tmp_path, text):
            wait_for(lambda: call(front, "ServerReady", b"") == OK)
            yield server, front


def test_calls_pass_to_the_worker_of_their_stream(behind):
    _, front = behind
    with grpc.insecure_channel(f"127.0.0.1:{front}") as channel:
        infer = channel.unary_unary(SERVICE + "ModelInfer")
        raw = infer(request().SerializeToString(), metadata=[("x-tribe-stream", "cam1")], timeout=60)
        answer = messages.ModelInferResponse.FromString(raw)
        assert answer.parameters["tribe_stream"].string_param == "cam1"
        requests = iter([request("cam1").SerializeToString()] * 3)
        assert len(list(channel.stream_stream(SERVICE + "ModelStreamInfer")(requests, timeout=60))) == 3
        with pytest.raises(grpc.RpcError) as caught:
            infer(b"\xff", timeout=60)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert call(front, "/x") == UNIMPLEMENTED


def test_clients_that_take_no_answer_or_do_nothing_are_ended(behind):
    """The library of gRPC waits for them for good."""
    _, front = behind
    with contextlib.ExitStack() as stack:
        content = message(request().SerializeToString())
        for method in (
            "ModelInfer",
            "ServerLive",
            "ModelInfer",
            "ModelInfer",
            "ServerLive",
            "ModelInfer",
            "ServerLive",
        ):
            stack.enter_context(Connection(front, window=0)).open(method, content=content)
        assert call(front) == OK  # after the first five were closed, and those that waited
