"""The plain API under /v1: a picture, an npy array or a safetensors file in, JSON or an npy array out."""

import io
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tribe.data.corruptions.pillow import require_pillow
from tribe.data.datasets.image_files import EIGHT_BITS, SCANS
from tribe.io import json_files
from tribe.io.arrays import MOST_HEADER, read_header
from tribe.serve.protocol.datatypes import EXPECTED, byte_size, from_bytes
from tribe.serve.protocol.errors import BadInput, BadRequest, TooLarge, WrongType
from tribe.serve.protocol.messages import INPUT, Answer, Images, ModelInfo, Request
from tribe.serve.protocol.names import request_id
from tribe.serve.protocol.v2 import Buffer, timeout_of

JSON, NPY = "application/json", "application/x-npy"
PICTURES = ("image/jpeg", "image/png")
ARRAYS = (NPY, "application/npy")
SAFETENSORS = ("application/x-safetensors", "application/safetensors")
OCTETS = ("application/octet-stream", "application/x-www-form-urlencoded", "")  # what curl and others send unasked
STARTS = {b"\xff\xd8\xff": PICTURES[0], b"\x89PNG\r\n\x1a\n": PICTURES[1], b"\x93NUMPY": NPY}
SWITCHES = {"true": True, "false": False, "1": True, "0": False}
DATATYPES = {"F32": "FP32", "F16": "FP16", "F64": "FP64", "U8": "UINT8", "BF16": "BF16"}
ENTRY = {"dtype": str, "shape": [int], "data_offsets": [int]}


def parse_predict(
    body: Buffer,
    content_type: str,
    query: Mapping[str, str],
    model: ModelInfo,
    *,
    stream: str | None,
    id: str | None = None,
    most_pixels: int,
) -> Request:
    """The request in a body, which is a picture, an npy array or a safetensors file.

    Args:
        body: all of it.
        content_type: the value of the header Content-Type; empty, or bytes of any kind: the first bytes tell.
        query: what stands after the question mark: ``timeout`` in microseconds, ``learn=false``, ``fit=resize``.
        model: the model that the images are for.
        stream: the stream, already checked.
        id: the value of the header X-Request-Id, if there is one.
        most_pixels: of a picture; a larger one is refused before it is decoded.
    """
    if unknown := sorted(query.keys() - {"timeout", "learn", "fit"}):
        raise BadRequest(f"there is no query parameter {unknown[0][:40]!r}; expected timeout, learn or fit")
    timeout = query.get("timeout")
    if timeout is not None and not (timeout.isascii() and timeout.isdecimal() and len(timeout) < 19):
        raise BadRequest(f"timeout is {timeout[:40]!r}; expected a number of microseconds, at least 1")
    if (learn := query.get("learn", "true").lower()) not in SWITCHES:
        raise BadRequest(f"learn is {learn[:40]!r}; expected true or false")
    if (fit := query.get("fit")) not in (None, "resize"):
        raise BadRequest(f"fit is {fit[:40]!r}; expected resize" if fit else "fit is empty; expected resize")
    kind = _kind(body, content_type)
    if kind in PICTURES:
        images = read_picture(body, model, most_pixels, resize=fit is not None)
    else:
        images = _read_npy(body) if kind in ARRAYS else _read_safetensors(body)
        model.check_images(images.shape)
    wait = None if timeout is None else timeout_of(int(timeout))
    return Request(images, stream, request_id(id), timeout=wait, learn=SWITCHES[learn])


def encode_predict(answer: Answer, model: ModelInfo) -> bytes:
    """The JSON of an answer."""
    best = answer.logits.argmax(1).tolist()
    found: dict[str, Any] = {"stream": answer.stream, "classes": best}
    if model.labels:
        found["labels"] = [model.labels[i] for i in best]
    found[model.output] = [[x if math.isfinite(x) else None for x in row] for row in answer.logits.tolist()]
    found |= {"adapted": answer.adapted, "clock": answer.clock, "generation": answer.generation}
    found["health"] = {
        name.removeprefix("tribe_health_"): v for name, v in answer.facts().items() if "_health_" in name
    }
    return json.dumps(found, separators=(",", ":"), allow_nan=False).encode()


def encode_npy(array: NDArray[Any]) -> bytes:
    """The bytes of an npy file."""
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
    return file.getvalue()


def _kind(body: Buffer, content_type: str) -> str:
    """The type of a body: what its header says or, where that says nothing, what the first bytes say."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind in (*PICTURES, *ARRAYS, *SAFETENSORS):
        return kind
    if kind not in OCTETS:
        raise WrongType(
            f"the body has the type {kind[:60]!r}; expected {', '.join((*PICTURES, NPY, SAFETENSORS[0]))} "
            "in the header Content-Type"
        )
    start = bytes(body[:9])
    for first, found in STARTS.items():
        if start.startswith(first):
            return found
    if start[8:] == b"{":
        return SAFETENSORS[0]
    raise WrongType(
        "the body is no JPEG, PNG, npy or safetensors; expected one of them, not a form: curl --data-binary @file"
    )


# -- pictures ---------------------------------------------------------------------------------------------------------


def read_picture(body: Buffer, model: ModelInfo, most_pixels: int, resize: bool = False) -> Images:
    """Decode a JPEG or PNG to (1, C, H, W) bytes; a rotation in its EXIF data is applied.

    The header is checked before anything is decoded. A picture of another size than the model's is refused, unless
    ``resize`` stretches it.
    """
    if len(model.shape) != 3 or model.shape[0] not in (1, 3):
        raise WrongType(f"this model takes {model.expected}, and no pictures; send an npy array")
    pillow = require_pillow("reading pictures")
    from PIL import ImageOps

    try:
        with pillow.open(io.BytesIO(body), formats=("JPEG", "PNG")) as opened:
            _check_header(opened, body, most_pixels)
            image = ImageOps.exif_transpose(opened).convert("RGB" if model.shape[0] == 3 else "L")
    except (TooLarge, BadInput):
        raise
    except pillow.DecompressionBombError as error:
        raise TooLarge(f"the picture has too many pixels ({error}); expected {most_pixels:,} at most") from None
    except pillow.UnidentifiedImageError:
        raise BadInput("the body is no JPEG and no PNG, or its beginning is damaged") from None
    except Exception as error:  # damaged bytes make Pillow fail in any way, also with a MemoryError
        reason = str(error) or type(error).__name__
        raise BadInput(f"the picture cannot be decoded: {reason[:200]}. Send a whole JPEG or PNG") from None
    width, height = (wanted or own for wanted, own in zip((model.shape[2], model.shape[1]), image.size, strict=True))
    if image.size != (width, height):
        if not resize:
            got = "x".join(map(str, image.size))
            raise BadInput(
                f"the picture has {got} pixels; expected {width}x{height}. ?fit=resize stretches it to that size"
            )
        image = image.resize((width, height), pillow.Resampling.BILINEAR)
    pixels = np.array(image).reshape(height, width, -1)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))[None]


def _check_header(image: Any, body: Buffer, most_pixels: int) -> None:
    """Refuse a picture by what its header says, before it is decoded."""
    width, height = image.size
    if width * height > most_pixels:
        raise TooLarge(f"the picture has {width}x{height} pixels; expected {most_pixels:,} at most. Send a smaller one")
    if image.mode not in EIGHT_BITS:
        raise BadInput(f"the picture has the mode {image.mode}; expected eight bits a channel. Convert it first")
    if image.format != "PNG" and (scans := bytes(body).count(b"\xff\xda")) > SCANS:
        raise BadInput(f"the JPEG has {scans} scans; expected {SCANS} at most. Save it again as an ordinary JPEG")


# -- arrays -----------------------------------------------------------------------------------------------------------


def _read_npy(body: Buffer) -> Images:
    """The array of an npy file."""
    file = io.BytesIO(bytes(body[: MOST_HEADER + 16]))  # enough for its header
    try:
        header = read_header(file)
    except ValueError as error:
        raise BadInput(f"the body is not an npy array that can be read: {error}") from None
    names = {"<f4": "FP32", "<f2": "FP16", "<f8": "FP64", "|u1": "UINT8"}
    datatype = names.get(header.dtype.str)
    if datatype is None or (header.fortran and len(header.shape) > 1):
        order = " in the order of Fortran" if header.fortran else ""
        raise BadInput(f"the npy array is {header}{order}; {EXPECTED}, in the order of C")
    start = file.tell()
    if (left := len(body) - start) != header.nbytes:
        raise BadInput(
            f"{left} bytes follow the npy header; {header} has {header.nbytes}: the body was cut short or is too long"
        )
    return from_bytes(body, datatype, header.shape, start)


def _read_safetensors(body: Buffer) -> Images:
    """The tensor ``images`` of a safetensors file, which holds nothing else."""
    size = int.from_bytes(bytes(body[:8]), "little")
    start, place = 8 + size, "the header of the safetensors"
    if len(body) < 8 or start > len(body):
        raise BadInput("the body is no safetensors, or it was cut short in its header")
    try:
        header = json_files.parse(bytes(body[8:start]), {INPUT: ENTRY}, place)
    except ValueError as error:
        raise BadInput(f"{error}. Expected one tensor with the name {INPUT!r}") from None
    entry, shape = header[INPUT], tuple(header[INPUT]["shape"])
    if others := sorted(header.keys() - {INPUT, "__metadata__"}):
        raise BadInput(f"the safetensors also holds {others[0][:40]!r}; expected one tensor with the name {INPUT!r}")
    if entry["dtype"] not in DATATYPES or any(each < 0 for each in shape):
        raise BadInput(f"{INPUT} is {entry['dtype'][:20]} of the shape {shape}; expected one of {', '.join(DATATYPES)}")
    expected = byte_size(DATATYPES[entry["dtype"]], shape)
    if entry["data_offsets"] != [0, expected] or len(body) != start + expected:
        raise BadInput(
            f"{len(body) - start} bytes follow the header of the safetensors; expected {expected}: the body was "
            "cut short or is too long"
        )
    return from_bytes(body, DATATYPES[entry["dtype"]], shape, start)
