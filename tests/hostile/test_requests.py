"""Requests that are made to cost more than they weigh: each is read, or refused in words, before it costs anything."""

import json
import random
import tracemalloc

import numpy as np
import pytest
import safetensors.numpy
import torch

from tribe.serve import errors, plain, protocol
from tribe.serve.config import Limits
from tribe.serve.errors import BadRequest, TooLarge
from tribe.serve.protocol import InferResult, ModelInfo
from tribe.serve.service import Service

MODEL = ModelInfo("small", (3, 8, 8), 4)
ANY = ModelInfo("any", (3, None, None), 4)
MANY = ModelInfo("many", (3, 8, 8), 1000)
TENSOR = {"name": "images", "shape": [1, 3, 8, 8], "datatype": "FP32", "data": [0.5] * 192}


def read(head, model=MODEL):
    """A request that is all JSON, given as a text or as what it says."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    try:
        return protocol.decode_infer(bytearray(text), None, model, None)
    except errors.EXPECTED as error:
        raise errors.as_serve_error(error) from None


def tensors(content, model=MODEL):
    return plain.decode_predict(bytearray(content), "", {}, model, None)


def peak(function, *arguments):
    """The bytes that a call takes at the most, and its error."""
    tracemalloc.start()
    try:
        with pytest.raises(errors.ServeError) as caught:
            function(*arguments)
        return tracemalloc.get_traced_memory()[1], str(caught.value)
    finally:
        tracemalloc.stop()


# -- lists -------------------------------------------------------------------------------------------------------------


def test_an_output_is_asked_for_once_and_by_its_name():
    assert read({"inputs": [TENSOR], "outputs": [{"name": "logits"}]}).images.shape == (1, 3, 8, 8)
    for outputs in ([{"name": "logits"}] * 2, [{"name": "logits"}] * 1000, [{"name": "boxes"}]):
        with pytest.raises(BadRequest, match="output"):
            read({"inputs": [TENSOR], "outputs": outputs})


def test_an_input_is_given_once():
    for inputs in ([], [TENSOR] * 2, [TENSOR] * 1000):
        with pytest.raises(BadRequest, match="length 1"):
            read({"inputs": inputs})


LISTS = {
    "inputs": b'{"inputs":[%s]}' % b",".join([b'{"name":"","shape":[],"datatype":""}'] * 60_000),
    "outputs": b'{"inputs":[],"outputs":[%s]}' % b",".join([b'{"name":"logits"}'] * 60_000),
    "shape": b'{"inputs":[{"name":"images","shape":[%s],"datatype":"FP32"}]}' % b",".join([b"1"] * 10**6),
    **{
        f"data of {each.decode()}": b'{"inputs":[{"name":"images","shape":[1,3,8,8],"datatype":"FP32","data":[%s]}]}'
        % b",".join([each] * 300_000)
        for each in (b"0", b"[]", b"{}", b'""', b"1.5", b"null")
    },
    "nothing that is read": b'{"inputs":[],"x":[%s]}' % b",".join([b"{}"] * 300_000),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_long_list_is_refused_before_it_takes_much_memory(name):
    """A list of empty objects took 24 times its text."""
    taken, words = peak(read, LISTS[name])
    assert taken < 10 * len(LISTS[name])
    assert len(words) < 400


def test_numbers_are_read_only_if_they_are_as_many_as_the_shape_says():
    for data in ([0.5] * 191, [[0.5]] * 192, [[]] * 192, [{}] * 192, [[[0.5] * 64] * 3, []]):
        with pytest.raises(BadRequest, match="data"):
            read({"inputs": [TENSOR | {"data": data}]})
    side = 1000
    with pytest.raises(TooLarge, match="numbers"):
        read({"inputs": [TENSOR | {"shape": [1, 3, side, side], "data": [0] * 2_000_000}]}, ANY)


def test_a_message_is_bounded_before_it_is_read():
    messages = pytest.importorskip("tribe.serve.open_inference_pb2", reason="grpcio and protobuf are not installed")
    from tribe.serve.rpc import decode_message

    def message(count=192, outputs=1, dimensions=(1, 3, 8, 8), parameters=0):
        made = messages.ModelInferRequest()
        tensor = made.inputs.add(name="images", datatype="FP32", shape=dimensions)
        tensor.contents.fp32_contents.extend([0.5] * count)
        for _ in range(outputs):
            made.outputs.add(name="logits")
        for i in range(parameters):
            made.parameters[f"p{i}"].bool_param = True
        return made

    assert decode_message(message(), MODEL, None).images.mean() == 0.5
    for wrong, kind in (
        ({"outputs": 2}, BadRequest),
        ({"dimensions": [1] * 9}, BadRequest),
        ({"parameters": 1000}, BadRequest),
        ({"count": 191}, BadRequest),
        ({"count": 2**20 + 1}, TooLarge),
    ):
        with pytest.raises(kind):
            decode_message(message(**wrong), MODEL, None)


# -- answers -----------------------------------------------------------------------------------------------------------


def test_an_answer_in_json_has_so_many_numbers():
    """1,024 images of 64 pixels asked for 20 MB of text."""
    images = np.zeros((1024, 3, 8, 8), np.uint8)
    tensor = {"name": "images", "shape": images.shape, "datatype": "UINT8"}
    tensor["parameters"] = {"binary_data_size": images.nbytes}
    for binary in (False, True):
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": binary}}).encode()
        body = bytearray(head + images.tobytes())
        if binary:
            asked = protocol.decode_infer(body, str(len(head)), MANY, None)
            content, _ = protocol.encode_infer(InferResult(torch.zeros(1024, 1000)), asked, MANY)
            assert len(content) < 5 * 2**20
        else:
            with pytest.raises(TooLarge, match="1,024,000 numbers"):
                protocol.decode_infer(body, str(len(head)), MANY, None)


# -- pixels ------------------------------------------------------------------------------------------------------------


def every_way(images):
    """A request with the same images in every form that takes arrays."""
    tensor = {"name": "images", "shape": images.shape, "datatype": "UINT8"}
    binary = json.dumps({"inputs": [tensor | {"parameters": {"binary_data_size": images.nbytes}}]}).encode()
    return {
        "bytes": lambda model: protocol.decode_infer(
            bytearray(binary + images.tobytes()), str(len(binary)), model, None
        ),
        "npy": lambda model: tensors(plain.encode_npy(images), model),
        "safetensors": lambda model: tensors(safetensors.numpy.save({"images": images}), model),
    }


@pytest.mark.parametrize("form", ["bytes", "npy", "safetensors"])
def test_tensors_have_the_limits_of_pictures(form):
    model = ModelInfo("any", (3, None, None), 4, most_pixels=100, request_pixels=250)
    for shape, fits in (((2, 3, 10, 10), True), ((3, 3, 10, 10), False), ((1, 3, 1, 101), False)):
        request = every_way(np.zeros(shape, np.uint8))[form]
        if fits:
            assert request(model).images.shape == shape
        else:
            with pytest.raises(TooLarge, match="pixels"):
                request(model)


def test_a_picture_is_as_large_as_a_request_may_be():
    pillow = pytest.importorskip("PIL.Image")
    from http_calls import picture

    assert pillow
    model = ModelInfo("any", (3, None, None), 4, most_pixels=1000, request_pixels=250)
    narrow = ModelInfo("any", (3, None, 64), 4, most_pixels=1000, request_pixels=2000)
    with pytest.raises(TooLarge, match="pixels"):
        tensors(picture(size=(20, 20))[0], model)
    with pytest.raises(TooLarge, match="pixels"):  # it is stretched to a size that its own width decides
        plain.decode_predict(bytearray(picture(size=(1, 100))[0]), "", {"fit": "resize"}, narrow, None)


def test_the_limits_of_a_server_are_those_of_its_model():
    service = Service(None, ANY, limits=Limits(pixels=100, request_pixels=250))
    assert (service.model.most_pixels, service.model.request_pixels) == (100, 250)
    with pytest.raises(ValueError, match="request_pixels"):
        Service(None, MODEL, limits=Limits(request_pixels=63))


# -- anything at all ---------------------------------------------------------------------------------------------------

TEXTS = [
    *b"null true false 0 -1 1.5 1e999 NaN Infinity -0.0 [] {} [[]]".split(),
    b"1" * 5000,
    b"9" * 30,
    b'""',
    b'"images"',
    b'"logits"',
    b'"\\ud800"',
    b'"\\u0000"',
    b'"\xed\xa0\x80"',
    b'"a\\nb"',
    b'"a\nb"',
    b'"../x"',
    b'"' + b"x" * 300 + b'"',
    b"[" * 5000,
    b'{"a":' * 5000,
    b"[" * 300 + b"]" * 300,
    b"[1,3,8,8]",
    b"[1,3,1e3,8]",
    b"[18446744073709551616]",
    b"[0.5,0.5,[0.5]]",
    b'{"binary_data_size":768}',
    b'{"sequence_id":1,"sequence_id":2}',
    b'{"sequence_id":"a","tribe_learn":0,"timeout":-1}',
]
KEYS = [b"inputs", b"outputs", b"parameters", b"id", b"name", b"shape", b"datatype", b"data", b"x", b"in\\u0070uts"]


def text_of(draw, depth=0):
    """A random text that is JSON, or nearly."""
    if depth > 3 or draw.random() < 0.3:
        return draw.choice(TEXTS)
    if draw.random() < 0.7:
        pairs = (b'"%s":%s' % (draw.choice(KEYS), text_of(draw, depth + 1)) for _ in range(draw.randrange(6)))
        return b"{%s}" % b",".join(pairs)
    return b"[%s]" % b",".join(text_of(draw, depth + 1) for _ in range(draw.randrange(4)))


def changed_request(draw):
    """A request in which a part is another one."""
    entries = {name: json.dumps(value).encode() for name, value in TENSOR.items()}
    head = {b"inputs": b"", b"parameters": b'{"sequence_id":"cam"}', b"id": b'"7"', b"outputs": b'[{"name":"logits"}]'}
    for _ in range(draw.randrange(1, 3)):
        if draw.random() < 0.5:
            entries[draw.choice(list(entries))] = draw.choice(TEXTS)
        else:
            head[draw.choice([*head][1:])] = draw.choice(TEXTS)
    tensor = b",".join(b'"%s":%s' % (name.encode(), value) for name, value in entries.items())
    twice = b',"id":"8"' if draw.random() < 0.1 else b""
    head[b"inputs"] = b"[{%s}]" % tensor
    return b"{%s%s}" % (b",".join(b'"%s":%s' % each for each in head.items()), twice)


def only_expected(function, *arguments):
    """Whether a call answers; any error but one in words fails the test."""
    try:
        function(*arguments)
    except errors.EXPECTED as error:
        answer = errors.as_serve_error(error)
        assert 400 <= answer.status < 500
        assert len(str(answer)) < 1000
        str(answer).encode()  # no half of a character
        return False
    return True


def test_whatever_the_json_of_a_request_is_it_is_read_or_refused_in_words():
    draw = random.Random(0)
    answered = 0
    for i in range(4000):
        text = bytearray(text_of(draw) if i % 2 else changed_request(draw))
        if draw.random() < 0.2:
            text[draw.randrange(len(text) + 1) :] = b""
        size = None if draw.random() < 0.7 else draw.choice(["0", "-1", "1e3", "²", str(len(text)), "9" * 5000, "7"])
        stream = draw.choice([None, None, "cam", "", "a\nb", "\x80", "x" * 300])
        answered += only_expected(protocol.decode_infer, text, size, draw.choice([MODEL, ANY]), stream)
    assert 10 < answered < 2000


def test_whatever_a_plain_body_is_it_is_read_or_refused_in_words():
    draw = random.Random(1)
    pixels = np.zeros((1, 3, 8, 8), np.uint8)
    bodies = [plain.encode_npy(pixels), safetensors.numpy.save({"images": pixels}), b"\x89PNG\r\n\x1a\n" + bytes(50)]
    answered = 0
    for _ in range(3000):
        body = bytearray(draw.choice(bodies))
        for _ in range(draw.randrange(3)):
            at = draw.randrange(min(len(body), 140))
            body[at : at + draw.randrange(4)] = draw.randbytes(draw.randrange(4)) if draw.random() < 0.5 else b"9"
        kind = draw.choice(["", "", plain.NPY, plain.SAFETENSORS, "text/x\x80", ";;", "x" * 300])
        query = draw.choice([{}, {}, {"timeout": "9" * 5000}, {"learn": "\x00"}, {"fit": "\x80"}, {"x" * 300: "1"}])
        id = draw.choice([None, "7", "a\nb", "\x80", "x" * 300])
        answered += only_expected(plain.decode_predict, body, kind, query, draw.choice([MODEL, ANY]), "cam", id)
    assert 10 < answered < 1500


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"inputs":[],"inputs":[]}', "length 1"),
        (b'{"inputs":[%s],"id":"1","id":"2"}', "'id' occurs twice"),
        (b'{"inputs":[%s],"id":"1","\\u0069d":"2"}', "'id' occurs twice"),
        (b'{"inputs":[%s],"parameters":{"sequence_id":"a","sequence_id":"b"}}', "'sequence_id' occurs twice"),
        (b'{"inputs":[%s],"x":%s}' % (b"%s", b"[" * 5000), "JSON"),
        (b'{"inputs":[%s],"x":NaN}', "malformed"),
        (b'{"inputs":[%s],"id":"\\ud800"}', "JSON"),
        (b'{"inputs":[%s],"id":"a\\u0000"}', "printable"),
        (b'{"inputs":[%s],"x":%s}' % (b"%s", json.dumps("x" * 70_000).encode()), "65,536"),
    ],
)
def test_strange_json_is_refused_in_words(text, words):
    whole = text.replace(b"%s", json.dumps(TENSOR).encode(), 1)
    with pytest.raises(errors.ServeError, match=words) as caught:
        read(whole)
    assert 400 <= caught.value.status < 500
