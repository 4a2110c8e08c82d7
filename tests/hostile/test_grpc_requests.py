"""Generated requests of gRPC against one server: each gets a status that says what is wrong, and nothing is logged.

TRIBE_GRPC_REQUESTS and TRIBE_GRPC_SEED set how many the slow test sends, and which.
"""

import logging
import os
import random

import numpy as np
import pytest
import torch
from http2_frames import SERVICE, Connection, message
from small_server import listening, token

import tribe
from tribe.serve.config import Limits
from tribe.testing import small_network

grpc = pytest.importorskip("grpc", reason="grpcio is not installed: make test-serve")
messages = pytest.importorskip("tribe.serve.open_inference_pb2", reason="protobuf is not installed: make test-serve")


COUNT = int(os.environ.get("TRIBE_GRPC_REQUESTS", "10000"))
SEED = int(os.environ.get("TRIBE_GRPC_SEED", "28"))
TOKENS = {
    "learner-of-16-chars": token("learner-of-16-chars", streams="a-", role="learn", most_streams=10),
    "watcher-of-16-chars": token("watcher-of-16-chars", streams="b-", role="predict"),
}
ALLOWED = {  # what a request can be answered with
    *("OK", "INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND", "FAILED_PRECONDITION"),
    *("RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNIMPLEMENTED"),
}
METHODS = ("ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig", "Unknown")
TEXTS = (
    "",
    "small",
    "images",
    "logits",
    "1",
    "a-1",
    "b-1",
    "../x",
    "a" * 129,
    "é\x00\n",
    "x" * 5000,
    "FP32",
    "UINT8",
    "BYTES",
)
NUMBERS = (0, 1, -1, 2, 8, 192, 2**31 - 1, 2**31, -(2**31), 2**53, 2**53 + 1, 2**63 - 1, -(2**63))
BROKEN = ("X-Upper", "x y", "", "te", ":path", "grpc-timeout", "grpc-encoding")  # names of metadata
NAMES = ("sequence_id", "sequence_start", "sequence_end", "timeout", "tribe_learn", "binary_data_output", "binary_data")
NAMES += ("binary_data_size", "shared_memory_region", "classification", "priority", "", "é", "x" * 300)
BODY = 2**16  # bytes of a message
PIXELS = np.random.default_rng(0).integers(0, 256, (2, 3, 8, 8), np.uint8)


class Generator:
    """Requests, of which each number of a seed is always the same."""

    def __init__(self, seed):
        self.draw = random.Random(seed)

    def chance(self, share):
        return self.draw.random() < share

    def valid(self, stream="a-1"):
        """A request that is answered."""
        made = messages.ModelInferRequest(model_name="small")
        images = PIXELS[: self.draw.randint(1, 2)]
        given = made.inputs.add(name="images", shape=images.shape, datatype="UINT8")
        if self.chance(0.2):
            given.contents.uint_contents.extend(images.ravel().tolist())
        else:
            made.raw_input_contents.append(images.tobytes())
        if stream is not None:
            made.parameters["sequence_id"].string_param = stream
        if self.chance(0.3):
            made.id = f"id-{self.draw.randint(0, 50)}"
        if self.chance(0.3):
            made.outputs.add(name="logits")
        return made

    def mutated(self):
        """A request with some fields that are wrong."""
        made = self.valid(f"a-{self.draw.randint(0, 12)}")
        for _ in range(self.draw.randint(1, 3)):
            self.draw.choice((self._names, self._shape, self._parameter, self._content, self._lists))(made)
        return made

    def _text(self):
        return (
            self.draw.choice(TEXTS) if self.chance(0.8) else "".join(map(chr, self.draw.choices(range(1, 900), k=20)))
        )

    def _names(self, made):
        which = self.draw.randint(0, 4)
        if which < 3:
            setattr(made, ("model_name", "model_version", "id")[which], self._text())
        elif made.inputs:
            setattr(made.inputs[0], ("name", "datatype")[which - 3], self._text())

    def _shape(self, made):
        for given in made.inputs:
            shape = list(given.shape)
            if self.chance(0.3):
                shape = self.draw.choices(NUMBERS, k=self.draw.randint(0, 12))
            elif shape:
                shape[self.draw.randrange(len(shape))] = self.draw.choice(NUMBERS)
            del given.shape[:]
            given.shape.extend(shape)

    def _parameter(self, made):
        holders = [made, *made.inputs, *made.outputs]
        value = self.draw.choice(holders).parameters[self.draw.choice(NAMES)]
        kind = self.draw.choice(("bool", "int64", "string", "double", "uint64", None))
        if kind == "bool":
            value.bool_param = self.chance(0.5)
        elif kind == "int64":
            value.int64_param = self.draw.choice(NUMBERS)
        elif kind == "string":
            value.string_param = self._text()
        elif kind == "double":
            value.double_param = self.draw.choice((0.0, -1.5, float("nan"), float("inf"), 1e300))
        elif kind == "uint64":
            value.uint64_param = self.draw.choice((0, 1, 2**53, 2**64 - 1))

    def _content(self, made):
        which = self.draw.randint(0, 4)
        if which == 0:
            made.raw_input_contents.append(self.draw.randbytes(self.draw.choice((0, 1, 192, 768, 5000))))
        elif which == 1:
            del made.raw_input_contents[:]
        elif made.inputs and which == 2:
            made.inputs[0].contents.fp32_contents.extend([float("nan"), 1e30, -1.0] * self.draw.choice((1, 64, 128)))
        elif made.inputs and which == 3:
            made.inputs[0].contents.uint_contents.extend(self.draw.choices((0, 255, 256, 2**32 - 1), k=192))
        elif made.inputs:
            made.inputs[0].contents.bytes_contents.extend([b"", b"x" * 100])

    def _lists(self, made):
        which, count = self.draw.randint(0, 3), self.draw.choice((1, 2, 100))
        for i in range(count):
            if which == 0:
                made.outputs.add(name=self._text())
            elif which == 1 and made.inputs:
                made.inputs.add().CopyFrom(made.inputs[0])
            elif which == 2:
                made.parameters[f"p{i}"].bool_param = True
            else:
                del made.inputs[:]

    def damaged(self, content):
        """Some bytes, of which some are changed, cut out or repeated."""
        content = bytearray(content)
        for _ in range(self.draw.randint(1, 4)):
            at, size = self.draw.randrange(len(content) + 1), self.draw.choice((1, 2, 8, 100))
            which = self.draw.randint(0, 4)
            if which == 0 and at < len(content):
                content[at] ^= 1 << self.draw.randrange(8)
            elif which == 1:
                del content[at:]
            elif which == 2:
                del content[at : at + size]
            elif which == 3:
                content[at:at] = self.draw.randbytes(size)
            else:
                content[at:at] = content[at : at + size]
        return bytes(content)

    def content(self):
        """The bytes of a message, and whether it is a valid one."""
        kind = self.draw.choices(("valid", "mutated", "damaged", "random"), (2, 4, 3, 1))[0]
        if kind == "random":
            return self.draw.randbytes(self.draw.choice((0, 1, 5, 50, 1000, 70_000))), False
        made = self.valid() if kind != "mutated" else self.mutated()
        raw = made.SerializeToString()
        return (self.damaged(raw), False) if kind == "damaged" else (raw, kind == "valid")

    def metadata(self):
        """Pairs of metadata, and whether a valid request with them is answered."""
        if self.chance(0.6):
            return [("authorization", "Bearer learner-of-16-chars")], True
        name = self.draw.choice((*TOKENS, "unknown-token-16ch", ""))
        pairs = [("authorization", self.draw.choice(("Bearer ", "bearer ", "Basic ", "")) + name)]
        if self.chance(0.3):
            pairs.append(("x-tribe-stream", self.draw.choice(("a-1", "a-2", "b-1", "", "../x", "a" * 200))))
        if self.chance(0.2):
            pairs.append(self.draw.choice(pairs))
        if self.chance(0.2):
            pairs.append(
                self.draw.choice((("x-bin", b"\xff\x00"), ("x-long", "y" * 6000), ("authorization-bin", b"\x00")))
            )
        if self.chance(0.2):
            pairs = []
        return pairs, False

    def raw_metadata(self):
        """Pairs that no library of clients sends."""
        values = (
            b"\xff\xfe",
            "é".encode(),
            b"a\x00b",
            b"a\r\nb: c",
            b"",
            b" a-1 ",
            b"x" * 20_000,
            b"Bearer " + b"\x80" * 50,
        )
        names = (
            "authorization",
            "x-tribe-stream",
            "X-Upper",
            "grpc-timeout",
            "grpc-encoding",
            "te",
            ":path",
            "x y",
            "",
        )
        return [(self.draw.choice(names), self.draw.choice(values)) for _ in range(self.draw.randint(1, 3))]


def code_of(error):
    return error.code().name


def send(channel, generator):
    """Send one generated request; its method, its status and the words of the answer."""
    (metadata, known), (content, fine) = generator.metadata(), generator.content()
    which = generator.draw.random()
    try:
        if which < 0.75:
            method = "ModelInfer"
            channel.unary_unary(SERVICE + method)(content, metadata=metadata, timeout=60)
        elif which < 0.9:
            method = "ModelStreamInfer"
            contents = [(content, fine), *(generator.content() for _ in range(generator.draw.randint(0, 3)))]
            fine = all(len(raw) <= BODY for raw, _ in contents)  # a larger one ends the call
            requests = iter([raw for raw, _ in contents])
            answers = list(channel.stream_stream(SERVICE + method)(requests, metadata=metadata, timeout=60))
            assert len(answers) == len(contents)
            for raw, (_, good) in zip(answers, contents, strict=True):
                words = messages.ModelStreamInferResponse.FromString(raw).error_message
                assert "unexpected" not in words
                assert not (good and known and words), words
            return method, "OK", ""
        else:
            method, fine = generator.draw.choice(METHODS), False
            channel.unary_unary(SERVICE + method)(content, metadata=metadata, timeout=60)
    except grpc.RpcError as error:
        if fine and known:
            raise
        return method, code_of(error), error.details()
    return method, "OK", ""


def play(count, seed, caplog):
    """Send so many requests of a seed to a new server, and check each answer; how often there was each status."""
    generator, told = Generator(seed), {}
    with listening(tokens=list(TOKENS.values()), limits=Limits(body=BODY), grpc_port=0) as server:
        address = f"127.0.0.1:{server.grpc_port}"
        with grpc.insecure_channel(address) as channel:
            for number in range(count):
                if generator.chance(0.05):
                    with Connection(server.grpc_port) as connection:
                        headers, (content, _) = generator.raw_metadata(), generator.content()
                        path = generator.draw.choice(
                            ("ModelInfer", "ServerLive", b"/\xff\xfe", "/a b", b"/" + b"x" * 5000)
                        )
                        frames = generator.damaged(message(content)) if generator.chance(0.5) else message(content)
                        status = connection.status(connection.open(path, *headers, content=frames))
                        # The library itself says INTERNAL where the frames are not HTTP/2 or not gRPC.
                        broken = any(name in BROKEN for name, _ in headers) or frames != message(content)
                        assert status not in ({2} if broken else {2, 13}), (number, headers, path)
                    continue
                method, code, words = send(channel, generator)
                assert code in ALLOWED, (number, method, code, words)
                assert len(words) < 1000, (number, words)
                told[code] = told.get(code, 0) + 1
            for name, stream in (("learner-of-16-chars", None), ("watcher-of-16-chars", None)):
                made = Generator(seed).valid(stream)
                headers = [("authorization", f"Bearer {name}")]
                raw = channel.unary_unary(SERVICE + "ModelInfer")(
                    made.SerializeToString(), metadata=headers, timeout=60
                )
                answer = messages.ModelInferResponse.FromString(raw)
                logits = np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(answer.outputs[0].shape)
                source = tribe.adapt(small_network(), "source")
                wanted = source.predict(torch.from_numpy(PIXELS[: len(logits)] / np.float32(255))).numpy()
                np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-5)
        assert server.app.handlers.bodies.used == 0
    noted = [each for each in caplog.records if each.levelno >= logging.WARNING and "not released" not in each.msg]
    assert len(noted) <= 2 + count // 1000, [each.getMessage() for each in noted]  # one a minute
    assert "Traceback" not in caplog.text
    return told


def test_some_generated_requests(caplog):
    told = play(300, SEED, caplog)
    assert {"OK", "INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED"} <= set(told)


@pytest.mark.slow
def test_many_generated_requests(caplog):
    told = play(COUNT, SEED, caplog)
    print(told)
    assert {"OK", "INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND"} <= set(told)
