"""What HTTP refuses, gRPC refuses for the same reason, and the other way round."""

import json

import numpy as np
import pytest
from http2_frames import SERVICE
from http_calls import web
from small_server import listening, token

from tribe.serve.config import Limits
from tribe.serve.errors import ServeError

grpc = pytest.importorskip("grpc", reason="grpcio is not installed: make test-serve")
messages = pytest.importorskip("tribe.serve.open_inference_pb2", reason="protobuf is not installed: make test-serve")


TOKENS = [
    token("learner-of-16-chars", streams="a-", role="learn", most_streams=2),
    token("watcher-of-16-chars", streams="a-", role="predict"),
]
LEARNER, WATCHER = ({"authorization": f"Bearer {each.name}"} for each in TOKENS)
IMAGES = np.zeros((1, 3, 8, 8), np.uint8)
SAME = {(error.status, error.code) for error in (ServeError, *ServeError.__subclasses__())} | {(200, "OK")}
CASES = {  # what differs from a request that is answered
    "valid": {},
    "an id": {"id": "1"},
    "a long id": {"id": "x" * 5000},
    "an id that is odd": {"id": "a b\n"},
    "two outputs": {"outputs": [{"name": "logits"}] * 2},
    "an unknown output": {"outputs": [{"name": "boxes"}]},
    "classification": {"outputs": [{"name": "logits", "parameters": {"classification": 3}}]},
    "no input": {"inputs": 0},
    "two inputs": {"inputs": 2},
    "another name": {"name": "pictures"},
    "nine dimensions": {"shape": [1] * 9},
    "a large dimension": {"shape": [1, 3, 8, 2**40]},
    "a negative dimension": {"shape": [1, 3, -8, -8]},
    "no image": {"shape": [0, 3, 8, 8]},
    "too many images": {"images": np.zeros((1025, 3, 8, 8), np.uint8)},
    "too many pixels": {"images": np.zeros((1000, 3, 8, 8), np.uint8)},
    "too large": {"images": np.zeros((900, 3, 8, 8), np.float32)},
    "too few bytes": {"cut": 1},
    "an unknown type": {"datatype": "INT8"},
    "another type": {"datatype": "FP64"},
    "shared memory": {"tensor": {"shared_memory_region": "x"}},
    "another model": {"model": "large"},
    "a stream of others": {"parameters": {"sequence_id": "b-1"}},
    "its stream": {"parameters": {"sequence_id": "a-1"}},
    "a bad name": {"parameters": {"sequence_id": "../x"}},
    "a long name": {"parameters": {"sequence_id": "a" * 129}},
    "a header that contradicts": {"parameters": {"sequence_id": "a-1"}, "headers": {"x-tribe-stream": "a-2"}},
    "an empty header": {"headers": {"x-tribe-stream": ""}},
    "a stream in a header of others": {"headers": {"x-tribe-stream": "b-1"}},
    "a truth that is a number": {"parameters": {"sequence_start": 1}},
    "a truth that is a text": {"parameters": {"tribe_learn": "false"}},
    "no time": {"parameters": {"timeout": 0}},
    "negative time": {"parameters": {"timeout": -1}},
    "too much time": {"parameters": {"timeout": 2**53 + 1}},
    "time as a text": {"parameters": {"timeout": "1"}},
    "time as a fraction": {"parameters": {"timeout": 1.5}},
    "no token": {"user": {}},
    "an unknown token": {"user": {"authorization": "Bearer nobody-knows-this"}},
    "no bearer": {"user": {"authorization": "learner-of-16-chars"}},
    "may not create": {"user": WATCHER, "parameters": {"sequence_id": "a-new"}},
    "may not start": {"user": WATCHER, "parameters": {"sequence_id": "a-1", "sequence_start": True}},
    "may not end": {"user": WATCHER, "parameters": {"sequence_id": "a-1", "sequence_end": True}},
    "may predict": {"user": WATCHER, "parameters": {"sequence_id": "a-1"}},
    "many texts": {"parameters": {f"p{i}": "x" * 2000 for i in range(40)}},
}


@pytest.fixture(scope="module")
def server():
    limits = Limits(body=600_000, pixels=64, request_pixels=62_000)
    with listening(tokens=TOKENS, limits=limits, grpc_port=0) as made:
        for stream in ("a-1", "a-2"):  # as many as the token may have
            assert by_http(made, {"parameters": {"sequence_id": stream}})[0] == 200
        yield made


def parts(case):
    """The tensor of a case with its bytes, and how often it is given."""
    images = case.get("images", IMAGES)
    kind = case.get("datatype", {"u": "UINT8", "f": "FP32"}[images.dtype.kind])
    content = images.tobytes()[: images.nbytes - case.get("cut", 0)]
    tensor = {"name": case.get("name", "images"), "shape": list(case.get("shape", images.shape)), "datatype": kind}
    return tensor, content, case.get("inputs", 1)


def by_http(server, case):
    tensor, content, count = parts(case)
    tensor["parameters"] = {"binary_data_size": len(content), **case.get("tensor", {})}
    head = {"inputs": [tensor] * count, "parameters": case.get("parameters", {})}
    head |= {name: case[name] for name in ("id", "outputs") if name in case}
    text = json.dumps(head).encode()
    sent = {"inference-header-content-length": str(len(text)), **case.get("user", LEARNER), **case.get("headers", {})}
    url = f"{server.url}/v2/models/{case.get('model', 'small')}/infer"
    answer = web.post(url, content=text + content, headers=sent)
    return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]


def by_grpc(server, case):
    def fill(into, values):
        for name, value in values.items():
            kind = {bool: "bool", int: "int64", float: "double", str: "string"}[type(value)]
            setattr(into[name], f"{kind}_param", value)

    tensor, content, count = parts(case)
    made = messages.ModelInferRequest(model_name=case.get("model", "small"), id=case.get("id", ""))
    for _ in range(count):
        fill(made.inputs.add(**tensor).parameters, case.get("tensor", {}))
    for output in case.get("outputs", ()):
        fill(made.outputs.add(name=output["name"]).parameters, output.get("parameters", {}))
    made.raw_input_contents.append(content)
    fill(made.parameters, case.get("parameters", {}))
    metadata = [*case.get("user", LEARNER).items(), *case.get("headers", {}).items()]
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        try:
            channel.unary_unary(SERVICE + "ModelInfer")(made.SerializeToString(), metadata=metadata, timeout=60)
        except grpc.RpcError as error:
            return error.code().name, error.details()
    return "OK", ""


@pytest.mark.parametrize("name", CASES)
def test_a_request_is_answered_or_refused_alike(server, name):
    (status, words), (code, others) = by_http(server, CASES[name]), by_grpc(server, CASES[name])
    assert (status, code) in SAME, (words, others)
    assert status < 500
    assert bool(words) == bool(others) == (status != 200)
    assert (status == 200) == (name.startswith(("valid", "its", "may predict")) or name == "an id")
