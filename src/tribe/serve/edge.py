"""The edge of a server: how long a client may hold what it does not use, and how much its mistakes are logged."""

import asyncio
import contextlib
import importlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from h11 import LocalProtocolError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tribe.serve.config import Limits

LINGER = 1.0  # seconds in which the rest of a body is dropped after an early answer, so that the client can read that
LINGER_BYTES = 2**22  # and at most so much of it
FULL_SECONDS = 1.0  # a connection may wait so long while there are more than the limit
LOGGED = 10  # records of one kind that are logged in `LOGGED_SECONDS`
LOGGED_SECONDS = 60.0
EVERYWHERE = ((b"cross-origin-resource-policy", b"same-origin"),)  # headers of all answers
CLOSE = (b"connection", b"close")


def choose_parser(loopback: bool) -> str:
    """Return uvicorn's name of the parser of HTTP: both drop trailers, and bound headers and pipelines.

    h11 is old and written in Python; zttp takes a third of its time and is young. So h11 reads what strangers send, and
    zttp, where it is installed, what this machine or a proxy on it sends. See docs/decisions/0042-http-front.md.
    """
    if loopback:
        with contextlib.suppress(ImportError, AttributeError):
            return "zttp" if importlib.import_module("zttp").Connection else "h11"
    return "h11"


class EarlyAnswers:
    """Runs an application, and ends the connection of a request that is answered before its body has arrived.

    A server that keeps it open would have to read, for as long as the client likes, a body that is of no use.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for one request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        arrived = closing = False

        async def take() -> Message:
            nonlocal arrived
            message = await receive()
            arrived = arrived or not message.get("more_body", False)
            return message

        async def give(message: Message) -> None:
            nonlocal closing
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), *EVERYWHERE]
                closing = not arrived and _has_body(scope["headers"])
                if closing and CLOSE not in headers:
                    headers.append(CLOSE)
                await send({**message, "headers": headers})
            elif closing and not message.get("more_body", False):
                await send({**message, "more_body": True})  # the client has the whole answer now
                await _drop_rest(scope["headers"], receive)
                await send({"type": "http.response.body", "body": b""})
            else:
                await send(message)

        async def give_if_possible(message: Message) -> None:
            with contextlib.suppress(LocalProtocolError):  # the rest of the request was not HTTP: uvicorn has answered
                await give(message)

        await self.app(scope, take, give_if_possible)


def _has_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name == b"transfer-encoding" or (name == b"content-length" and value != b"0") for name, value in headers)


async def _drop_rest(headers: Iterable[tuple[bytes, bytes]], receive: Receive) -> None:
    if any(name == b"expect" for name, _ in headers):
        return  # the client waits for a word before it sends the body
    left = LINGER_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER):
            while left > 0 and (message := await receive()).get("more_body", False):
                left -= len(message["body"])


class Connection(Protocol):
    """The attributes of a connection of uvicorn that `IdleConnections` reads."""

    transport: asyncio.Transport
    cycle: Any  # the last request; None before the first one


class IdleConnections:
    """Closes connections that a client holds without use: no request comes, or no answer is read."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self.clock = limits, clock
        self._seen: dict[Connection, tuple[Any, float]] = {}  # what each waits for, and since when

    def look(self, connections: Iterable[Any]) -> int:
        """Look at all connections, about once a second, and return how many were closed."""
        now, seen = self.clock(), self._seen
        open_now: list[Connection] = list(connections)
        crowded, self._seen = len(open_now) > self.limits.connections, {}
        closed = 0
        for each in open_now:
            waits_for, allowed = self._waits_for(each, crowded)
            if waits_for is None:
                continue
            before, since = seen.get(each, (None, now))
            since = since if before == waits_for else now
            if now - since > allowed:
                each.transport.abort()  # `close` would wait until all is sent
                closed += 1
            else:
                self._seen[each] = waits_for, since
        return closed

    def _waits_for(self, connection: Connection, crowded: bool) -> tuple[Any, float]:
        """Return what a connection waits for, None for an answer of the server; and the seconds that it may."""
        cycle, limits = connection.cycle, self.limits
        if unsent := connection.transport.get_write_buffer_size():
            return ("reader", unsent), limits.send_seconds
        if cycle is not None and not cycle.response_complete:
            return None, 0.0
        if crowded:
            return ("request", cycle), FULL_SECONDS
        return ("request", cycle), limits.head_seconds + (0.0 if cycle is None else limits.idle_seconds)


class LogLimit(logging.Filter):
    """Lets a few records of each kind pass in a minute, and says then how many there were.

    A kind is a place in the code; ``as_one``: all records of a logger are one kind, of which one passes, without its
    traceback.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, as_one: bool = False) -> None:
        super().__init__()
        self._clock, self._as_one, self._most = clock, as_one, 1 if as_one else LOGGED
        self._counts: dict[tuple[str, int], tuple[float, int]] = {}  # kind -> since when, how many

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record passes."""
        if record.name == "asyncio" and record.exc_info and "data_received" in record.getMessage():
            # uvicorn's code for zttp raises some errors of a parser, and asyncio closes the connection
            words = "a request is not HTTP, and its connection was closed: %s"
            record.msg, record.args, record.exc_info = words, (str(record.exc_info[1])[:100],), None
        if self._as_one:
            record.exc_info = record.exc_text = None
        kind = (record.name, 0) if self._as_one else (record.pathname, record.lineno)  # as many as the code has
        now = self._clock()
        since, count = self._counts.get(kind, (now, 0))
        if now - since >= LOGGED_SECONDS:
            if count > self._most:
                record.msg = f"{record.msg} (and {count - self._most} more like it since {now - since:.0f} s)"
            since, count = now, 0
        self._counts[kind] = since, count + 1
        return count < self._most

    @contextlib.contextmanager
    def on(self, *names: str) -> Iterator[None]:
        """Filter these loggers until the block ends."""
        loggers = [logging.getLogger(name) for name in names]
        for each in loggers:
            each.addFilter(self)
        try:
            yield
        finally:
            for each in loggers:
                each.removeFilter(self)
