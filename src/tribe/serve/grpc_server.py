"""A server of gRPC with the limits of HTTP, as far as its library has them. The extra `grpc`."""

import asyncio
import contextlib
import importlib
import os
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tribe.serve.config import Limits
from tribe.serve.errors import Unavailable
from tribe.serve.security import Principal

# The core of the library writes a line for each piece of metadata that it cannot read, to standard error.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
grpc: Any = importlib.import_module("grpc")
aio: Any = importlib.import_module("grpc.aio._server")
cygrpc: Any = importlib.import_module("grpc._cython.cygrpc")
MAX_METADATA = 16 * 2**10  # bytes
CALLS = 100  # at the same time on one connection
HANDSHAKE = 10.0  # seconds until a new connection speaks HTTP/2
KEEPALIVE = 20.0  # seconds: so long without a sign of life, then so long until a ping is answered
FILES = 4  # gRPC has at most this part of the files that the process may open


class Places:
    """Places that calls take for a while; one user has a share of them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._all = asyncio.Semaphore(count)
        self._users: weakref.WeakKeyDictionary[Principal, asyncio.Semaphore] = weakref.WeakKeyDictionary()

    @asynccontextmanager
    async def take(self, user: Principal, share: int, seconds: float) -> AsyncIterator[None]:
        """Wait for a place, and keep it until the block ends."""
        own = self._users.setdefault(user, asyncio.Semaphore(share))
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(seconds):
                    await stack.enter_async_context(own)
                    await stack.enter_async_context(self._all)
            except TimeoutError:
                raise Unavailable(f"other messages have arrived for {seconds:g} s; try again") from None
            yield

    @asynccontextmanager
    async def take_now(self, user: Principal, share: int, what: str) -> AsyncIterator[None]:
        """Take a place until the block ends, or raise if there is none."""
        own = self._users.setdefault(user, asyncio.Semaphore(share))
        if own.locked() or self._all.locked():
            raise Unavailable(f"as many {what} as may be at the same time; try again")
        async with own, self._all:
            yield


class KnownMethods(cygrpc.AioServer):  # type: ignore[misc]  # it has no types
    """Answers calls of unknown methods itself: one whose name is not UTF-8 would end the library's main loop."""

    async def _request_call(self) -> None:
        refusals: set[asyncio.Task[None]] = set()
        while True:
            call = await super()._request_call()
            task = asyncio.create_task(self._refuse(call))
            refusals.add(task)
            task.add_done_callback(refusals.discard)
            del call

    async def _refuse(self, call: Any) -> None:
        context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
        with contextlib.suppress(grpc.aio.BaseError):
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the server does not have this method")


class KnownMethodsServer(aio.Server):  # type: ignore[misc]  # it has no types
    """A server of `grpc.aio` with `KnownMethods` in it."""

    def __init__(self, options: list[tuple[str, int]]) -> None:
        super().__init__(None, (), (), (), None, None)
        self._server = KnownMethods(self._loop, None, (), (), options, None)


def new_server(limits: Limits, most: int) -> Any:
    """Return a server for messages of at most ``most`` bytes, which listens nowhere yet."""
    connections = min(limits.connections, max(1, open_files() // FILES))
    settings: dict[str, float] = {
        "grpc.max_receive_message_length": most,
        "grpc.max_metadata_size": MAX_METADATA,
        "grpc.absolute_max_metadata_size": MAX_METADATA,
        "grpc.so_reuseport": 0,
        "grpc.max_allowed_incoming_connections": connections,  # others are closed at once
        "grpc.max_concurrent_streams": CALLS,
        "grpc.http2.bdp_probe": 0,  # else the bytes that are taken before a message is asked for have no fixed bound
        "grpc.server_handshake_timeout_ms": 1000 * HANDSHAKE,
        "grpc.max_connection_idle_ms": 1000 * limits.idle_seconds,
        "grpc.keepalive_time_ms": 1000 * KEEPALIVE,
        "grpc.keepalive_timeout_ms": 1000 * KEEPALIVE,
        "grpc.keepalive_permit_without_calls": 1,
    }
    return KnownMethodsServer([(name, int(value)) for name, value in settings.items()])


def open_files() -> int:
    """Return how many files the process may open."""
    try:
        import resource
    except ImportError:  # not on Windows
        return 2**31
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if soft == resource.RLIM_INFINITY else soft
