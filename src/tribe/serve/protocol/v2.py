"""The Open Inference Protocol, version 2, over HTTP: JSON, with tensors in it or as bytes after it.

The header Inference-Header-Content-Length is the length of the JSON; the bytes of the tensors follow. An input that is
sent as bytes has the parameter ``binary_data_size``; an output is returned as bytes if its parameter ``binary_data`` or
the request's ``binary_data_output`` is true.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from tribe.fields import document, is_whole
from tribe.io import json_files
from tribe.serve.protocol.datatypes import EXPECTED, byte_size, from_bytes, from_numbers
from tribe.serve.protocol.errors import BadInput, BadRequest, TooLarge
from tribe.serve.protocol.messages import INPUT, VERSION, Answer, Images, ModelInfo, Request, Wanted
from tribe.serve.protocol.names import chosen_stream, request_id

Buffer = Any  # bytes, a bytearray, a memoryview or an array of bytes
MOST_JSON = 8 * 2**20  # bytes: to parse more would hold up other requests
MOST_TIMEOUT = 2**53  # microseconds
SCHEMA = {
    "id?": (str, None),
    "parameters?": (dict, None),
    "inputs": [
        {"name": str, "shape": [int], "datatype": str, "parameters?": (dict, None), "data?": (list, None)},
    ],
    "outputs?": ([{"name": str, "parameters?": (dict, None)}], None),
}
PLACE = "the JSON of the request"  # what errors call it
UNSUPPORTED = ("shared_memory_region", "classification")
SWITCHES = ("sequence_start", "sequence_end", "binary_data_output", "tribe_learn", "binary_data")


class Encoded(NamedTuple):
    """The body of an answer, and how many bytes of it are JSON."""

    body: bytes
    json_size: int | None


document(
    Encoded,
    body="JSON, then the bytes of the tensors",
    json_size="the value of Inference-Header-Content-Length; None: all of the body is JSON",
)


def parse_infer(body: Buffer, header_length: str | None, model: ModelInfo, stream_header: str | None = None) -> Request:
    """The request in a body.

    Args:
        body: all of it.
        header_length: the value of the header Inference-Header-Content-Length, if there is one.
        model: the model that the images are for.
        stream_header: the value of the header x-tribe-stream, if there is one.
    """
    size = len(body) if header_length is None else _length(header_length, len(body))
    if size > MOST_JSON:
        raise TooLarge(
            f"the request has {size:,} bytes of JSON; expected {MOST_JSON:,} at most. Send the images as bytes after "
            "it, with the parameter binary_data_size"
        )
    try:
        found = json_files.parse(bytes(body[:size]), dict, PLACE)
        if not _is_usual(found):
            json_files.check(found, SCHEMA, PLACE)
    except ValueError as error:
        raise BadRequest(f"{error}. See the section Protocol of docs/serving.md") from None
    images = _images(found["inputs"], body, size, model)
    return read_request(
        images, found.get("parameters") or {}, found.get("outputs") or [], found.get("id"), model, stream_header
    )


def _is_usual(found: dict[str, Any]) -> bool:
    """Whether a request is of the schema for sure, as that of usual clients is: the schema takes 40 us to check."""
    inputs, outputs = found.get("inputs"), found.get("outputs")
    if type(inputs) is not list or len(inputs) != 1 or type(inputs[0]) is not dict or outputs is not None:
        return False
    tensor, shape = inputs[0], inputs[0].get("shape")
    return (
        type(shape) is list
        and all(type(size) is int for size in shape)
        and type(tensor.get("name")) is str
        and type(tensor.get("datatype")) is str
        and type(tensor.get("parameters")) is dict
        and "data" not in tensor
        and type(found.get("parameters", {})) is dict
        and type(found.get("id", "")) is str
    )


def read_request(
    images: Images,
    parameters: Mapping[str, Any],
    outputs: list[dict[str, Any]],
    id: str | None,
    model: ModelInfo,
    stream_header: str | None,
) -> Request:
    """A request from its images and what else it says, over HTTP or gRPC."""
    _check_parameters(parameters)
    by_default = parameters.get("binary_data_output", False)
    return Request(
        images,
        chosen_stream(parameters.get("sequence_id"), stream_header),
        request_id(id),
        parameters.get("sequence_start", False),
        parameters.get("sequence_end", False),
        timeout_of(parameters.get("timeout")),
        parameters.get("tribe_learn", True),
        tuple(_wanted(output, by_default, model) for output in outputs) or (Wanted(model.output, by_default),),
    )


def encode_infer(answer: Answer, request: Request, model: ModelInfo) -> Encoded:
    """The body of an answer."""
    logits = answer.logits
    outputs, raw = [], []
    for wanted in request.outputs:
        output: dict[str, Any] = {"name": wanted.name, "datatype": "FP32", "shape": list(logits.shape)}
        if wanted.binary:
            content = logits.tobytes()
            output["parameters"] = {"binary_data_size": len(content)}
            raw.append(content)
        else:
            output["data"] = [value if math.isfinite(value) else None for value in logits.ravel().tolist()]
        outputs.append(output)
    found: dict[str, Any] = {"model_name": model.name, "model_version": VERSION}
    if request.id is not None:
        found["id"] = request.id
    found["parameters"], found["outputs"] = answer.facts(), outputs
    text = json.dumps(found, separators=(",", ":"), allow_nan=False).encode()
    return Encoded(b"".join((text, *raw)), len(text)) if raw else Encoded(text, None)


def timeout_of(value: Any) -> int | None:
    """A checked deadline in microseconds; None: there is none."""
    if value is None:
        return None
    if not is_whole(value, least=1) or value > MOST_TIMEOUT:
        raise BadRequest(
            f"timeout is {str(value)[:40]}; expected a number of microseconds, at least 1: nothing is answered in "
            "less. Leave it out to wait as long as it takes"
        )
    return int(value)


def _length(text: str, total: int) -> int:
    """The number of bytes of JSON that the header says."""
    if not text.isascii() or not text.isdecimal() or len(text) > 12:
        raise BadRequest(f"the header Inference-Header-Content-Length is {text[:40]!r}; expected a number of bytes")
    size = int(text)
    if size > total:
        raise BadRequest(
            f"the header Inference-Header-Content-Length says {size} bytes of JSON, but the body has {total}: "
            "it was cut short, or the header is wrong"
        )
    if size < 1:
        raise BadRequest("the header Inference-Header-Content-Length is 0; expected the number of bytes of JSON")
    return size


def _images(inputs: list[dict[str, Any]], body: Buffer, start: int, model: ModelInfo) -> Images:
    """The images of a request, whose bytes begin at ``start``."""
    if len(inputs) != 1 or inputs[0]["name"] != INPUT:
        names = ", ".join(repr(each["name"][:40]) for each in inputs[:4]) or "none"
        raise BadInput(f"the inputs are {names}; expected one input with the name {INPUT!r}")
    given = inputs[0]
    datatype, shape, parameters = given["datatype"], tuple(given["shape"]), given.get("parameters") or {}
    _check_parameters(parameters)
    model.check_images(shape)
    size, left = parameters.get("binary_data_size"), len(body) - start
    if size is None:
        if given.get("data") is None:
            raise BadInput(
                "the input has no data; expected numbers in 'data', or bytes with the parameter binary_data_size"
            )
        if left:
            raise BadInput(f"{left} bytes follow the JSON, but the input has no parameter binary_data_size")
        return from_numbers(given["data"], datatype, shape)
    expected = byte_size(datatype, shape)
    if not is_whole(size) or size != expected:
        raise BadInput(f"binary_data_size is {str(size)[:40]}; {datatype} of the shape {shape} has {expected} bytes")
    if left != expected:
        cut = "the body was cut short" if left < expected else "the body is too long"
        raise BadInput(f"{left} bytes follow the JSON; binary_data_size says {expected}: {cut}")
    return from_bytes(body, datatype, shape, start)


def _check_parameters(parameters: Mapping[str, Any]) -> None:
    for name in SWITCHES:
        if not isinstance(parameters.get(name, False), bool):
            raise BadRequest(f"the parameter {name} is {str(parameters[name])[:40]!r}; expected true or false")
    for name in UNSUPPORTED:
        if name in parameters:
            raise BadRequest(
                f"the parameter {name} is not supported: send and receive tensors in the body ({EXPECTED})"
            )


def _wanted(output: dict[str, Any], by_default: bool, model: ModelInfo) -> Wanted:
    if output["name"] != model.output:
        raise BadRequest(f"there is no output {output['name'][:40]!r}; expected {model.output!r}")
    parameters = output.get("parameters") or {}
    _check_parameters(parameters)
    return Wanted(model.output, parameters.get("binary_data", by_default))
