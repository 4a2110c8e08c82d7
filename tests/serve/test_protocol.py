"""Requests of the Open Inference Protocol and of the plain API: what is read, what is refused, and with which words."""

import json
import zlib

import numpy as np
import pytest
import safetensors.numpy
from http_calls import picture
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tribe.serve.protocol import errors, metadata, plain, v2
from tribe.serve.protocol.errors import BadInput, BadRequest, ServeError, TooLarge, WrongType
from tribe.serve.protocol.messages import Answer, ModelInfo, Wanted
from tribe.serve.protocol.names import chosen_stream, stream_name

MODEL = ModelInfo("small", (3, 8, 8), 4, labels=("a", "b", "c", "d"), method="tribe")
IMAGES = np.random.default_rng(0).random((2, 3, 8, 8), np.float32)
KINDS = {"FP32": np.float32, "FP16": np.float16, "FP64": np.float64, "UINT8": np.uint8}


def binary(images=IMAGES, datatype="FP32", parameters=None, **changes):
    """A request with a binary tensor: the body and the length of its JSON."""
    content = images.tobytes()
    tensor = {"name": "images", "shape": images.shape, "datatype": datatype}
    tensor["parameters"] = {"binary_data_size": len(content)}
    text = json.dumps({"inputs": [tensor | changes], "parameters": parameters or {}}).encode()
    return text + content, str(len(text))


def in_json(**changes):
    """A request with all in its JSON; None leaves an entry out."""
    tensor = {"name": "images", "shape": [1, 3, 8, 8], "datatype": "FP32", "data": [0.5] * 192}
    tensor = {name: value for name, value in (tensor | changes).items() if value is not None}
    return json.dumps({"inputs": [tensor]}).encode()


def read(body, length=None, stream=None):
    return v2.parse_infer(body, length, MODEL, stream)


# -- what is read ------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_what_is_sent_is_what_is_read(data):
    datatype = data.draw(st.sampled_from(sorted(KINDS)))
    images = data.draw(arrays.arrays(KINDS[datatype], st.tuples(st.integers(1, 3), *map(st.just, MODEL.shape))))
    start, end, learn = (data.draw(st.booleans()) for _ in range(3))
    stream = data.draw(st.one_of(st.none(), st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}\Z")))
    timeout = data.draw(st.one_of(st.none(), st.integers(1, 2**53)))
    parameters = {"sequence_id": stream, "sequence_start": start, "sequence_end": end, "timeout": timeout}
    request = read(*binary(images, datatype, parameters | {"tribe_learn": learn}))
    assert request.images.dtype == KINDS[datatype]
    assert request.images.tobytes() == images.tobytes()
    assert request.images.shape == images.shape
    found = request.stream, request.start, request.end, request.learn, request.timeout
    assert found == (stream, start, end, learn, timeout)


def test_bytes_are_used_where_they_are():
    body, length = binary()
    buffer = np.empty(64 + len(body), np.uint8)
    place = -(buffer.ctypes.data + int(length)) % 64  # so that the tensor is aligned
    held = buffer[place : place + len(body)]
    held[:] = np.frombuffer(body, np.uint8)
    assert np.shares_memory(read(held, length).images, buffer)
    shifted = np.empty(64 + len(body), np.uint8)
    place = -(shifted.ctypes.data + int(length)) % 64 + 1  # a float that crosses words is copied
    held = shifted[place : place + len(body)]
    held[:] = np.frombuffer(body, np.uint8)
    copied = read(held, length).images
    assert copied.flags.aligned
    assert np.array_equal(copied, IMAGES)


def test_numbers_in_json_are_read_flat_and_nested():
    flat = read(in_json(data=list(range(192)), datatype="UINT8"))
    nested = read(in_json(data=np.arange(192).reshape(1, 3, 8, 8).tolist(), datatype="UINT8"))
    assert np.array_equal(flat.images, np.arange(192, dtype=np.uint8).reshape(1, 3, 8, 8))
    assert np.array_equal(flat.images, nested.images)


def test_bfloat16_is_the_upper_half_of_float32():
    halves = (IMAGES.view(np.uint32) >> 16).astype(np.uint16)
    request = read(*binary(halves, "BF16"))
    assert np.array_equal(request.images.view(np.uint32), halves.astype(np.uint32) << 16)


def test_an_integer_names_a_stream_by_its_digits():
    assert chosen_stream(7, None) == "7"
    assert chosen_stream(7, "7") == "7"
    assert chosen_stream(None, "cam") == "cam"
    assert chosen_stream(0, None) is None  # clients of Triton send it for no sequence
    assert chosen_stream("", None) is None


@pytest.mark.parametrize(
    ("outputs", "default", "binary_output"),
    [
        ([], False, False),
        ([], True, True),
        ([{"name": "logits"}], True, True),
        ([{"name": "logits", "parameters": {"binary_data": True}}], False, True),
    ],
)
def test_outputs_are_returned_as_they_were_asked_for(outputs, default, binary_output):
    request = v2.read_request(IMAGES, {"binary_data_output": default}, outputs, "7", MODEL, None)
    assert request.outputs == (Wanted("logits", binary_output),)
    answer = Answer(
        np.arange(8, dtype=np.float32).reshape(2, 4), "cam", True, 5, 2, {"entropy": 0.5, "x": float("nan")}
    )
    encoded = v2.encode_infer(answer, request, MODEL)
    text = encoded.body if encoded.json_size is None else encoded.body[: encoded.json_size]
    found = json.loads(text)
    assert found["id"] == "7"
    facts = {"tribe_adapted": True, "tribe_stream": "cam", "tribe_clock": 5, "tribe_generation": 2}
    assert found["parameters"] == facts | {"tribe_health_entropy": 0.5}
    (output,) = found["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("logits", "FP32", [2, 4])
    if binary_output:
        assert output["parameters"] == {"binary_data_size": 32}
        assert encoded.body[encoded.json_size :] == answer.logits.tobytes()
    else:
        assert output["data"] == list(range(8))


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"shape": [1, 3, 8]},
            "images have the shape (1, 3, 8); expected (B, 3, 8, 8), where B is the number of images",
        ),
        ({"shape": [0, 3, 8, 8]}, "there are no images"),
        ({"shape": [-1, 3, 8, 8]}, "there are no images"),
        ({"shape": [1, 3, 9, 8]}, "expected (B, 3, 8, 8)"),
        ({"shape": [10**9, 3, 8, 8]}, "expected 1024 at most"),
        ({"shape": "1,3,8,8"}, "inputs.0.shape is '1,3,8,8'; expected a list"),
        ({"datatype": "INT32"}, "datatype 'INT32'; expected FP32, FP16, FP64, UINT8 or BF16"),
        ({"datatype": "BYTES"}, "datatype 'BYTES'"),
        ({"name": "x"}, "expected one input with the name 'images'"),
        ({"data": [0.5] * 191}, "has the shape (191,)"),
        ({"data": [[0.5] * 192]}, "has the shape (1, 192)"),
        ({"data": [[0.5], [0.5, 0.5]]}, "cannot be read"),
        ({"data": ["x"] * 192}, "not all are numbers"),
        ({"data": [True] * 192}, "not all are numbers"),
        ({"data": [300] * 192, "datatype": "UINT8"}, "not all are integers from 0 to 255"),
        ({"data": [0.5] * 192, "datatype": "UINT8"}, "not all are integers from 0 to 255"),
        ({"data": [10**30] * 192}, "an integer has 31 digits"),
        ({"data": None}, "the input has no data"),
        (
            {"parameters": {"binary_data_size": 5}},
            "binary_data_size is 5; FP32 of the shape (1, 3, 8, 8) has 768 bytes",
        ),
        ({"parameters": {"binary_data_size": 768}}, "0 bytes follow the JSON; binary_data_size says 768"),
        ({"parameters": {"shared_memory_region": "x"}}, "shared_memory_region is not supported"),
    ],
)
def test_a_wrong_tensor_is_refused_in_words(change, words):
    with pytest.raises((BadRequest, TooLarge)) as caught:
        read(in_json(**change))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"timeout": 0}, "timeout is 0; expected a number of microseconds, at least 1"),
        ({"timeout": -5}, "timeout is -5"),
        ({"timeout": 1.5}, "timeout is 1.5"),
        ({"timeout": True}, "timeout is True"),
        ({"sequence_start": 1}, "sequence_start is '1'; expected true or false"),
        ({"sequence_id": "../x"}, "sequence_id is '../x'; expected a name"),
        ({"sequence_id": "a\nb"}, r"sequence_id is 'a\nb'"),
        ({"sequence_id": "x" * 10_240}, "sequence_id is 'xxx"),
        ({"sequence_id": 1.5}, "sequence_id is 1.5"),
        ({"sequence_id": False}, "sequence_id is False"),
    ],
)
def test_a_wrong_parameter_is_refused_in_words(parameters, words):
    with pytest.raises(BadRequest) as caught:
        read(*binary(parameters=parameters))
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["", "..", ".", "a/b", "a b", "ä", "a\x00", "-a", "x" * 129, None, True, 2.0, b"x"])
def test_a_wrong_name_is_refused(name):
    with pytest.raises(BadRequest, match="expected a name that has 1 to 128 of the characters"):
        stream_name(name)


def test_two_names_of_a_stream_must_agree():
    with pytest.raises(BadRequest, match="sequence_id is 'a' and the header x-tribe-stream is 'b'"):
        read(*binary(parameters={"sequence_id": "a"}), stream="b")
    assert read(*binary(parameters={"sequence_id": 5}), stream="5").stream == "5"


def test_a_body_that_was_cut_short_is_refused_wherever_it_was_cut():
    body, length = binary()
    for cut in [*range(0, 200, 7), *range(int(length), len(body), 97)]:
        with pytest.raises(BadRequest):
            read(body[:cut], length)
    with pytest.raises(BadInput, match="the body is too long"):
        read(body + b"x", length)
    for wrong in ("", "-1", "1e3", "9" * 20, "²", "0", str(len(body) + 1)):
        with pytest.raises(BadRequest, match="Inference-Header-Content-Length"):
            read(body, wrong)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"nonsense", b"{}", b'{"inputs": []}', b"[" * 10_000, b'{"a": NaN}', b"\xff"]
)
def test_what_is_no_request_is_refused(body):
    with pytest.raises(BadRequest):
        read(body)


def test_too_much_json_is_refused_unread():
    with pytest.raises(TooLarge, match="Send the images as bytes after it"):
        read(b" " * (v2.MOST_JSON + 1))


def test_two_inputs_and_an_unknown_output_are_refused():
    tensor = {"name": "images", "shape": [1, 3, 8, 8], "datatype": "FP32", "data": [0.5] * 192}
    with pytest.raises(BadInput, match="expected one input"):
        read(json.dumps({"inputs": [tensor, tensor]}).encode())
    with pytest.raises(BadRequest, match="there is no output 'boxes'; expected 'logits'"):
        read(json.dumps({"inputs": [tensor], "outputs": [{"name": "boxes"}]}).encode())


def test_every_error_has_a_status_and_words():
    named = {each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, ServeError)}
    assert named == set(errors.ERRORS)
    for each in errors.ERRORS:
        assert 400 <= each.status < 600
        assert each.when
        assert each.code.isupper()
    assert errors.Unavailable("x", 0.2).headers == ((b"retry-after", b"1"),)
    assert errors.Unavailable("x", 1.2).headers == ((b"retry-after", b"2"),)


# -- the plain API -----------------------------------------------------------------------------------------------------


def plainly(body, kind="", query=None, most_pixels=10**6, model=MODEL):
    return plain.parse_predict(body, kind, query or {}, model, stream="cam", most_pixels=most_pixels)


def test_a_picture_is_read_with_its_exact_pixels():
    content, pixels = picture()
    assert np.array_equal(plainly(content).images, pixels)
    assert np.array_equal(plainly(content, "image/png; charset=x").images, pixels)
    grey = plainly(content, model=ModelInfo("grey", (1, 8, 8), 4)).images
    assert grey.shape == (1, 1, 8, 8)
    assert plainly(content, model=ModelInfo("any", (3, None, None), 4)).images.shape == (1, 3, 8, 8)


def test_the_rotation_in_a_picture_is_applied():
    image = pytest.importorskip("PIL.Image")
    exif = image.Exif()
    exif[0x0112] = 6  # turn it to the right to see it upright
    content, pixels = picture("PNG", size=(8, 8), exif=exif)
    assert np.array_equal(plainly(content).images[0], np.rot90(pixels[0], -1, (1, 2)))


def test_a_picture_of_another_size_is_refused_unless_it_may_be_stretched():
    content, _ = picture("JPEG", size=(16, 12))
    with pytest.raises(BadInput, match=r"the picture has 16x12 pixels; expected 8x8. \?fit=resize stretches it"):
        plainly(content)
    assert plainly(content, query={"fit": "resize"}).images.shape == (1, 3, 8, 8)


def test_a_bomb_is_refused_before_it_is_decoded():
    def chunk(kind, content):
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    for side, words in (
        (30_000, "30000x30000|too many pixels"),
        (5_000, "5000x5000 pixels; expected 1,000,000 at most"),
    ):
        head = side.to_bytes(4, "big") * 2 + bytes((8, 2, 0, 0, 0))
        packed = zlib.compress(bytes(10_000))
        bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
        with pytest.raises(TooLarge, match=words):
            plainly(bomb)


def test_a_damaged_picture_is_refused():
    content, _ = picture("JPEG", size=(64, 64))
    for damaged in (content[: len(content) // 2], content[:20], b"\xff\xd8\xff" + bytes(100)):
        with pytest.raises(BadInput):
            plainly(damaged, query={"fit": "resize"})


def test_other_kinds_of_pictures():
    for mode in ("RGBA", "L", "P", "1"):
        assert plainly(picture("PNG", mode=mode)[0]).images.shape == (1, 3, 8, 8)
    with pytest.raises(BadInput, match="mode I;16; expected eight bits a channel"):
        plainly(picture("PNG", mode="I;16")[0])


def test_arrays_are_read():
    assert np.array_equal(plainly(plain.encode_npy(IMAGES)).images, IMAGES)
    assert np.array_equal(
        plainly(plain.encode_npy((IMAGES * 255).astype(np.uint8))).images, (IMAGES * 255).astype("u1")
    )
    assert np.array_equal(plainly(safetensors.numpy.save({"images": IMAGES})).images, IMAGES)
    assert np.array_equal(plainly(safetensors.numpy.save({"images": IMAGES}, {"a": "b"})).images, IMAGES)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (plain.encode_npy(IMAGES)[:-1], "cut short or is too long"),
        (plain.encode_npy(IMAGES) + b"x", "cut short or is too long"),
        (plain.encode_npy(IMAGES)[:50], "npy"),
        (plain.encode_npy(IMAGES[0]), "images have the shape (3, 8, 8)"),
        (plain.encode_npy(IMAGES.astype(np.int64)), "int64"),
        (plain.encode_npy(IMAGES.astype(">f4")), "expected FP32"),
        (safetensors.numpy.save({"images": IMAGES})[:-4], "cut short"),
        (safetensors.numpy.save({"images": IMAGES, "more": IMAGES}), "also holds 'more'"),
        (safetensors.numpy.save({"pictures": IMAGES}), "images is missing"),
        (safetensors.numpy.save({"images": IMAGES.astype(np.int64)}), "images is I64"),
        ((2**60).to_bytes(8, "little") + b"{", "cut short in its header"),
    ],
)
def test_wrong_arrays_are_refused_in_words(body, words):
    with pytest.raises(BadInput) as caught:
        plainly(body)
    assert words in str(caught.value)


def test_what_is_no_picture_and_no_array_is_refused():
    with pytest.raises(WrongType, match="curl --data-binary @file"):
        plainly(b"name=value", "application/x-www-form-urlencoded")
    with pytest.raises(WrongType, match="has the type 'text/html'; expected image/jpeg, image/png"):
        plainly(b"<html>", "text/html")
    with pytest.raises(WrongType, match="no pictures"):
        plainly(picture()[0], model=ModelInfo("signal", (2, 100), 4))


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"timeout": "0"}, "at least 1"),
        ({"timeout": "soon"}, "timeout is 'soon'"),
        ({"learn": "maybe"}, "learn is 'maybe'; expected true or false"),
        ({"fit": "crop"}, "fit is 'crop'; expected resize"),
        ({"stream": "x"}, "there is no query parameter 'stream'"),
    ],
)
def test_a_wrong_query_is_refused_in_words(query, words):
    with pytest.raises(BadRequest) as caught:
        plainly(plain.encode_npy(IMAGES), query=query)
    assert words in str(caught.value)


def test_the_plain_answer_names_classes():
    answer = Answer(np.array([[0, 3, 1, float("inf")]], np.float32), "cam", True, 5, 2, {"entropy": 0.5})
    found = json.loads(plain.encode_predict(answer, MODEL))
    assert found["classes"] == [3]
    assert found["labels"] == ["d"]
    assert found["logits"] == [[0, 3, 1, None]]
    assert found["health"] == {"entropy": 0.5}
    assert (found["stream"], found["adapted"], found["clock"], found["generation"]) == ("cam", True, 5, 2)


def test_metadata_gives_any_size_as_minus_one():
    found = metadata.model_metadata(ModelInfo("any", (3, None, None), 10))
    assert found["inputs"] == [{"name": "images", "datatype": "FP32", "shape": [-1, 3, -1, -1]}]
    assert found["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, 10]}]
