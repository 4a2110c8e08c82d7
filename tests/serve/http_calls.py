"""Calls of a server, for tests: raw bytes over a socket, and requests as tritonclient sends them."""

import io
import json
import socket

import httpx
import numpy as np
import pytest

web = httpx.Client(timeout=60, trust_env=False, verify=False, limits=httpx.Limits(max_keepalive_connections=0))
IMAGES = np.random.default_rng(0).random((2, 3, 8, 8), np.float32)


def exchange(port, content, finish=False):
    """Send bytes over a new connection and return all that comes back until the server closes it."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(content)
        if finish:
            connection.shutdown(socket.SHUT_WR)
        found = b""
        while part := connection.recv(2**16):
            found += part
    return found


def head(line, *headers):
    """The first line and the headers of a request."""
    return "\r\n".join((f"{line} HTTP/1.1", "Host: 127.0.0.1", *headers, "", "")).encode()


def status(answer):
    """The status in the bytes of an answer."""
    return int(answer.split()[1])


def infer(server, images=IMAGES, *, headers=None, model="small", **parameters):
    """A request with a binary tensor; the answer as httpx has it."""
    tensor = {"name": "images", "shape": images.shape, "datatype": {"f": "FP32", "u": "UINT8"}[images.dtype.kind]}
    tensor["parameters"] = {"binary_data_size": images.nbytes}
    text = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    sent = {"Inference-Header-Content-Length": str(len(text)), **(headers or {})}
    return web.post(f"{server.url}/v2/models/{model}/infer", content=text + images.tobytes(), headers=sent, timeout=60)


def refused(answer, code, *words):
    """Check that an answer is an error with a status and some words, and that it is JSON."""
    assert answer.status_code == code, answer.text
    message = answer.json()["error"]
    for each in words:
        assert each in message, message
    return message


def picture(format="PNG", size=(8, 8), mode="RGB", **options):
    """The bytes of a picture with random colours, and its pixels (1, 3, H, W)."""
    image = pytest.importorskip("PIL.Image")
    draw = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    image.fromarray(draw).convert(mode).save(file, format, **options)
    return file.getvalue(), draw.transpose(2, 0, 1)[None]
