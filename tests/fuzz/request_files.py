"""Readers of what clients send to a server, and of its file of tokens."""

import io
import json
import zlib

import numpy as np
import safetensors.numpy

from fuzz.registry import digest, reader
from tribe.serve.errors import ServeError
from tribe.serve.http import decompress
from tribe.serve.plain import decode_predict
from tribe.serve.protocol import ModelInfo, decode_infer
from tribe.serve.security import read_tokens

MODEL = ModelInfo("small", (3, 8, 8), 4)
PLAIN = "tribe.serve.plain"
IMAGES = np.random.default_rng(0).random((2, 3, 8, 8), np.float32)


def answered(place, parse, *arguments, **options):
    """A digest of the request in a body; an answer of a server that refuses it is an error, which names the file."""
    try:
        request = parse(*arguments, **options)
    except ServeError as error:
        if error.status >= 500:
            raise
        raise ValueError(f"{place}: {error}") from error
    return digest(request.images.shape, request.images.numpy().tobytes(), request.stream, request.id, request.binary)


def body_file(name, content):
    class BodyFile:
        @staticmethod
        def make(folder):
            (folder / name).write_bytes(content)
            return folder / name

        @staticmethod
        def read(folder):
            body = bytearray((folder / name).read_bytes())
            return answered(folder / name, decode_predict, body, "", {}, MODEL, stream="cam", max_pixels=10**6)

    return BodyFile


def picture():
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray((IMAGES[0].transpose(1, 2, 0) * 255).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


reader("request-picture", "image", (f"{PLAIN}.read_picture",))(body_file("frame.png", picture()))
reader("request-safetensors", "safetensors", (f"{PLAIN}._read_safetensors",))(
    body_file("frames.safetensors", safetensors.numpy.save({"images": IMAGES}))
)


@reader("request-json", "json", ("tribe.serve.protocol.decode_infer",))
class JsonRequest:
    @staticmethod
    def make(folder):
        numbers = (IMAGES[:1, :, :, :] * 255).astype(int).ravel().tolist()
        tensor = {"name": "images", "shape": [1, 3, 8, 8], "datatype": "UINT8", "data": numbers}
        parameters = {"sequence_id": "cam", "sequence_start": True, "timeout": 1000}
        found = {"id": "1", "parameters": parameters, "inputs": [tensor], "outputs": [{"name": "logits"}]}
        (folder / "request.json").write_text(json.dumps(found))
        return folder / "request.json"

    @staticmethod
    def read(folder):
        body = (folder / "request.json").read_bytes()
        return answered(folder / "request.json", decode_infer, body, None, MODEL, None)


@reader("request-binary", "", ("tribe.serve.protocol.decode_infer",))
class BinaryRequest:
    @staticmethod
    def make(folder):
        tensor = {"name": "images", "shape": IMAGES.shape, "datatype": "FP32"}
        text = json.dumps({"inputs": [tensor | {"parameters": {"binary_data_size": IMAGES.nbytes}}]}).encode()
        (folder / "request").write_bytes(str(len(text)).encode() + b"\n" + text + IMAGES.tobytes())
        return folder / "request"

    @staticmethod
    def read(folder):
        length, _, body = (folder / "request").read_bytes().partition(b"\n")
        return answered(folder / "request", decode_infer, bytearray(body), length.decode("latin-1"), MODEL, None)


@reader("request-gzip", "gzip", ("tribe.serve.http.decompress",))
class CompressedRequest:
    @staticmethod
    def make(folder):
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        (folder / "request.gz").write_bytes(packer.compress(b"0" * 10_000) + packer.flush())
        return folder / "request.gz"

    @staticmethod
    def read(folder):
        content = (folder / "request.gz").read_bytes()

        try:
            return digest(decompress(content, "gzip", 20_000))
        except ServeError as error:
            raise ValueError(f"{folder}/request.gz: {error}") from error


@reader("tokens", "json", ("tribe.serve.security.read_tokens",))
class TokenFile:
    @staticmethod
    def make(folder):
        entry = {"name": "line", "token": "0123456789abcdef", "streams": "line-", "role": "learn"}
        tokens = [entry | {"most_streams": 3, "images_per_second": 10.0}]
        tokens.append({"name": "all", "sha256": "0" * 64, "streams": "", "role": "admin"})
        (folder / "tokens.json").write_text(json.dumps({"tokens": tokens}))
        return folder / "tokens.json"

    @staticmethod
    def read(folder):
        return digest(read_tokens(folder / "tokens.json"))
