"""One HTTP call: its headers, its body, its answer. Plain ASGI, because every request passes through here."""

import asyncio
import json
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from tribe.fields import document
from tribe.serve.bodies import Body, Budget, Gone, Receive
from tribe.serve.protocol.errors import BadRequest, ServeError, TooSlow
from tribe.serve.security import Holder
from tribe.serve.service import Service

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Scope = MutableMapping[str, Any]
ONCE = (
    b"x-tribe-stream",
    b"inference-header-content-length",
    b"content-encoding",
    b"authorization",
    b"host",
    b"origin",
)
JSON = b"application/json"
DISCARD = 8 * 2**20, 2.0  # bytes and seconds that a client may go on sending after it was refused
log = logging.getLogger("tribe.serve")


class Reply(NamedTuple):
    """A successful answer."""

    body: bytes | AsyncIterator[bytes]
    type: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()
    status: int = 200


document(
    Reply,
    body="all of it, or its parts as they come",
    type="the value of Content-Type",
    headers="more headers",
    status="of HTTP",
)


class Call:
    """One request."""

    __slots__ = ("arrived", "body", "headers", "holder", "scope")

    def __init__(self, scope: Scope, headers: dict[bytes, bytes], body: Body, holder: Holder, arrived: float) -> None:
        self.scope, self.headers, self.body, self.holder, self.arrived = scope, headers, body, holder, arrived

    def header(self, name: bytes) -> str | None:
        """The value of a header; its name has small letters."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    def query(self) -> dict[str, str]:
        """What stands after the question mark."""
        try:
            pairs = parse_qsl(self.scope["query_string"].decode("ascii"), keep_blank_values=True, max_num_fields=16)
        except ValueError as error:
            raise BadRequest(f"the part of the URL after the question mark cannot be read: {error}") from None
        found = dict(pairs)
        if len(found) < len(pairs):
            raise BadRequest("the URL gives a parameter twice; expected each once")
        return found

    def part(self, name: str) -> str:
        """A part of the path."""
        return str(self.scope["path_params"][name])


Handler = Callable[[Call], Awaitable[Reply]]


class Front:
    """Runs handlers: it checks who calls, bounds what is read, and turns errors into answers."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.budget = Budget(service.limits.bodies)
        self.statuses: Counter[int] = Counter()  # answers by their status

    async def run(self, handler: Handler, scope: Scope, receive: Receive, send: Send, public: bool = False) -> None:
        """Answer one request. ``public``: without a token, too."""
        arrived = asyncio.get_running_loop().time()
        headers = dict(scope["headers"])
        with self.budget.account() as take:
            body = Body(receive, headers, take)
            try:
                if len(headers) < len(scope["headers"]):
                    _check_once(scope["headers"])
                holder = self._holder(headers, public)
                reply = await handler(Call(scope, headers, body, holder, arrived))
            except Gone:
                self.statuses[499] += 1
                return
            except ServeError as error:
                await self.refuse(error, body, scope, headers, send)
                return
            except Exception:
                log.exception("an unexpected error in %s %s", scope["method"], scope["path"][:200])
                await self.refuse(
                    ServeError("an unexpected error in the server; its log says more"), body, scope, headers, send
                )
                return
            self.statuses[reply.status] += 1
            await _send(reply, send)

    def _holder(self, headers: Mapping[bytes, bytes], public: bool) -> Holder:
        access = self.service.access
        host, origin = headers.get(b"host"), headers.get(b"origin")
        if access.hosts or origin is not None:
            access.check_site(*(None if v is None else v.decode("latin-1") for v in (host, origin)))
        if public or access.is_open:
            return access.everybody
        given = headers.get(b"authorization")
        return access.identify(None if given is None else given.decode("latin-1"))

    async def refuse(
        self, error: ServeError, body: Body, scope: Scope, headers: Mapping[bytes, bytes], send: Send
    ) -> None:
        """Send an error. If the client has not sent all of its body, the connection is closed."""
        self.statuses[error.status] += 1
        text = json.dumps({"error": str(error)}).encode()
        sent = [(b"content-type", JSON), (b"content-length", str(len(text)).encode()), *error.headers]
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        unread = has_body and not body.complete
        if unread:
            sent.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": error.status, "headers": sent})
        await send({"type": "http.response.body", "body": text, "more_body": unread})
        if unread:
            if not isinstance(error, TooSlow) and b"expect" not in headers:
                await body.discard(*DISCARD)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(reply: Reply, send: Send) -> None:
    headers = [(b"content-type", reply.type), *reply.headers]
    if isinstance(reply.body, bytes):
        headers.append((b"content-length", str(len(reply.body)).encode()))
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body})
        return
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    async for part in reply.body:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _check_once(headers: list[tuple[bytes, bytes]]) -> None:
    """Refuse a header that occurs twice where only one can count: a proxy may read the other one."""
    names = Counter(name for name, _ in headers)
    for name in ONCE:
        if names[name] > 1:
            raise BadRequest(f"the header {name.decode()} occurs {names[name]} times; expected once")


def as_json(value: Any, status: int = 200) -> Reply:
    """An answer in JSON."""
    return Reply(json.dumps(finite(value), allow_nan=False).encode(), status=status)


def finite(value: Any) -> Any:
    """A value as JSON can hold it: a number that is not finite becomes null, and whatever is no plain value a text.

    >>> finite({"a": [1.5, float("nan")]})
    {'a': [1.5, None]}
    """
    if isinstance(value, Mapping):
        return {str(name): finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)
