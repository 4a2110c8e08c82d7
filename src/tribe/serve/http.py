"""Middleware, bodies and error answers of the HTTP side, as plain ASGI."""

import asyncio
import contextlib
import zlib
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tribe.serve.errors import BadRequest, ServeError, TooLarge, TooSlow, Unavailable, WrongType
from tribe.serve.security import Access

JSON = "application/json"
SINGLE = (  # headers of which a request may have one only: a proxy may read the other one
    *("x-tribe-stream", "inference-header-content-length", "content-encoding", "authorization", "host", "origin"),
)
WINDOW_BITS = {"gzip": 31, "deflate": 15}  # of zlib


# -- answers -----------------------------------------------------------------------------------------------------------


def as_json(value: Any, status: int = 200) -> Response:
    """Return an answer in JSON: a number that is not finite becomes null, a value of another type a text."""
    return Response(msgspec.json.encode(value, enc_hook=str), status, media_type=JSON)


def error_response(scope: Scope, error: ServeError) -> Response:
    """Return the answer for an error; uvicorn reads and drops what is left of the body."""
    response = as_json({"error": str(error)}, error.status)
    response.headers.update(error.headers)
    if any(name == b"expect" for name, _ in scope["headers"]):  # the client may not send the body that it announced
        response.headers["connection"] = "close"
    return response


# -- middleware --------------------------------------------------------------------------------------------------------


class CountResponses:
    """Count the answers by their status.

    Args:
        app: the application.
        counter: has the label ``status``.
    """

    def __init__(self, app: ASGIApp, counter: Counter) -> None:
        self.app, self.counter = app, counter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.counter.labels(message["status"]).inc()
            await send(message)

        try:
            await self.app(scope, receive, counted)
        except Exception:  # Starlette answers with 500
            self.counter.labels(500).inc()
            raise


class CheckSite:
    """Refuse repeated headers, pages of other sites, and names of other hosts.

    Args:
        app: the application.
        access: knows the names of this host.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        app = self.app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                if len(names := headers.keys()) > len(set(names)):
                    _check_single(names)
                self.access.check_site(headers.get("host", ""), headers.get("origin"))
            except ServeError as error:
                app = error_response(scope, error)
        await app(scope, receive, send)


def _check_single(names: list[str]) -> None:
    counts = Tally(names)
    for name in SINGLE:
        if counts[name] > 1:
            raise BadRequest(f"the header {name} occurs {counts[name]} times; expected once")


class RequireToken:
    """Set ``scope["user"]`` to the `Principal` of the request's token, or refuse the request.

    Args:
        app: the handler.
        access: the tokens.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        scope["user"] = self.access.identify(Headers(scope=scope).get("authorization"))
        await self.app(scope, receive, send)


# -- bodies ------------------------------------------------------------------------------------------------------------


class BodyBudget:
    """Bound the bytes of all bodies that the server holds at the same time.

    Args:
        limit: in bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0

    @contextlib.contextmanager
    def account(self) -> Iterator[Callable[[int], None]]:
        """Give a function that takes bytes from the budget; they are returned when the block ends."""
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            if self.used + count > self.limit:
                raise Unavailable(f"the server holds {self.used:,} bytes of other requests; try again")
            self.used += count
            taken += count

        try:
            yield take
        finally:
            self.used -= taken


async def read_body(request: Request, limit: int, seconds: float, take: Callable[[int], None]) -> bytearray:
    """Read a body, with or without a Content-Length, and decompress it.

    Args:
        request: the request.
        limit: the most bytes, also after decompression.
        seconds: until all must have arrived.
        take: accounts for the bytes, see `BodyBudget`.
    """
    if (length := int(request.headers.get("content-length", 0))) > limit:  # the parser of HTTP has checked it
        raise TooLarge(f"the body has {length:,} bytes; expected {limit:,} at most. Send fewer images at once")
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                take(len(chunk))
                body += chunk
                if len(body) > limit:
                    raise TooLarge(f"the body has more than {limit:,} bytes. Send fewer images at once")
    except TimeoutError:
        raise TooSlow(
            f"the body did not arrive within {seconds:g} s; the connection is closed. Send it again"
        ) from None
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "identity":
        return body
    unpacked = await asyncio.to_thread(decompress, body, encoding, limit)
    take(len(unpacked))
    return unpacked


def decompress(body: bytearray, encoding: str, limit: int) -> bytearray:
    """Return the bytes of a compressed body, at most ``limit``."""
    if encoding not in WINDOW_BITS:
        raise WrongType(f"the body has the encoding {encoding[:40]!r}; expected gzip, deflate or none")
    decompressor = zlib.decompressobj(WINDOW_BITS[encoding])
    try:
        content = decompressor.decompress(body, limit + 1)
    except zlib.error as error:
        raise BadRequest(f"the body is not {encoding}: {error}") from None
    if len(content) > limit:
        raise TooLarge(f"the body has more than {limit:,} bytes when it is unpacked. Send fewer images at once")
    if not decompressor.eof:
        raise BadRequest(f"the body ends before its {encoding} data does: it was cut short")
    return bytearray(content)
