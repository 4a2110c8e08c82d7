"""The Open Inference Protocol, version 2: JSON, with tensors in it or as bytes after it.

The header Inference-Header-Content-Length is the length of the JSON; the bytes of the tensors follow. An input that is
sent as bytes has the parameter ``binary_data_size``; an output is returned as bytes if its parameter ``binary_data`` or
the request's ``binary_data_output`` is true. HTTP and gRPC share all that follows the decoding of the message.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from tribe._version import __version__
from tribe.core.validation import looks_like_bytes
from tribe.serve.errors import BadInput, BadRequest, NotFound, TooLarge
from tribe.streams.names import check_request_id, check_stream_name

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview
Parameter = bool | int | float | str  # a value of the parameters of an answer

VERSION = "1"  # of the model, in the protocol's sense, if there is one
INPUT = "images"  # the name of the only input
MAX_JSON = 8 * 2**20  # bytes: parsing more would delay other requests
MAX_HEAD = 2**16  # bytes of JSON beside the numbers of the images
MAX_DIMENSIONS = 8  # of a shape
MAX_NUMBERS, MAX_ANSWER_NUMBERS = 2**20, 2**18  # that are not sent as bytes: in a request, in an answer
DATATYPES = {
    "FP32": torch.float32,
    "FP16": torch.float16,
    "FP64": torch.float64,
    "UINT8": torch.uint8,
    "BF16": torch.bfloat16,
}
EXPECTED = f"expected {', '.join(DATATYPES)}: floating point in [0, 1], or UINT8 from 0 to 255"
SERVER, PLATFORM = "tribe", "tribe_pytorch"
EXTENSIONS = ("binary_tensor_data", "sequence", "sequence(string_id)", "model_configuration", "parameters")
Timeout = Annotated[int, msgspec.Meta(ge=1, le=2**53)]  # microseconds
Size = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
Shape = Annotated[tuple[Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]


OUTPUT = "logits"  # the name of the only output


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that is served, as clients see it."""

    name: str
    shape: tuple[int | None, ...]  # of one image, such as (3, 32, 32); None: any size
    classes: int
    labels: tuple[str, ...] = ()  # names of the classes
    method: str = ""
    most_images: int = 1024  # in one request
    most_pixels: int = 16_000_000  # of one image
    request_pixels: int = 2**22  # of all images of a request
    any_range: bool = False  # whether floating point images may look as if they reach from 0 to 255
    versions: tuple[str, ...] = (VERSION,)  # that are served side by side

    def check(self, name: str, version: str = "") -> None:
        """Raise if this is another model or version."""
        if name != self.name:
            raise NotFound(f"no model {name[:80]!r}; this server has the model {self.name!r}")
        if version not in ("", *self.versions):
            names = ", ".join(map(repr, self.versions))
            raise NotFound(f"model {name!r} has no version {version[:80]!r}; it has {names}. Leave it out for any")

    def check_images(self, shape: tuple[int, ...]) -> None:
        """Raise if images (B, ...) do not fit the model."""
        fits = len(shape) == len(self.shape) + 1 and all(
            size == wanted or (wanted is None and size > 0) for size, wanted in zip(shape[1:], self.shape, strict=True)
        )
        if not fits:
            raise BadInput(f"images have the shape {show_shape(shape)}; expected {self.expected}")
        if not 1 <= shape[0] <= self.most_images:
            error = TooLarge if shape[0] > 1 else BadInput
            raise error(f"there are {shape[0]} images; expected 1 to {self.most_images} in one request")
        self.check_pixels(shape[0], math.prod(shape[2:]))

    def check_pixels(self, images: int, pixels: int) -> None:
        """Raise if images of so many pixels each are too large: what a step computes takes memory for each pixel."""
        if pixels > self.most_pixels:
            raise TooLarge(f"an image has {pixels:,} pixels; expected {self.most_pixels:,} at most")
        if images * pixels > self.request_pixels:
            words = f"the images have {images * pixels:,} pixels together; expected {self.request_pixels:,} at most"
            raise TooLarge(f"{words}. Send fewer or smaller images at once")

    def check_range(self, images: Tensor) -> None:
        """Raise if an image (B, ...) of floating point looks as if it reaches from 0 to 255, or to 65,535.

        What is not finite or far larger passes: a step leaves such images out by itself.
        """
        if self.any_range:
            return
        low, high = images.flatten(1).amin(1), images.flatten(1).amax(1)
        wrong = looks_like_bytes(low, high)
        if bool(wrong.any()):
            i = int(wrong.nonzero()[0])
            words = f"image {i} has floating point values up to {high[i].item():.4g}; expected [0, 1]: divide by 255"
            raise BadInput(f"{words}, or send UINT8. Nothing was learned. The server's limits.any_range allows them")

    def check_answer(self, images: int) -> None:
        """Raise if an answer in JSON would have too many numbers."""
        if images * self.classes > MAX_ANSWER_NUMBERS:
            words = f"the answer has {images * self.classes:,} numbers; expected {MAX_ANSWER_NUMBERS:,} at most in JSON"
            raise TooLarge(f"{words}. Ask for bytes (binary_data, Accept: application/x-npy), or send fewer images")

    @property
    def expected(self) -> str:
        """Return the shape of images, for people."""
        return f"{show_shape(('B', *self.shape))}, where B is the number of images"

    @property
    def sizes(self) -> list[int]:
        """Return the shape of one image, with -1 for any size."""
        return [-1 if size is None else size for size in self.shape]


def show_shape(shape: tuple[int | str | None, ...]) -> str:
    """Return a shape as people write it; any size is ``*``.

    >>> show_shape(("B", 3, None, None))
    '(B, 3, *, *)'
    """
    return f"({', '.join('*' if size is None else str(size) for size in shape)})"


@dataclass(frozen=True, slots=True)
class InferRequest:
    """Images to predict, and the stream that learns from them."""

    images: Tensor  # (B, ...), float32 in [0, 1]
    stream: str | None = None  # None: the source model predicts
    id: str | None = None  # of the request: a second one with the same id does not learn
    start: bool = False  # create the stream if there is none
    end: bool = False  # store the stream and release it afterwards
    timeout: int | None = None  # microseconds until the answer must be there
    learn: bool = True
    binary: bool = False  # return the logits as bytes, not as numbers in JSON
    version: str | None = None  # of the model; None: that of the stream


class InferResult(NamedTuple):
    """The answer to a request."""

    logits: Tensor  # of each image, (B, K)
    adapted: bool = False  # whether the stream has learned from these images (later, perhaps), and is not in shadow
    clock: int | None = None  # steps that the state has taken which predicted, or after the step; None: no stream
    generation: int | None = None  # how often the stream has been claimed; None without a store
    health: dict[str, Any] | None = None  # the report of the stream; None: no stream
    answered: Literal["adapted", "source"] = "adapted"  # which model predicted; the source where a stream is in shadow
    version: str = VERSION  # of the model that predicted


class InferParameters(msgspec.Struct):
    """Parameters of a request."""

    sequence_id: str | int | None = None
    sequence_start: bool = False
    sequence_end: bool = False
    timeout: Timeout | None = None
    tribe_learn: bool = True
    binary_data_output: bool = False


class TensorParameters(msgspec.Struct):
    """Parameters of an input or an output; of those that are not supported only null is read."""

    binary_data_size: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None = None
    binary_data: bool | None = None
    shared_memory_region: None = None
    classification: None = None


class InputTensor(msgspec.Struct):
    """The input of a request."""

    name: str
    shape: Shape
    datatype: str
    parameters: TensorParameters | None = None
    data: msgspec.Raw = msgspec.Raw()  # numbers in JSON; not read before its size is checked


class OutputTensor(msgspec.Struct):
    """An output that a request asks for."""

    name: str
    parameters: TensorParameters | None = None


class InferHead(msgspec.Struct):
    """The JSON of a request."""

    inputs: tuple[InputTensor]
    outputs: Annotated[list[OutputTensor], msgspec.Meta(max_length=1)] | None = None
    parameters: InferParameters | None = None
    id: str | None = None


NUMBER_TEXT = b"0123456789+-.eE, []\t\r\n"  # what numbers in lists are written with
HEAD = msgspec.json.Decoder(InferHead)


def decode_infer(body: Buffer, head_size: str | None, model: ModelInfo, stream_header: str | None) -> InferRequest:
    """Return the request in a body; ``head_size`` is the header Inference-Header-Content-Length, if there is one."""
    size = total = len(body)
    if head_size is not None:
        size = int(head_size) if head_size.isascii() and head_size.isdecimal() and len(head_size) <= 12 else 0
        if not 0 < size <= total:
            raise BadRequest(
                f"the header Inference-Header-Content-Length is {head_size[:40]!r}; expected the number of bytes of "
                f"JSON, 1 to {total}: the body was cut short, or the header is wrong"
            )
    if size > MAX_JSON:
        raise TooLarge(
            f"the request has {size:,} bytes of JSON; expected {MAX_JSON:,} at most. Send the images as bytes after "
            "it, with the parameter binary_data_size"
        )
    view = memoryview(body)
    head = decode_json(bytes(view[:size]), HEAD, lambda head: bytes(head.inputs[0].data))
    request = infer_request(head, view[size:], model, stream_header)
    if not request.binary:
        model.check_answer(len(request.images))
    return request


def decode_json(content: bytes, decoder: "msgspec.json.Decoder[T]", part: Callable[[T], bytes] = lambda _: b"") -> T:
    """Return decoded JSON, in which each key occurs once: a proxy may read the other one.

    What is not read for that is a ``part`` of the text: the numbers of the images. Text that is not UTF-8, or is nested
    too deeply, raises an error of msgspec too.
    """
    try:
        value = decoder.decode(content)
        raw = part(value)
        rest = content.replace(raw, b"0", 1) if raw else content
        if len(rest) > MAX_HEAD:
            raise TooLarge(f"the JSON has {len(rest):,} bytes beside its numbers; expected {MAX_HEAD:,} at most")
        json.loads(rest.decode(), object_pairs_hook=_check_keys, parse_int=str, parse_float=str)
    except msgspec.MsgspecError:
        raise
    except (ValueError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None
    return value


def _check_keys(pairs: list[tuple[str, Any]]) -> None:
    """Raise if an object of JSON has a key twice."""
    names = [name for name, _ in pairs]
    if len(names) > len(set(names)):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise msgspec.DecodeError(f"the key {twice[:40]!r} occurs twice in an object; expected once")


def infer_request(head: InferHead, content: Buffer, model: ModelInfo, stream_header: str | None) -> InferRequest:
    """Return a request from its decoded head and the bytes of its images; empty: they are in the head."""
    parameters = head.parameters or InferParameters()
    binary = parameters.binary_data_output
    for output in head.outputs or ():
        if output.name != OUTPUT:
            raise BadRequest(f"no output {output.name[:40]!r}; expected {OUTPUT!r}")
        if output.parameters is not None and output.parameters.binary_data is not None:
            binary = output.parameters.binary_data
    images = _read_images(head.inputs[0], content, model)
    named = parameters.sequence_id
    # Triton's clients send 0 or "" for no sequence.
    stream = check_stream_name(str(named), "sequence_id") if named not in (None, "", 0) else None
    other = check_stream_name(stream_header, "the header x-tribe-stream") if stream_header is not None else stream
    id = check_request_id(head.id) if head.id else None
    if stream is not None and other != stream:
        raise BadRequest(f"sequence_id is {stream!r} and the header x-tribe-stream is {other!r}; give one name")
    start, end = parameters.sequence_start, parameters.sequence_end
    return InferRequest(images, other, id, start, end, parameters.timeout, parameters.tribe_learn, binary)


def _read_images(given: InputTensor, content: Buffer, model: ModelInfo) -> Tensor:
    """Return the images of a request from writable bytes, little-endian and row by row, or from its JSON."""
    if given.name != INPUT:
        raise BadInput(f"the input is {given.name[:40]!r}; expected one with the name {INPUT!r}")
    shape, size = given.shape, None if given.parameters is None else given.parameters.binary_data_size
    model.check_images(shape)
    if given.datatype not in DATATYPES:
        raise BadInput(f"the images have the datatype {given.datatype[:20]!r}; {EXPECTED}")
    if size is not None:
        expected = DATATYPES[given.datatype].itemsize * math.prod(shape)
        if not size == len(content) == expected:
            raise BadInput(
                f"binary_data_size is {size}, and {len(content)} bytes follow the JSON; {given.datatype} of the shape "
                f"{shape} has {expected}: the body was cut short or is too long"
            )
        values = torch.frombuffer(content, dtype=DATATYPES[given.datatype])
        return as_images(values.reshape(shape), model)
    if content:
        raise BadInput(f"{len(content)} bytes follow the JSON, but the input has no parameter binary_data_size")
    return as_images(_images_from_numbers(bytes(given.data), given.datatype, shape), model)


def as_images(values: Tensor, model: ModelInfo) -> Tensor:
    """Return values (B, ...) as the network takes them: float32 in [0, 1], in aligned memory of their own."""
    if values.dtype == torch.uint8:
        return values / 255
    images = values.to(torch.float32, copy=True)
    model.check_range(images)
    return images


def _images_from_numbers(text: bytes, datatype: str, shape: tuple[int, ...]) -> Tensor:
    """Return values (B, ...) from numbers in JSON, in nested lists or in one. They are counted before they are read."""
    if text in (b"", b"null"):
        raise BadInput(
            "the input has no data; expected numbers in 'data', or bytes with the parameter binary_data_size"
        )
    kinds, expected = ("ui", "integers from 0 to 255") if datatype == "UINT8" else ("uif", "numbers")
    if (count := math.prod(shape)) > MAX_NUMBERS:
        words = f"the data has {count:,} numbers; expected {MAX_NUMBERS:,} at most. Send the images as bytes"
        raise TooLarge(f"{words} after the JSON, with the parameter binary_data_size")
    if text.translate(None, NUMBER_TEXT):
        raise BadInput(f"the data of the images cannot be read; expected {expected} in lists")
    if (found := text.count(b",") + 1) != count:
        raise BadInput(f"the data has {found:,} numbers; expected {count:,}, for the shape {shape}")
    nested = sum(math.prod(shape[:i]) for i in range(len(shape)))
    if text.count(b"[") not in (1, nested):
        raise BadInput(f"the lists of the data do not have the shape {shape}; expected it, or one list of its numbers")
    try:
        array = np.asarray(msgspec.json.decode(text))
    except ValueError as error:
        raise BadInput(f"the data of the images cannot be read: {error}") from None
    if array.shape not in ((count,), shape):
        raise BadInput(f"the data has the shape {array.shape}; expected {shape}, or one list of its numbers")
    if array.dtype.kind not in kinds or (datatype == "UINT8" and not 0 <= array.min() <= array.max() <= 255):
        raise BadInput(f"the data of the images cannot be read; expected {expected}")
    return torch.from_numpy(array).to(DATATYPES[datatype]).reshape(shape)


# -- answers -----------------------------------------------------------------------------------------------------------


def as_numbers(logits: Tensor) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """Return logits (B, K) as float32 on the CPU."""
    array: np.ndarray[Any, np.dtype[np.float32]] = logits.detach().to("cpu", torch.float32).contiguous().numpy()
    return array


def encode_infer(result: InferResult, request: InferRequest, model: ModelInfo) -> tuple[bytes, int | None]:
    """Return the body of an answer, and how many bytes of it are JSON; None: all of them."""
    logits, raw = as_numbers(result.logits), b""
    output: dict[str, Any] = {"name": OUTPUT, "datatype": "FP32", "shape": logits.shape}
    if request.binary:
        raw = logits.tobytes()
        output["parameters"] = {"binary_data_size": len(raw)}
    else:
        output["data"] = logits.ravel().tolist()
    head: dict[str, Any] = {"model_name": model.name, "model_version": result.version}
    if request.id is not None:
        head["id"] = request.id
    head |= {"parameters": answer_parameters(result, request.stream), "outputs": [output]}
    text = msgspec.json.encode(head)  # numbers that are not finite become null
    return (text + raw, len(text)) if request.binary else (text, None)


def answer_parameters(result: InferResult, stream: str | None) -> dict[str, Parameter]:
    """Return the parameters of an answer: facts about the stream."""
    facts: dict[str, Parameter | None] = {"adapted": result.adapted, "answered": result.answered, "stream": stream}
    facts |= {"clock": result.clock, "generation": result.generation}
    parameters = {f"tribe_{name}": value for name, value in facts.items() if value is not None}
    return parameters | {f"tribe_health_{name}": value for name, value in health_facts(result).items()}


def health_facts(result: InferResult) -> dict[str, Parameter]:
    """Return the health of the stream of an answer, as plain values; alarms are a text with commas."""
    facts = {name: ",".join(v) if name == "alarms" else v for name, v in (result.health or {}).items()}
    return {
        name: value
        for name, value in facts.items()
        if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
    }


# -- metadata ----------------------------------------------------------------------------------------------------------


def server_metadata() -> dict[str, Any]:
    """Return the answer of ``GET /v2``."""
    return {"name": SERVER, "version": __version__, "extensions": EXTENSIONS}


def model_metadata(model: ModelInfo) -> dict[str, Any]:
    """Return the answer of ``GET /v2/models/{model}``; -1 is any size."""
    return {
        "name": model.name,
        "versions": list(model.versions),
        "platform": PLATFORM,
        "inputs": [{"name": INPUT, "datatype": "FP32", "shape": [-1, *model.sizes]}],
        "outputs": [{"name": OUTPUT, "datatype": "FP32", "shape": [-1, model.classes]}],
    }


def model_config(model: ModelInfo) -> dict[str, Any]:
    """Return the answer of ``GET /v2/models/{model}/config``, as far as clients of Triton read it."""
    return {
        "name": model.name,
        "platform": PLATFORM,
        "backend": SERVER,
        "max_batch_size": model.most_images,
        "input": [{"name": INPUT, "data_type": "TYPE_FP32", "dims": model.sizes}],
        "output": [{"name": OUTPUT, "data_type": "TYPE_FP32", "dims": [model.classes]}],
        "parameters": {"method": {"string_value": model.method}},
    }
