"""A client of a few lines: ``Client("http://127.0.0.1:8000").predict("cam1", images)`` returns logits.

It uses only numpy and Python's own HTTP client, so it can be copied to a machine without torch.
"""

import http.client
import json
import ssl
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple, Self
from urllib.parse import quote, urlsplit

import numpy as np
from numpy.typing import NDArray

DATATYPES = {"float32": "FP32", "float16": "FP16", "float64": "FP64", "uint8": "UINT8"}
HEADER = "Inference-Header-Content-Length"


class ClientError(Exception):
    """An answer that is not a success; ``status`` is HTTP's, ``retry_after`` in seconds if the server is busy."""

    def __init__(self, message: str, status: int, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class Prediction(NamedTuple):
    """Logits, and facts about the stream."""

    logits: NDArray[np.float32]  # (B, K)
    facts: dict[str, Any]  # parameters of the answer, such as tribe_adapted and tribe_clock, and model_version


class Client:
    """Talk to a server over HTTP; each thread keeps one connection.

    Args:
        url: where the server is, such as http://127.0.0.1:8000.
        model: the name of its model.
        token: a bearer token, if the server has them.
        seconds: until a request fails.
        context: how TLS certificates are checked; None: as usual.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        model: str = "compact",
        *,
        token: str | None = None,
        seconds: float = 60.0,
        context: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"url is such as http://127.0.0.1:8000; got {url!r}")
        self.url, self.model, self._parts = url, model, parts
        self._seconds, self._context = seconds, context
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._local = threading.local()

    def predict(self, stream: str | None, images: NDArray[Any], **options: Any) -> NDArray[np.float32]:
        """Return logits (B, K) of images (B, ...), floating point in [0, 1] or uint8; the stream learns from them.

        None as the stream: the source model predicts. Options: as for `infer`.
        """
        return self.infer(stream, images, **options).logits

    def infer(
        self,
        stream: str | None,
        images: NDArray[Any],
        *,
        id: str | None = None,
        timeout: float | None = None,
        learn: bool = True,
        end: bool = False,
        version: str | None = None,
    ) -> Prediction:
        """Predict, and also return facts about the stream.

        Args:
            stream: its name; it is created if there is none. None: the source model predicts.
            images: (B, ...).
            id: of the request; a second one with the same id does not learn again.
            timeout: seconds until the answer must be there.
            learn: False: only predict.
            end: store the stream and release it afterwards.
            version: of the model; another than the stream's predicts with its source model. None: the stream's.
        """
        array = np.ascontiguousarray(images)
        if array.dtype.name not in DATATYPES:
            raise TypeError(f"images are {array.dtype}; expected one of {', '.join(DATATYPES)}")
        parameters: dict[str, Any] = {"binary_data_output": True, "tribe_learn": learn}
        if stream is not None:
            parameters |= {"sequence_id": stream, "sequence_end": end}
        if timeout is not None:
            parameters["timeout"] = max(1, round(timeout * 1e6))
        tensor = {"name": "images", "shape": array.shape, "datatype": DATATYPES[array.dtype.name]}
        inputs = [tensor | {"parameters": {"binary_data_size": array.nbytes}}]
        text = json.dumps({"id": id or "", "parameters": parameters, "inputs": inputs}).encode()
        headers = {HEADER: str(len(text)), "Content-Type": "application/octet-stream"}
        if stream is not None:
            headers["X-Tribe-Stream"] = stream
        path = "" if version is None else f"/versions/{quote(version, safe='')}"
        path = f"/v2/models/{quote(self.model)}{path}/infer"
        answer, body = self._call("POST", path, text + array.tobytes(), headers)
        size = int(answer[HEADER])
        head = json.loads(body[:size])
        logits = np.frombuffer(body, "<f4", offset=size).reshape(head["outputs"][0]["shape"])
        return Prediction(logits, head["parameters"] | {"model_version": head["model_version"]})

    def streams(self) -> list[dict[str, Any]]:
        """Return the descriptions of all streams."""
        return list(self._json("GET", "/v1/streams")["streams"])

    def stream(self, name: str) -> dict[str, Any]:
        """Return the description of one stream."""
        return self._json("GET", _path(name))

    def control(self, action: str, stream: str, **arguments: Any) -> dict[str, Any]:
        """End, reset, freeze, unfreeze, promote, demote, snapshot, roll back, move or bring back a stream."""
        body = json.dumps(arguments).encode() if arguments else b""
        return self._json("POST", f"{_path(stream)}/{quote(action)}", body)

    def promote(self, stream: str | None = None) -> dict[str, str]:
        """Let what adapts answer for a stream or, without one, for all; return why any of these stay as they are."""
        return self._change_all("promote", stream)

    def demote(self, stream: str | None = None) -> dict[str, str]:
        """Let the source answer for a stream or, without one, for all; return why any of these stay as they are."""
        return self._change_all("demote", stream)

    def _change_all(self, action: str, stream: str | None) -> dict[str, str]:
        if stream is not None:
            self.control(action, stream)
            return {}
        failed, after = dict[str, str](), ""
        while after is not None:
            found = self._json("POST", f"/v1/{action}?after={quote(after, safe='')}")
            failed |= found["failed"]
            after = found["after"]
        return failed

    def drop(self, stream: str) -> dict[str, Any]:
        """Delete a stream and its stored state."""
        return self._json("DELETE", _path(stream))

    def get_state(self, stream: str) -> bytes:
        """Return the state file of a stream, which `tribe.load` opens."""
        return self._call("GET", f"{_path(stream)}/state")[1]

    def put_state(self, stream: str, data: bytes) -> dict[str, Any]:
        """Replace the state of a stream by that of a file."""
        return self._json("PUT", f"{_path(stream)}/state", data)

    def close(self) -> None:
        """Close this thread's connection."""
        if (held := getattr(self._local, "connection", None)) is not None:
            held.close()
            del self._local.connection

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _json(self, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        return dict(json.loads(self._call(method, path, body)[1]))

    def _call(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[http.client.HTTPMessage, bytes]:
        """Send one request. An idle connection that the server has closed is opened again."""
        sent = {**self._headers, **(headers or {})}
        reused = getattr(self._local, "connection", None) is not None
        try:
            response, content = self._exchange(method, path, body, sent)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            if not reused:
                raise
            response, content = self._exchange(method, path, body, sent)
        if response.status != 200:
            wait = response.headers.get("Retry-After")
            try:
                words = str(json.loads(content)["error"])
            except (ValueError, KeyError, TypeError):
                words = content[:200].decode("utf-8", "replace") or "the answer is empty"
            raise ClientError(words, response.status, None if wait is None else float(wait))
        return response.headers, content

    def _exchange(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Send a request and read its answer. A connection that failed is closed: the next request opens another."""
        held = getattr(self._local, "connection", None)
        if held is None:
            place = self._parts.hostname or "", self._parts.port
            if self._parts.scheme == "https":
                held = http.client.HTTPSConnection(*place, timeout=self._seconds, context=self._context)
            else:
                held = http.client.HTTPConnection(*place, timeout=self._seconds)
            self._local.connection = held
        try:
            held.request(method, self._parts.path.rstrip("/") + path, body or None, dict(headers))
            response: http.client.HTTPResponse = held.getresponse()
            return response, response.read()
        except BaseException:  # also KeyboardInterrupt: the answer would be taken for that of the next request
            self.close()
            raise


def _path(stream: str) -> str:
    return f"/v1/streams/{quote(stream, safe='')}"
