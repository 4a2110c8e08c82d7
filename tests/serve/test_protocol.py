"""Requests of the Open Inference Protocol and of the plain API: what is read, and what is refused."""

import contextlib
import dataclasses
import json
import zlib

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from http_calls import picture
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tribe.serve import errors, plain, protocol
from tribe.serve.errors import BadInput, BadRequest, ServeError, TooLarge, WrongType
from tribe.serve.protocol import InferRequest, InferResult, ModelInfo

MODEL = ModelInfo("small", (3, 8, 8), 4, labels=("a", "b", "c", "d"), method="tribe")
IMAGES = np.random.default_rng(0).random((2, 3, 8, 8), np.float32)
KINDS = {"FP32": np.float32, "FP16": np.float16, "FP64": np.float64, "UINT8": np.uint8}
RESULT = InferResult(
    torch.arange(8.0).reshape(2, 4), True, 5, 2, {"entropy": 0.5, "x": float("nan"), "alarms": ["black", "dark"]}
)


def binary(images=IMAGES, datatype="FP32", parameters=None, **changes):
    """A request with a binary tensor: the body and the length of its JSON."""
    content = images.tobytes()
    tensor = {"name": "images", "shape": images.shape, "datatype": datatype}
    tensor["parameters"] = {"binary_data_size": len(content)}
    text = json.dumps({"inputs": [tensor | changes], "parameters": parameters or {}}).encode()
    return bytearray(text + content), str(len(text))


def in_json(**changes):
    """A request with all in its JSON; None leaves an entry out."""
    tensor = {"name": "images", "shape": [1, 3, 8, 8], "datatype": "FP32", "data": [0.5] * 192}
    tensor = {name: value for name, value in (tensor | changes).items() if value is not None}
    return bytearray(json.dumps({"inputs": [tensor]}).encode())


def read(body, length=None, stream=None):
    return answered(protocol.decode_infer, body, length, MODEL, stream)


def answered(decode, *arguments):
    """The result of a function, or its error as clients get it."""
    try:
        return decode(*arguments)
    except errors.EXPECTED as error:
        raise errors.as_serve_error(error) from error


# -- what is read ------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_request_is_read_as_it_was_sent(data):
    datatype = data.draw(st.sampled_from(sorted(KINDS)))
    images = data.draw(arrays.arrays(KINDS[datatype], st.tuples(st.integers(1, 3), *map(st.just, MODEL.shape))))
    start, end, learn = (data.draw(st.booleans()) for _ in range(3))
    stream = data.draw(st.one_of(st.none(), st.from_regex(r"\A[A-Za-z1-9][A-Za-z0-9._:@-]{0,127}\Z")))
    timeout = data.draw(st.one_of(st.none(), st.integers(1, 2**53)))
    parameters = {"sequence_id": stream, "sequence_start": start, "sequence_end": end, "timeout": timeout}
    body, length = binary(images, datatype, parameters | {"tribe_learn": learn})
    any_range = dataclasses.replace(MODEL, any_range=True)
    request = answered(protocol.decode_infer, body, length, any_range, None)
    values = torch.from_numpy(images)
    wanted = values / 255 if datatype == "UINT8" else values.float()
    assert request.images.shape == images.shape
    assert torch.equal(request.images.nan_to_num(), wanted.nan_to_num())
    found = request.stream, request.start, request.end, request.learn, request.timeout
    assert found == (stream, start, end, learn, timeout)


def test_images_have_aligned_memory_of_their_own():
    body, length = binary()
    images = read(body, length).images
    body[:] = bytes(len(body))
    assert images.data_ptr() % 64 == 0
    assert np.array_equal(images.numpy(), IMAGES)


def test_numbers_in_json_are_read_flat_and_nested():
    flat = read(in_json(data=list(range(192)), datatype="UINT8")).images
    nested = read(in_json(data=np.arange(192).reshape(1, 3, 8, 8).tolist(), datatype="UINT8")).images
    assert torch.equal(flat, torch.arange(192.0).reshape(1, 3, 8, 8) / 255)
    assert torch.equal(flat, nested)


def test_bfloat16_is_the_upper_half_of_float32():
    halves = (IMAGES.view(np.uint32) >> 16).astype(np.uint16)
    request = read(*binary(halves, "BF16"))
    assert np.array_equal(request.images.numpy().view(np.uint32), halves.astype(np.uint32) << 16)


@pytest.mark.parametrize(
    ("parameter", "header", "stream"),
    [(7, None, "7"), (7, "7", "7"), (None, "cam", "cam"), (0, None, None), ("", None, None), (None, None, None)],
)
def test_a_stream_is_named_by_a_parameter_or_a_header(parameter, header, stream):
    """Clients of Triton send 0 or an empty text for no sequence."""
    assert read(*binary(parameters={"sequence_id": parameter}), stream=header).stream == stream


@pytest.mark.parametrize(
    ("outputs", "default", "expected"),
    [
        (None, False, False),
        (None, True, True),
        ([{"name": "logits"}], True, True),
        ([{"name": "logits", "parameters": {"binary_data": True}}], False, True),
        ([{"name": "logits", "parameters": {"binary_data": False}}], True, False),
    ],
)
def test_outputs_are_returned_as_they_were_asked_for(outputs, default, expected):
    head = {"parameters": {"binary_data_output": default, "sequence_id": "cam"}, "outputs": outputs, "id": "7"}
    head["inputs"] = json.loads(in_json())["inputs"]
    request = read(json.dumps(head).encode())
    assert request.binary == expected
    content, size = protocol.encode_infer(RESULT, request, MODEL)
    found = json.loads(content[:size])
    assert found["id"] == "7"
    facts = {
        "tribe_adapted": True,
        "tribe_answered": "adapted",
        "tribe_stream": "cam",
        "tribe_clock": 5,
        "tribe_generation": 2,
    }
    assert found["parameters"] == facts | {"tribe_health_entropy": 0.5, "tribe_health_alarms": "black,dark"}
    (output,) = found["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("logits", "FP32", [2, 4])
    if expected:
        assert output["parameters"] == {"binary_data_size": 32}
        assert content[size:] == RESULT.logits.numpy().tobytes()
    else:
        assert output["data"] == list(range(8))


def test_metadata_gives_any_size_as_minus_one():
    found = protocol.model_metadata(ModelInfo("any", (3, None, None), 10))
    assert found["inputs"] == [{"name": "images", "datatype": "FP32", "shape": [-1, 3, -1, -1]}]
    assert found["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, 10]}]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"shape": [1, 3, 8]}, "(B, 3, 8, 8)"),
        ({"shape": [0, 3, 8, 8]}, "there are 0 images"),
        ({"shape": [-1, 3, 8, 8]}, "there are -1 images"),
        ({"shape": [1, 3, 9, 8]}, "(B, 3, 8, 8)"),
        ({"shape": [10**9, 3, 8, 8]}, "1024"),
        ({"shape": "1,3,8,8"}, "inputs[0].shape"),
        ({"datatype": "INT32"}, "'INT32'"),
        ({"datatype": "BYTES"}, "'BYTES'"),
        ({"name": "x"}, "'images'"),
        ({"data": [0.5] * 191}, "191 numbers"),
        ({"data": [[0.5] * 192]}, "the shape"),
        ({"data": [[0.5], [0.5] * 191]}, "lists"),
        ({"data": ["x"] * 192}, "numbers"),
        ({"data": [True] * 192}, "numbers"),
        ({"data": [300] * 192, "datatype": "UINT8"}, "0 to 255"),
        ({"data": [0.5] * 192, "datatype": "UINT8"}, "0 to 255"),
        ({"data": [10**30] * 192}, "numbers"),
        ({"data": None}, "no data"),
        ({"parameters": {"binary_data_size": 5}}, "768"),
        ({"parameters": {"binary_data_size": 768}}, "768"),
        ({"shape": [1] * 9}, "inputs[0].shape"),
        ({"shape": [1, 3, 10**4000, 8]}, "inputs[0].shape"),
        ({"parameters": {"binary_data_size": -1}}, "binary_data_size"),
        ({"parameters": {"shared_memory_region": "x"}}, "shared_memory_region"),
    ],
)
def test_a_wrong_tensor_is_refused(change, word):
    with pytest.raises((BadRequest, TooLarge)) as caught:
        read(in_json(**change))
    assert word in str(caught.value)


@pytest.mark.parametrize("name", ["timeout", "sequence_start", "sequence_id"])
@pytest.mark.parametrize("value", [-5, 1.5, True, "../x", "a\nb", "x" * 10_240, [], {}])
def test_a_wrong_parameter_is_refused(name, value):
    if (name, value) in (("sequence_start", True),):
        return
    if name == "sequence_id" and value == -5:
        value = "-5"
    with pytest.raises(BadRequest, match=name) as caught:
        read(*binary(parameters={name: value}))
    assert len(str(caught.value)) < 400


def test_a_body_that_was_cut_short_is_refused_wherever_it_was_cut():
    body, length = binary()
    for cut in [*range(0, 200, 7), *range(int(length), len(body), 97)]:
        with pytest.raises(BadRequest):
            read(body[:cut], length)
    with pytest.raises(BadInput, match="too long"):
        read(body + b"x", length)
    for wrong in ("", "-1", "1e3", "9" * 20, "²", "0", str(len(body) + 1)):
        with pytest.raises(BadRequest, match="Inference-Header-Content-Length"):
            read(body, wrong)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_a_damaged_request_is_read_or_refused(seed, plainly_sent):
    rng = np.random.default_rng(seed)
    body, length = binary(IMAGES[:1, :, :2, :2])
    if plainly_sent:
        body = bytearray([plain.encode_npy(IMAGES), safetensors.numpy.save({"images": IMAGES})][seed % 2])
    for _ in range(rng.integers(1, 4)):
        place = int(rng.integers(0, min(len(body), 200)))
        body[place : place + int(rng.integers(0, 4))] = rng.bytes(int(rng.integers(0, 4)))
    with contextlib.suppress(ServeError):
        request = plainly(body) if plainly_sent else read(body, length)
        MODEL.check_images(tuple(request.images.shape))


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"nonsense", b"{}", b'{"inputs": []}', b"[" * 10_000, b'{"a": NaN}', b"\xff"]
)
def test_bytes_that_are_not_a_request_are_refused(body):
    with pytest.raises(BadRequest):
        read(body)


def test_too_much_json_is_refused_unread():
    with pytest.raises(TooLarge, match="binary_data_size"):
        read(b" " * (protocol.MAX_JSON + 1))


def test_two_inputs_an_unknown_output_and_a_long_id_are_refused():
    (tensor,) = json.loads(in_json())["inputs"]
    with pytest.raises(BadRequest, match="length 1"):
        read(json.dumps({"inputs": [tensor, tensor]}).encode())
    with pytest.raises(BadRequest, match="'boxes'"):
        read(json.dumps({"inputs": [tensor], "outputs": [{"name": "boxes"}]}).encode())
    with pytest.raises(BadRequest, match="256"):
        read(json.dumps({"inputs": [tensor], "id": "x" * 257}).encode())


def test_a_busy_server_says_when_to_try_again_in_whole_seconds():
    for seconds, header in ((0.2, "1"), (1.2, "2")):
        assert errors.Unavailable("x", seconds).headers == {"retry-after": header}


# -- the plain API -----------------------------------------------------------------------------------------------------


def plainly(body, kind="", query=None, max_pixels=10**6, model=MODEL):
    limited = dataclasses.replace(model, most_pixels=max_pixels)
    return answered(plain.decode_predict, bytearray(body), kind, query or {}, limited, "cam")


def test_a_picture_is_read_with_its_exact_pixels():
    content, pixels = picture()
    wanted = torch.from_numpy(pixels) / 255
    assert torch.equal(plainly(content).images, wanted)
    assert torch.equal(plainly(content, "image/png; charset=x").images, wanted)
    assert plainly(content, model=ModelInfo("grey", (1, 8, 8), 4)).images.shape == (1, 1, 8, 8)
    assert plainly(content, model=ModelInfo("any", (3, None, None), 4)).images.shape == (1, 3, 8, 8)
    for mode in ("RGBA", "L", "P", "1"):
        assert plainly(picture("PNG", mode=mode)[0]).images.shape == (1, 3, 8, 8)


def test_the_rotation_in_a_picture_is_applied():
    image = pytest.importorskip("PIL.Image")
    exif = image.Exif()
    exif[0x0112] = 6  # turn it to the right to see it upright
    content, pixels = picture("PNG", size=(8, 8), exif=exif)
    turned = np.rot90(pixels[0], -1, (1, 2)).copy()
    assert torch.equal(plainly(content).images[0], torch.from_numpy(turned) / 255)


def test_a_picture_of_another_size_is_refused_unless_it_may_be_stretched():
    content, _ = picture("JPEG", size=(16, 12))
    with pytest.raises(BadInput, match="16x12"):
        plainly(content)
    assert plainly(content, query={"fit": "resize"}).images.shape == (1, 3, 8, 8)


def test_a_bomb_is_refused_before_it_is_decoded():
    def chunk(kind, content):
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    for side in (30_000, 5_000):
        head = side.to_bytes(4, "big") * 2 + bytes((8, 2, 0, 0, 0))
        packed = zlib.compress(bytes(10_000))
        bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
        with pytest.raises(TooLarge, match="pixels"):
            plainly(bomb)


def test_damaged_and_deep_pictures_are_refused():
    content, _ = picture("JPEG", size=(64, 64))
    scans = content[:-2] + b"\xff\xda" * 100 + content[-2:]
    for damaged in (content[: len(content) // 2], content[:20], b"\xff\xd8\xff" + bytes(100), scans):
        with pytest.raises(BadInput):
            plainly(damaged, query={"fit": "resize"})
    with pytest.raises(BadInput, match="I;16"):
        plainly(picture("PNG", mode="I;16")[0])


def test_arrays_are_read():
    wanted, pixels = torch.from_numpy(IMAGES), (IMAGES * 255).astype(np.uint8)
    assert torch.equal(plainly(plain.encode_npy(IMAGES)).images, wanted)
    assert torch.equal(plainly(plain.encode_npy(pixels)).images, torch.from_numpy(pixels) / 255)
    assert torch.equal(plainly(safetensors.numpy.save({"images": IMAGES})).images, wanted)
    assert torch.equal(plainly(safetensors.numpy.save({"images": IMAGES}, {"a": "b"})).images, wanted)
    halves = wanted.to(torch.bfloat16)
    assert torch.equal(plainly(safetensors.torch.save({"images": halves})).images, halves.float())


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (plain.encode_npy(IMAGES)[:-1], "cut short"),
        (plain.encode_npy(IMAGES) + b"x", "long"),
        (plain.encode_npy(IMAGES)[:50], "npy"),
        (plain.encode_npy(IMAGES).replace(b"(2, 3, 8, 8)", b"(2, 3, 8,99)"), "cut short"),
        (plain.encode_npy(IMAGES[0]), "(3, 8, 8)"),
        (plain.encode_npy(IMAGES.astype(np.int64)), "int64"),
        (plain.encode_npy(IMAGES.astype(">f4")), "FP32"),
        (plain.encode_npy(np.array(["x"])), "FP32"),
        (safetensors.numpy.save({"images": IMAGES})[:-4], "cut short"),
        (safetensors.numpy.save({"images": IMAGES, "more": IMAGES}), "'more'"),
        (safetensors.numpy.save({"x": IMAGES}), "'x'"),
        (safetensors.numpy.save({"images": IMAGES.astype(np.int64)}), "int64"),
        (b"\x00" * 8 + b"{", "safetensors"),
    ],
)
def test_a_wrong_array_is_refused(body, word):
    with pytest.raises(BadInput) as caught:
        plainly(body)
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("query", "word"),
    [
        ({"timeout": "0"}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"learn": "perhaps"}, "learn"),
        ({"fit": "crop"}, "fit"),
        ({"stream": "cam"}, "stream"),
    ],
)
def test_a_wrong_query_is_refused(query, word):
    with pytest.raises(BadRequest, match=word):
        plainly(plain.encode_npy(IMAGES), query=query)


def test_a_body_of_another_type_is_refused():
    for body, kind in ((b"hello", ""), (b"hello", "text/plain"), (plain.encode_npy(IMAGES), "application/json")):
        with pytest.raises(WrongType):
            plainly(body, kind)
    with pytest.raises(WrongType, match="npy"):
        plainly(picture()[0], model=ModelInfo("signal", (12,), 4))


def test_the_plain_answer_names_classes():
    result = RESULT._replace(logits=torch.tensor([[0, 3, 1, float("inf")]]))
    found = json.loads(plain.encode_predict(result, InferRequest(torch.zeros(1), "cam"), MODEL))
    assert found["classes"] == [3]
    assert found["labels"] == ["d"]
    assert found["logits"] == [[0, 3, 1, None]]
    assert found["health"] == {"entropy": 0.5, "alarms": "black,dark"}
    assert (found["stream"], found["adapted"], found["clock"], found["generation"]) == ("cam", True, 5, 2)
