"""Generate requests from a seed: valid ones by a grammar of every route, and damaged ones."""

import gzip
import io
import json
import random
import socket
import zlib
from dataclasses import dataclass, field

import numpy as np
from attacks import encoded, secret
from PIL import Image

from tribe.data.datasets.files import mnist_test
from tribe.io import states

STREAMS = [f"bad-a-g{i}" for i in range(5)]  # of the token "admin"
CRAFTED = "bad-a-crafted"  # takes state files that say anything
ODD = (  # values of JSON, headers and queries
    *(None, True, -1, 0, 2**31, 2**63, 2**64, 1e308, -0.5, "", "a", "\x00", "é", "../x", "x" * 300, [], {}, [[]]),
    *("FP32", "nan", "0x10", "bad-a-g0", "victim-0", {"a": {"b": []}}, [1, 28, 28], [-1, 1, 28, 28], "true", "1"),
)
HEADERS = (
    *("Content-Type", "Content-Encoding", "Content-Length", "Transfer-Encoding", "X-Tribe-Stream", "X-Request-Id"),
    *("Inference-Header-Content-Length", "Accept", "Expect", "Host", "Origin", "Authorization", "Connection", "Range"),
    *("Sec-Fetch-Site", "Upgrade", "TE", "Trailer", "Cookie", "If-None-Match"),
)
METHODS = "GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "get", "X"  # last: unusual
TYPES = {"npy": "application/x-npy", "png": "image/png", "jpeg": "image/jpeg", "safetensors": ""}
BYTES = (
    *(b"\x00", b"\xff" * 8, b"\r\n", b"\r\n\r\n", b"{", b"[" * 60, b'"', b"-1", b"9" * 20, b"NaN", b"%00", b"\\u0000"),
    b"0\r\n\r\n",
)
PATHS = (
    *("/", "/page.css", "/page.js", "/metrics", "/v1/streams", "/v1/streams?stored=true", "/v2", "/v2/health/live"),
    *("/v2/health/ready", "/v2/models/compact", "/v2/models/compact/ready", "/v2/models/compact/config"),
    *("/v1/streams/STREAM", "/v1/streams/STREAM/state", "/v1/streams/STREAM/thumbnail"),
)
ACTIONS = "end", "reset", "freeze", "unfreeze", "promote", "demote", "snapshot", "rollback", "move", "back"
FOR_ALL = (
    *("/v1/promote", "/v1/demote", "/v1/demote?after=bad-a-g1", "/v1/promote?after=bad-a-g1"),
    *("/v2/models/compact/versions/1/move", "/v2/models/compact/versions/1/back", "/v2/models/compact/versions/2/back"),
)
BODIES = b"", b"{}", b'{"to": %d}', b'{"to": "%d"}', b'{"share": 0.%d}', b"[]", b'{"x": 1}'
IN_PATHS = "%00", "%2e%2e/", "//", "?learn=1&learn=0", "?timeout=-1", "?x", "#", "%ff", "é", ";", "a" * 9000


@dataclass
class Request:
    """A request as it is sent, and what it means if nothing is wrong with it."""

    method: str
    path: str
    headers: list = field(default_factory=list)
    body: bytes = b""
    stream: str | None = None
    images: np.ndarray | None = None  # that a right request wants predicted
    head_is_right: bool = True  # as bytes
    content: bytes = b""  # all that is sent

    @property
    def is_right(self):
        return self.images is not None

    def encode(self):
        headers = "".join(f"{name}: {value}\r\n" for name, value in self.headers)
        first = f"{self.method} {self.path} HTTP/1.1\r\n{headers}\r\n".encode("utf-8", "replace")
        return first + self.body


class Generator:
    """Draw requests; ``states`` are state files that the server has given."""

    def __init__(self, seed):
        self.draw, self.count, self.states = random.Random(seed), 0, [b"state"]

    def next(self):
        """Draw a request: half of them are right, the others have one to three mistakes."""
        self.count += 1
        request = self.draw.choices((self.infer, self.predict, self.control, self.other), (5, 4, 2, 2))[0]()
        request.headers += [("Host", "127.0.0.1"), ("Connection", "close")]
        token = self.draw.choices(("admin", "predict", "learn", None), (20, 1, 1, 1))[0]
        if token != "admin":
            request.images = None
        if token is not None:
            request.headers.append(("Authorization", f"Bearer {secret(token)}"))
        wrong = self.draw.random() < 0.5
        damage = self.draw.random()
        if wrong and damage < 0.3:
            request.images, request.body = None, self.damaged(request.body)
        elif wrong and damage < 0.7:
            self.confuse(request)
        if request.body or request.method in ("POST", "PUT"):
            if self.draw.random() < 0.1:
                pack = self.draw.choice(("gzip", "deflate"))
                request.headers.append(("Content-Encoding", pack))
                request.body = {"gzip": gzip.compress, "deflate": zlib.compress}[pack](request.body, 1)
            if self.draw.random() < 0.1 and request.head_is_right:
                request.headers.append(("Transfer-Encoding", "chunked"))
                chunk = b"%x\r\n%s\r\n" % (len(request.body), request.body) if request.body else b""
                request.body = chunk + b"0\r\n\r\n"
            else:
                request.headers.append(("Content-Length", str(len(request.body))))
        request.content = request.encode()
        if wrong and damage >= 0.7:
            request.images, request.head_is_right = None, False
            request.content = self.damaged(request.content)
        return request

    # -- right requests ------------------------------------------------------------------------------------------------

    def images(self):
        """One to three digits, in one of the types that a client may send."""
        first, count = self.draw.randrange(10_000 - 3), self.draw.randint(1, 3)
        return np.ascontiguousarray(mnist_test()[0][first : first + count])[:, None]

    def stream(self):
        return self.draw.choice((*STREAMS, *STREAMS, *STREAMS, CRAFTED, None))

    def name(self):
        return f"id {self.draw.randrange(self.count + 1)}"  # some occur again: such a request does not learn

    def infer(self):
        images, kind, stream = self.images(), self.draw.choice(("UINT8", "FP32", "FP64", "FP16")), self.stream()
        if kind != "UINT8":
            images = (images / 255).astype({"FP32": "f4", "FP64": "f8", "FP16": "f2"}[kind])
        parameters = self.some({"tribe_learn": self.draw.random() < 0.8, "binary_data_output": False, "timeout": 10**8})
        headers, tensor = [], {"name": "images", "shape": images.shape, "datatype": kind}
        if stream is not None:
            parameters["sequence_id"] = stream
            headers += self.draw.choice(([], [("X-Tribe-Stream", stream)]))
        if as_bytes := self.draw.random() < 0.7 or kind == "FP16":
            tensor["parameters"] = {"binary_data_size": images.nbytes}
        else:
            tensor["data"] = (images if self.draw.random() < 0.5 else images.ravel()).tolist()
        given = self.some({"id": self.name(), "outputs": [{"name": "logits"}]})
        given |= {"inputs": [tensor], "parameters": parameters}
        if wrong := self.draw.random() < 0.15:
            self.mistake(given)
        text = json.dumps(given).encode()
        if as_bytes:
            headers.append(("Inference-Header-Content-Length", len(text)))
        path = "/v2/models/compact" + self.draw.choice(("", "", "/versions/1"))
        body = text + (images.tobytes() if as_bytes else b"")
        return Request("POST", f"{path}/infer", headers, body, stream, None if wrong else images)

    def predict(self):
        images, kind, stream, file = self.images(), self.draw.choice(tuple(TYPES)), self.stream(), io.BytesIO()
        if kind in ("png", "jpeg"):
            Image.fromarray(images[0, 0]).save(file, kind)
            images = np.array(Image.open(file))[None, None]
        elif kind == "npy":
            np.save(file, images)
        else:
            import safetensors.numpy

            file.write(safetensors.numpy.save({"images": images}))
        headers = self.draw.choice(([], [("Content-Type", TYPES[kind] or "application/octet-stream")]))
        headers = headers + self.draw.choice(([], [("X-Request-Id", self.name())]))
        path = "/v1/predict" if stream is None else f"/v1/streams/{stream}/predict"
        query = "&".join(self.some({"learn=false": 0, f"timeout={10**8}": 0, "fit=resize": 0}))
        return Request("POST", f"{path}?{query}" if query else path, headers, file.getvalue(), stream, images)

    def control(self):
        stream = self.draw.choice((*STREAMS, CRAFTED))
        path = f"/v1/streams/{stream}"
        action = self.draw.choice((*ACTIONS, "unfreeze", "promote"))
        body = self.draw.choice(BODIES).replace(b"%d", b"%d" % self.draw.randrange(9))
        choices = [Request("POST", f"{path}/{action}", body=body, stream=stream)] * 5
        choices.append(Request("POST", self.draw.choice(FOR_ALL), body=body))
        choices += [Request("PUT", path, stream=stream), Request("DELETE", path, stream=stream)]
        content = self.crafted() if stream == CRAFTED else self.draw.choice(self.states)
        choices.append(Request("PUT", f"{path}/state", body=content, stream=stream))
        return self.draw.choice(choices)

    def crafted(self):
        """A state file with a valid digest, of which one tensor holds an odd value."""
        try:
            saved = states.decode(self.draw.choice(self.states))
        except states.StateFileError:
            return self.states[-1]
        name = self.draw.choice(sorted(saved.tensors))
        odd = self.draw.choice((-1, 0, 1, 11, 10**6, 2**62))
        given = saved.tensors[name]
        return encoded(saved._replace(tensors=saved.tensors | {name: given.clone().fill_(odd)}))

    def other(self):
        path = self.draw.choice(PATHS).replace("STREAM", self.draw.choice((*STREAMS, "bad-a-none", "victim-0")))
        return Request(self.draw.choice(("GET", "GET", "GET", "GET", *METHODS[:6])), path)

    def some(self, values):
        return {name: value for name, value in values.items() if self.draw.random() < 0.3}

    # -- wrong requests ------------------------------------------------------------------------------------------------

    def mistake(self, given):
        """Put an odd value somewhere into JSON."""
        place = given
        while True:
            key = self.draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], dict | list) or not place[key] or self.draw.random() < 0.3:
                place[key] = self.draw.choice(ODD)
                return
            place = place[key]

    def confuse(self, request):
        """Change the method, the path or a header."""
        request.images, kind = None, self.draw.randrange(5)
        if kind == 0:
            request.method = self.draw.choice(METHODS)
        elif kind == 1:
            odd, place = self.draw.choice(IN_PATHS), self.draw.randrange(1, len(request.path) + 1)
            request.path = request.path[:place] + odd + request.path[place:]
        elif kind == 2:
            request.headers = [each for each in request.headers if self.draw.random() < 0.6]
        elif kind == 3:
            request.headers.append(self.draw.choice(request.headers))
        if kind > 1:
            value = str(self.draw.choice((*ODD, "chunked", "gzip", "100-continue", "identity, gzip", "Bearer x")))
            request.headers.append((self.draw.choice(HEADERS), value.replace("\x00", "")))
        request.head_is_right = False

    def damaged(self, content):
        """Change bytes in one to four places."""
        data = bytearray(content)
        for _ in range(self.draw.choice((1, 1, 2, 4))):
            place, length = self.draw.randrange(len(data) + 1), self.draw.choice((1, 2, 8, 64, 1000))
            if self.draw.random() < 0.6:  # the start says most about the rest
                place = min(place, self.draw.randrange(300))
            kind = self.draw.randrange(6)
            if kind == 0 and place < len(data):
                data[place] ^= 1 << self.draw.randrange(8)
            elif kind == 1:
                del data[place : place + length]
            elif kind == 2:
                data[place:place] = data[place : place + length] * self.draw.choice((1, 3))
            elif kind == 3:
                data[place:place] = self.draw.choice(BYTES)
            elif kind == 4:
                data[place : place + length] = self.draw.randbytes(length)
            else:
                del data[place:]
        return bytes(data)


# -- answers -----------------------------------------------------------------------------------------------------------


def exchange(port, request, seconds=60):
    """Send a request and return the bytes of its answer.

    The server may wait for the rest of a request that is not whole; that is given up soon.
    """
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        try:
            connection.sendall(request.content)
            if not request.head_is_right:
                connection.settimeout(0.5)
            while not is_whole(found):
                try:
                    part = connection.recv(2**16)
                except TimeoutError:
                    if connection.gettimeout() == seconds:
                        raise
                    connection.shutdown(socket.SHUT_WR)
                    connection.settimeout(seconds)
                    continue
                if not part:
                    break
                found += part
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has answered what it read, or nothing
    return found


def is_whole(answer):
    """Whether an answer has arrived as far as its length says; one without a length ends with its connection."""
    head, end, body = answer.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(end) and bool(lengths) and len(body) >= int(lengths[0])
