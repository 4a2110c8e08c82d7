"""Listen for HTTP and gRPC, and hand what arrives to a worker: in this thread until a signal, or in another thread."""

import asyncio
import contextlib
import gc
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from os import PathLike
from types import FrameType
from typing import Self

import uvicorn

from tribe.fields import is_whole, require
from tribe.serve.app import App
from tribe.serve.backend import Backend
from tribe.serve.config import Limits
from tribe.serve.connections import limited, within_the_system
from tribe.serve.protocol.messages import ModelInfo
from tribe.serve.rpc import listening
from tribe.serve.security import Access, Token, read_tokens
from tribe.serve.service import Service

LOOPBACK = ("localhost", "127.0.0.1", "::1")
BACKLOG = 1024  # connections that the system holds until they are taken
DRAIN = 10.0  # seconds that open requests get when the server stops
log = logging.getLogger("tribe.serve")


class Listener:
    """A server of one worker; ``with`` starts it in a thread, and stops it at the end.

    Args:
        worker: what predicts and learns.
        model: what clients read about the model.
        host: the address to listen on; the default is heard on this machine alone.
        port: of HTTP; 0 takes a free one.
        grpc_port: of gRPC, the extra `grpc`; None: no gRPC; 0 takes a free one.
        tokens: a file of tokens, or tokens; None: everybody may do everything.
        limits: how much is accepted.
        host_names: names under which a server without tokens may be called, beside those of this machine.
        certificate: a PEM file with the certificate chain; TLS is then required.
        key: a PEM file with its key.
    """

    def __init__(
        self,
        worker: Backend,
        model: ModelInfo,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        grpc_port: int | None = None,
        tokens: str | PathLike[str] | Sequence[Token] | None = None,
        limits: Limits | None = None,
        host_names: Sequence[str] = (),
        certificate: str | PathLike[str] | None = None,
        key: str | PathLike[str] | None = None,
    ) -> None:
        for name, number in (("port", port), ("grpc_port", grpc_port)):
            fine = number is None or (is_whole(number, least=0) and number < 2**16)
            require(fine, f"{name} is the number of a port, 0 to 65535", number)
        if (certificate is None) != (key is None):
            raise ValueError("TLS needs both a certificate and its key; got one of them")
        held = as_tokens(tokens)
        self.limits = limits or Limits()
        self.is_open = not held  # nobody needs a token
        self.is_local = is_loopback(host)
        self.service = Service(worker, model, self.limits, new_access(held, host, host_names))
        self.app = App(self.service)
        self.host, self.grpc_port = host, grpc_port
        self._certificate, self._key = certificate, key
        self._port = port
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._server: _Uvicorn | None = None
        self._error: BaseException | None = None

    # -- where it listens ---------------------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        """The port of HTTP; the real one once the server listens."""
        return self._port

    @property
    def url(self) -> str:
        """Where the server is, such as http://127.0.0.1:8000."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self._certificate is None else 'https'}://{host}:{self.port}"

    @property
    def grpc_address(self) -> str | None:
        """Where gRPC is, such as 127.0.0.1:8001; None: nowhere."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return None if self.grpc_port is None else f"{host}:{self.grpc_port}"

    def _bind(self) -> socket.socket:
        """Take the port, or say who has it."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            # With the protocol named, asyncio turns off Nagle's algorithm, which would hold answers back for 40 ms.
            taken = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind((self.host, self._port))
            taken.listen(BACKLOG)
        except OSError as error:
            raise OSError(
                f"cannot listen on {self.host} port {self._port}: {error.strerror or error}. Choose another with "
                "--port, or 0 for a free one"
            ) from error
        self._port = taken.getsockname()[1]
        return taken

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve in this thread until SIGINT or SIGTERM; then finish what was begun, and store every stream.

        The process is the server's: see `shorten_collections`.
        """
        shorten_collections()
        asyncio.run(self._serve(ready, signals=True))

    def start(self) -> Self:
        """Serve in a thread; returns when requests are taken."""
        if self._thread is not None:
            raise RuntimeError("the server runs already")
        began = threading.Event()

        def work() -> None:
            try:
                asyncio.run(self._serve(began.set, signals=False))
            except BaseException as error:
                self._error = error
            finally:
                began.set()

        self._error = None
        self._thread = threading.Thread(target=work, name="tribe-serve", daemon=True)
        self._thread.start()
        began.wait()
        if self._error is not None:
            self._thread.join()
            self._thread, error = None, self._error
            raise error
        return self

    def stop(self) -> None:
        """Finish what was begun, store every stream, and end the thread."""
        if self._thread is None:
            return
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join()
        self._thread = None
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def _serve(self, ready: Callable[[], None], signals: bool) -> None:
        config = uvicorn.Config(
            self.app,
            http=limited(within_the_system(self.limits)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=int(self.limits.idle_seconds),
            timeout_graceful_shutdown=int(DRAIN),
            ssl_certfile=self._certificate,
            ssl_keyfile=self._key,
        )
        config.load()  # reads the certificate, before anything is started
        taken = self._bind()
        try:
            async with contextlib.AsyncExitStack() as stack:
                await stack.enter_async_context(self.app.running())
                if self.grpc_port is not None:
                    await stack.enter_async_context(self._grpc())
                self._server = _Uvicorn(config, self.app, ready, signals)
                await self._server.serve([taken])
        finally:
            taken.close()
            self._server = None

    @contextlib.asynccontextmanager
    async def _grpc(self) -> AsyncIterator[None]:
        async with listening(self.service, self.host, self.grpc_port, self._certificate, self._key) as port:
            self.grpc_port = port
            yield


class _Uvicorn(uvicorn.Server):
    """uvicorn's server, which tells when it listens and when it begins to stop."""

    def __init__(self, config: uvicorn.Config, app: App, ready: Callable[[], None], signals: bool) -> None:
        super().__init__(config)
        self._app, self._ready, self._signals = app, ready, signals

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.routes.closing.set()  # ends streams of events
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        if not self._signals:
            yield
            return
        old = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """The first signal lets open requests finish; the second does not."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


def shorten_collections() -> None:
    """Take all objects that exist now out of Python's garbage collection, for a process that serves from now on.

    A full collection stops every thread. Over the million objects that torch and its modules have it takes 0.1 to
    0.2 s, every few seconds under load; over what requests make it takes some milliseconds.
    """
    gc.collect()
    gc.freeze()


def as_tokens(tokens: str | PathLike[str] | Sequence[Token] | None) -> list[Token]:
    """Tokens from a file, or as they are; None: there are none."""
    return [] if tokens is None else read_tokens(tokens) if isinstance(tokens, str | PathLike) else list(tokens)


def new_access(tokens: Sequence[Token], host: str, host_names: Sequence[str]) -> Access:
    """Who may use a server that listens on an address; without tokens, a local one is called by names that it knows."""
    return Access(tokens, {*LOOPBACK, host, *host_names} if not tokens and is_loopback(host) else ())


def is_loopback(host: str) -> bool:
    """Whether an address is heard on this machine alone.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
