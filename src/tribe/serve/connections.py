"""Connections that cannot hurt: bounded in number, in the size of their headers and in the time that these take.

uvicorn's protocol on httptools, which is fast, has no such bounds of its own.
"""

import asyncio
import contextlib
import json
import logging
from dataclasses import replace
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tribe.serve.config import Limits

try:
    import resource
except ModuleNotFoundError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

log = logging.getLogger("tribe.serve")


class JoinedWrites:
    """A transport that sends the headers and the body of an answer at once: one packet, one call of the system.

    uvicorn writes them one after the other. Only headers of an answer to POST that announce the length of a body are
    held back; a body then follows in the same turn of the event loop.
    """

    def __init__(self, transport: asyncio.Transport, protocol: "BoundedProtocol") -> None:
        self._transport, self._protocol, self._head = transport, protocol, b""

    def write(self, data: bytes) -> None:
        """Send bytes; headers wait for their body."""
        if self._head:
            data, self._head = self._head + data, b""
        elif data[-4:] == b"\r\n\r\n" and b"\r\ncontent-length: " in data and self._protocol.answers_post():
            self._head = data
            return
        self._transport.write(data)

    def close(self) -> None:
        """Send what is left, and close."""
        if self._head:
            self.write(b"")
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `limited` makes the class for a server's limits."""

    limits = Limits()
    _head_timer: asyncio.TimerHandle | None = None
    _head_size = 0
    _in_head = True  # the headers of the next request have not arrived in full

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or say that there are too many."""
        super().connection_made(JoinedWrites(transport, self))  # type: ignore[arg-type]
        if len(self.connections) > self.limits.connections:
            words = (
                f"the server has {self.limits.connections} connections, as many as it takes; try again, or reuse one"
            )
            self._close(b"503 Service Unavailable", words, b"retry-after: 1\r\n")
        else:
            self._head_timer = self.loop.call_later(self.limits.head_seconds, self._slow_head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; those of headers are counted."""
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_size += len(data)
        super().data_received(data)
        if self._in_head and self._head_size and not self.transport.is_closing():
            if self._head_size > self.limits.head_bytes:
                words = f"the headers have more than {self.limits.head_bytes:,} bytes; send shorter ones"
                self._close(b"431 Request Header Fields Too Large", words)
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(self.limits.head_seconds, self._slow_head)

    def on_headers_complete(self) -> None:
        """All headers are there; what follows is a body."""
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is there; what follows is another request."""
        self._in_head, self._head_size = True, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP."""
        self._close(b"400 Bad Request", f"{msg} Expected HTTP/1.1")

    def answers_post(self) -> bool:
        """Whether the answer that is written now has a body if its headers say so; that to HEAD has none."""
        return self.cycle is not None and self.cycle.scope["method"] == "POST"

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _slow_head(self) -> None:
        if self._in_head and not self.transport.is_closing():
            words = f"the headers did not arrive within {self.limits.head_seconds:g} s; the connection is closed"
            self._close(b"408 Request Timeout", words)

    def _close(self, status: bytes, words: str, more: bytes = b"") -> None:
        """Send a short answer that no application makes, and close."""
        self._stop_timer()
        if self.cycle is None or self.cycle.response_complete:
            body = json.dumps({"error": words}).encode()
            size = str(len(body)).encode()
            about = b"content-type: application/json\r\ncontent-length: " + size + b"\r\nconnection: close\r\n"
            self.transport.write(b"HTTP/1.1 " + status + b"\r\n" + about + more + b"\r\n" + body)
        self.transport.close()


RESERVE = 256  # files that a server has open beside its connections


def within_the_system(bounds: Limits) -> Limits:
    """The limits, with as many connections as the system lets this process have open files for.

    The process raises its own limit as far as it may. A connection beyond the system's limit would not be refused in
    words: it would wait, and so would all others.
    """
    if resource is None:
        return bounds
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = bounds.connections + RESERVE
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= bounds.connections + RESERVE:
        return bounds
    fewer = max(1, soft - RESERVE)
    log.warning(
        "the system lets this process have %d open files, so it takes %d connections instead of %d; raise the limit "
        "with ulimit -n",
        soft,
        fewer,
        bounds.connections,
    )
    return replace(bounds, connections=fewer)


def limited(bounds: Limits) -> type[Any]:
    """The class of a server's connections."""
    return type("LimitedProtocol", (BoundedProtocol,), {"limits": bounds})
