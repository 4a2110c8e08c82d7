"""The plain API under /v1: a picture, an npy array or a safetensors file in, JSON or an npy array out."""

import io
from typing import Any, Literal

import msgspec
import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from tribe.data.images import EIGHT_BITS, require_pillow
from tribe.serve import protocol
from tribe.serve.errors import BadInput, TooLarge, WrongType
from tribe.serve.protocol import OUTPUT, InferRequest, InferResult, ModelInfo
from tribe.streams.names import check_request_id

JPEG, PNG, NPY, SAFETENSORS = "image/jpeg", "image/png", "application/x-npy", "application/x-safetensors"
KINDS = {kind: kind for kind in (JPEG, PNG, NPY, SAFETENSORS)}
KINDS |= {"application/npy": NPY, "application/safetensors": SAFETENSORS}
OCTETS = ("application/octet-stream", "application/x-www-form-urlencoded", "")  # the defaults of curl and others
STARTS = {b"\xff\xd8\xff": JPEG, b"\x89PNG\r\n\x1a\n": PNG, b"\x93NUMPY": NPY}
MAX_SCANS = 64  # of a JPEG: each costs time, and takes few bytes. Progressive ones have about 10


class PredictQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The query of a prediction."""

    timeout: protocol.Timeout | None = None  # microseconds
    learn: bool = True
    fit: Literal["resize"] | None = None  # stretch a picture to the size of the model


def decode_predict(
    body: bytearray,
    content_type: str,
    query: dict[str, str],
    model: ModelInfo,
    stream: str | None,
    id: str | None = None,
) -> InferRequest:
    """Return the request in a body, which is a picture, an npy array or a safetensors file.

    The first bytes decide which, if ``content_type`` is empty or general.
    """
    options = msgspec.convert(query, PredictQuery, strict=False)
    kind = _kind(body, content_type)
    if kind in (JPEG, PNG):
        images = read_picture(body, model, resize=options.fit is not None)
    else:
        values = _read_npy(body) if kind == NPY else _read_safetensors(body)
        model.check_images(tuple(values.shape))
        images = protocol.as_images(values, model)
    checked = check_request_id(id) if id else None
    return InferRequest(images, stream, checked, timeout=options.timeout, learn=options.learn)


def encode_predict(result: InferResult, request: InferRequest, model: ModelInfo) -> bytes:
    """Return the JSON of an answer."""
    logits = protocol.as_numbers(result.logits)
    best = logits.argmax(1).tolist()
    answer: dict[str, Any] = {"stream": request.stream, "classes": best}
    if model.labels:
        answer["labels"] = [model.labels[i] for i in best]
    answer |= {OUTPUT: logits.tolist(), "adapted": result.adapted, "answered": result.answered}
    answer |= {"version": result.version, "clock": result.clock, "generation": result.generation}
    answer |= {"health": protocol.health_facts(result)}
    return msgspec.json.encode(answer)


def encode_npy(array: NDArray[Any]) -> bytes:
    """Return the bytes of an npy file."""
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
    return file.getvalue()


def _kind(body: bytearray, content_type: str) -> str:
    """Return the type of a body: that of its header or, where that is general, that of its first bytes."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind in KINDS:
        return KINDS[kind]
    if kind not in OCTETS:
        raise WrongType(f"the body has the type {kind[:60]!r}; expected {', '.join(dict.fromkeys(KINDS.values()))}")
    for start, started in STARTS.items():
        if body.startswith(start):
            return started
    if body[8:9] == b"{":
        return SAFETENSORS
    raise WrongType(
        "the body is not a JPEG, PNG, npy or safetensors; expected one of them, not a form: curl --data-binary @file"
    )


def read_picture(body: bytearray, model: ModelInfo, resize: bool = False) -> Tensor:
    """Decode a JPEG or PNG to (1, C, H, W); a rotation in its EXIF data is applied.

    The header is checked before anything is decoded. A picture of another size than the model's is refused, unless
    ``resize`` stretches it.
    """
    if len(model.shape) != 3 or model.shape[0] not in (1, 3):
        raise WrongType(f"this model takes {model.expected}, and does not take pictures; send an npy array")
    pillow = require_pillow("reading pictures")
    from PIL import ImageOps

    try:
        with pillow.open(io.BytesIO(body), formats=("JPEG", "PNG")) as opened:
            width, height = opened.size
            if width * height > model.most_pixels:
                raise TooLarge(f"the picture has {width}x{height} pixels; expected {model.most_pixels:,} at most")
            if opened.mode not in EIGHT_BITS:
                raise BadInput(f"the picture has the mode {opened.mode}; expected eight bits a channel")
            if opened.format != "PNG" and (scans := body.count(b"\xff\xda")) > MAX_SCANS:
                raise BadInput(f"the JPEG has {scans} scans; expected {MAX_SCANS} at most: save it as an ordinary one")
            image = ImageOps.exif_transpose(opened).convert("RGB" if model.shape[0] == 3 else "L")
    except (TooLarge, BadInput, MemoryError):
        raise
    except pillow.DecompressionBombError as error:
        raise TooLarge(f"the picture has too many pixels ({error}); expected {model.most_pixels:,} at most") from None
    except Exception as error:  # damaged bytes make Pillow fail in any way
        reason = str(error) or type(error).__name__
        raise BadInput(f"the picture cannot be decoded: {reason[:200]}. Send a whole JPEG or PNG") from None
    width, height = (size or own for size, own in zip((model.shape[2], model.shape[1]), image.size, strict=True))
    model.check_pixels(1, width * height)
    if image.size != (width, height):
        if not resize:
            words = f"the picture has {'x'.join(map(str, image.size))} pixels; expected {width}x{height}"
            raise BadInput(f"{words}. ?fit=resize stretches it to that size")
        image = image.resize((width, height), pillow.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image)).reshape(height, width, -1)
    return protocol.as_images(pixels.permute(2, 0, 1).contiguous()[None], model)


def _read_npy(body: bytearray) -> Tensor:
    """Return the array of an npy file; its header is compared with the size of the body before anything is read."""
    file = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"the version is {version}; expected (1, 0), as np.save writes")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes make numpy's parser fail in any way
        reason = str(error) or type(error).__name__
        raise BadInput(f"the body is not an npy array that can be read: {reason[:200]}") from None
    start = file.tell()
    if dtype.str not in ("<f4", "<f2", "<f8", "|u1") or (fortran and len(shape) > 1):
        raise BadInput(
            f"the npy array is {dtype}{' in the order of Fortran' * fortran}; {protocol.EXPECTED}, in the order of C"
        )
    expected = dtype.itemsize * np.prod(shape, dtype=object)
    if len(body) - start != expected or min(shape, default=0) < 0:
        raise BadInput(f"{len(body) - start} bytes follow the npy header; expected {expected}: it is cut short or long")
    return torch.from_numpy(np.frombuffer(body, dtype, offset=start).reshape(shape))


def _read_safetensors(body: bytearray) -> Tensor:
    """Return the tensor ``images`` of a safetensors file, which holds nothing else."""
    try:
        tensors = safetensors.torch.load(bytes(body))
    except (safetensors.SafetensorError, ValueError, KeyError) as error:  # KeyError: a type that torch does not have
        raise BadInput(f"the safetensors cannot be read: {error}. It may have been cut short") from None
    if tensors.keys() != {protocol.INPUT}:
        names = ", ".join(sorted(repr(name[:40]) for name in tensors)[:4]) or "nothing"
        raise BadInput(f"the safetensors holds {names}; expected one tensor with the name {protocol.INPUT!r}")
    if tensors[protocol.INPUT].dtype not in protocol.DATATYPES.values():
        raise BadInput(f"{protocol.INPUT} is {tensors[protocol.INPUT].dtype}; {protocol.EXPECTED}")
    return tensors[protocol.INPUT]
