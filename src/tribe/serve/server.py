"""A network as a server: ``with tribe.serve.Server(net, data="streams") as server: ...``."""

import asyncio
import contextlib
import gc
import ipaddress
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from types import FrameType
from typing import Any, Self

import prometheus_client
import torch
import uvicorn

from tribe.core.backbone import Backbone
from tribe.fields import is_whole, require
from tribe.health.prepared import Prepared
from tribe.methods import AnyMethod
from tribe.serve import systemd
from tribe.serve.app import App
from tribe.serve.config import Limits, Policy
from tribe.serve.edge import IdleConnections, LogLimit, choose_parser
from tribe.serve.protocol import ModelInfo
from tribe.serve.security import Access, Token, read_tokens
from tribe.serve.service import Service
from tribe.serve.store import open_store
from tribe.serve.versions import FIRST, Model, build_versions
from tribe.serve.worker import Worker
from tribe.streams.names import check_stream_name
from tribe.streams.shadow import Shadow

HOST = "127.0.0.1"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
BACKLOG = 1024  # connections that the system holds until they are accepted
CROWD = 4  # times the limit of connections: beyond it, uvicorn answers 503 to everybody
DRAIN = 5.0  # seconds that open connections get when the server stops; meanwhile streams are stored
STOP = (signal.SIGINT, signal.SIGTERM)
HANG_UP = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()  # Windows has none
LOGGERS = ("uvicorn.error", "asyncio")  # that log what strangers do wrong

Tokens = str | PathLike[str] | Sequence[Token] | None  # a file, or tokens
Tls = tuple[str | PathLike[str], str | PathLike[str]]  # PEM files: the certificate chain and its key


class Listener:
    """Listen for HTTP and gRPC: in a thread (``with``, `start`, `stop`), or in this thread until a signal (`run`).

    The arguments are those of `Server`; ``service`` is the worker, and who may use it.
    """

    def __init__(
        self,
        service: Service,
        *,
        host: str = HOST,
        port: int = 8000,
        grpc_port: int | None = None,
        tls: Tls | None = None,
    ) -> None:
        for name, number in (("port", port), ("grpc_port", grpc_port)):
            fine = number is None or (is_whole(number, least=0) and number < 2**16)
            require(fine, f"{name} is the number of a port, 0 to 65535", number)
        refuse_open(service.access, host, service.limits)
        self.service, self.app = service, App(service)
        self.host, self.port, self.grpc_port, self._tls = host, port, grpc_port, tls
        self._thread: threading.Thread | None = None
        self._server: _Uvicorn | None = None
        self._error: BaseException | None = None
        self._connections = IdleConnections(service.limits)

    @property
    def url(self) -> str:
        """Return the address, such as http://127.0.0.1:8000; the real port once the server listens."""
        return f"{'http' if self._tls is None else 'https'}://{self._address(self.port)}"

    @property
    def grpc_address(self) -> str | None:
        """Return the address of gRPC, such as 127.0.0.1:8001; None without gRPC."""
        return None if self.grpc_port is None else self._address(self.grpc_port)

    def _address(self, port: int) -> str:
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    def _bind(self) -> socket.socket:
        """Take the port, or raise an error that names it."""
        try:
            # With the protocol named, asyncio turns off Nagle's algorithm, which would delay answers by 40 ms.
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            taken = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind((self.host, self.port))
            taken.listen(BACKLOG)
        except OSError as error:
            words = f"cannot listen on {self.host} port {self.port}: {error.strerror or error}"
            raise OSError(f"{words}. Choose another with --port, or 0 for a free one") from error
        self.port = taken.getsockname()[1]
        return taken

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve in this thread until SIGINT or SIGTERM; then finish what was begun, and store every stream.

        SIGHUP reads the file of tokens again, and `tribe.serve.systemd` says how the server does. The process is the
        server's: see `shorten_collections`.
        """
        shorten_collections()
        loop = list[asyncio.AbstractEventLoop]()

        def hang_up(number: int, frame: FrameType | None) -> None:
            for running in loop:
                running.call_soon_threadsafe(self.app.handlers.reload_tokens)

        def started() -> None:
            systemd.notify(systemd.READY)
            ready()

        async def work() -> None:
            loop.append(asyncio.get_running_loop())
            async with systemd.watched(self.service.worker.alive):
                await self._serve(started, signals=True)

        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # the time at which each series began
        try:
            with LogLimit().on(*LOGGERS), on_signals(hang_up, HANG_UP):
                asyncio.run(work())
        finally:
            loop.clear()
            gc.unfreeze()  # Python frees all objects at its end

    def start(self) -> Self:
        """Serve in a thread; return when requests are accepted."""
        if self._thread is not None:
            raise RuntimeError("the server runs already")
        began = threading.Event()

        def work() -> None:
            try:
                with LogLimit().on(*LOGGERS):
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
            self.stop()
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

    async def _watch(self) -> None:
        """Close the connections that clients hold without use; uvicorn calls this once a second."""
        if self._server is not None:
            self._connections.look(self._server.server_state.connections)

    async def _serve(self, ready: Callable[[], None], signals: bool) -> None:
        limits, (certificate, key) = self.service.limits, self._tls or (None, None)
        config = uvicorn.Config(
            self.app,
            http=choose_parser(is_loopback(self.host)) if limits.parser == "auto" else limits.parser,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            limit_concurrency=CROWD * limits.connections + 1,
            timeout_keep_alive=int(limits.idle_seconds),
            timeout_graceful_shutdown=int(DRAIN),
            timeout_notify=1,
            callback_notify=self._watch,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        config.load()  # reads the certificate, before anything is started
        taken = self._bind()
        try:
            async with contextlib.AsyncExitStack() as worker, contextlib.AsyncExitStack() as calls:
                await worker.enter_async_context(self.service.running())
                if self.grpc_port is not None:
                    try:
                        from tribe.serve.rpc import listening
                    except ImportError as error:
                        words = f"gRPC needs grpcio and protobuf ({error}): pip install 'tribe-tta[grpc]'"
                        raise ImportError(words) from error
                    listens = listening(self.app.handlers, self._address(self.grpc_port), self._tls)
                    self.grpc_port = await calls.enter_async_context(listens)

                async def end() -> None:
                    """Store every stream while clients get their answers: none of them can delay it."""
                    if signals:
                        systemd.notify(systemd.STOPPING)
                    self.service.worker.log.close()
                    await asyncio.gather(worker.aclose(), calls.aclose())

                self._server = server = _Uvicorn(config, ready, end, signals)
                connections = server.server_state.connections
                self.app.handlers.crowded = lambda: len(connections) > limits.connections
                await self._server.serve([taken])
        finally:
            taken.close()
            self._server = None


class _Uvicorn(uvicorn.Server):
    """uvicorn's server, which reports when it listens, and ends something else while it stops."""

    def __init__(
        self, config: uvicorn.Config, ready: Callable[[], None], end: Callable[[], Awaitable[None]], signals: bool
    ) -> None:
        super().__init__(config)
        self._ready, self._end, self._signals = ready, end, signals

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.gather(super().shutdown(sockets), self._end())

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Stop on a signal. Unlike uvicorn's own, this does not raise the signal again: the process exits with 0."""
        with on_signals(self._stop) if self._signals else contextlib.nullcontext():
            yield

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Let open requests finish at the first signal, and not at the second."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


@contextlib.contextmanager
def on_signals(handler: Callable[[int, FrameType | None], None], numbers: Sequence[int] = STOP) -> Iterator[None]:
    """Call a handler on signals in this context; by default on SIGINT and SIGTERM."""
    old = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)


KEPT_BUDGET = (
    "a budget is measured at each start, and stored streams keep what was measured before. Name it once and for all: "
    "--method tribe+rare --set tribe+rare.learn_every=8; `tribe serve --verbose` without --data logs what is measured"
)


class Server(Listener):
    """Serve a trained classifier that adapts to each stream while it predicts.

    ``with`` starts it in a thread and stops it at the end; `run` serves in this thread until a signal. A server starts
    once: it stores and releases its streams when it stops.

    Args:
        model: as for `tribe.fleet`; or versions by name, ``{"1": net, "2": other}``: new streams get the first. A fleet
            in place of a network has a guard and a calibration of its own. See docs/deploying.md.
        method: as for `tribe.fleet`.
        name: what clients call the model.
        data: where streams are kept: a folder, or the address of a Redis server. None: in memory, until it stops.
        shape: of one image, such as (3, 32, 32); None stands for any size. Not given: the channels of the first layer,
            and any size.
        labels: names of the classes, for people.
        policy: trades latency, adaptation and safety.
        host: the address to listen on; the default is reached from this machine alone.
        port: of HTTP; 0 takes a free one.
        grpc_port: of gRPC, the extra `grpc`; None: no gRPC; 0 takes a free one.
        tokens: a file of tokens, or tokens; None: everybody may do everything.
        limits: how much is accepted.
        host_names: names that clients may use for a server without tokens, beside those of this machine.
        tls: PEM files with the certificate chain and its key; None: no TLS.
        options: those of `tribe.fleet`, such as ``guard=True`` or ``shadow=True``, and hyper-parameters of the method.
    """

    def __init__(
        self,
        model: Model | Mapping[str, Model],
        method: str | AnyMethod | Prepared | PathLike[str] = "tribe",
        *,
        name: str = "model",
        data: str | PathLike[str] | None = None,
        shape: Sequence[int | None] | None = None,
        labels: Sequence[str] = (),
        policy: Policy | None = None,
        host: str = HOST,
        port: int = 8000,
        grpc_port: int | None = None,
        tokens: Tokens = None,
        limits: Limits | None = None,
        host_names: Sequence[str] = (),
        tls: Tls | None = None,
        **options: Any,
    ) -> None:
        check_stream_name(name, "the name of a model")
        access = new_access(tokens, host, host_names)
        if data is not None and options.get("budget") is not None:
            raise ValueError(KEPT_BUDGET)
        if policy is not None and policy.exact:
            options["exact"] = True
        begin = Shadow.of(options.pop("shadow", False))
        shadow = replace(begin, demote=begin.demote or (policy is not None and policy.demote))
        given = model if isinstance(model, Mapping) else {FIRST: model}
        built = build_versions(given, method, shadow=shadow, **options)
        first = built.fleets[built.default]
        require(len(labels) in (0, first.classes), f"labels are the names of {first.classes} classes", labels)
        info = ModelInfo(
            name,
            image_shape(first.net, shape),
            first.classes,
            tuple(labels),
            first.method.name,
            versions=built.names,
        )
        store = None if data is None else open_store(data)
        service = Service(Worker(built, store, policy=policy, model=name), info, access, limits, store)
        super().__init__(service, host=host, port=port, grpc_port=grpc_port, tls=tls)


def new_access(tokens: Tokens, host: str = HOST, host_names: Sequence[str] = ()) -> Access:
    """Return the users of a server: without tokens, one on this machine is called by names of this machine alone."""
    entries = read_tokens(tokens) if isinstance(tokens, str | PathLike) else tokens or ()
    file = tokens if isinstance(tokens, str | PathLike) else None
    return Access(entries, (*LOOPBACK, host, *host_names) if not entries and is_loopback(host) else (), file)


def refuse_open(access: Access, host: str, limits: Limits) -> None:
    """Raise for a server without tokens that others reach, unless `Limits.open` says that this is meant."""
    if access.is_open and not is_loopback(host) and not limits.open:
        words = f"it would listen on {host}, beyond this machine, without tokens: everybody could do everything"
        raise ValueError(f"{words}. Give it --tokens FILE, see docs/serving.md, or say --set limits.open=true as well")


def image_shape(net: Backbone, shape: Sequence[int | None] | None) -> tuple[int | None, ...]:
    """Return the shape of one image: the given one or, of the first layer, the channels and any size."""
    if shape is not None:
        fine = len(shape) > 0 and all(size is None or is_whole(size, least=1) for size in shape)
        require(fine, "shape is that of one image, such as (3, 32, 32) or (3, None, None)", shape)
        return tuple(shape)
    if net.rank is None:
        raise ValueError("the network has no convolution, so the shape of its images is not known: give shape=(...)")
    layers = [m for m in net.model.modules() if isinstance(m, torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d)]
    return (layers[0].in_channels, *[None] * (net.rank - 2))


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine alone.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def shorten_collections() -> None:
    """Exclude all objects that exist now from garbage collection, in a process that serves from now on.

    A full collection over the million objects of torch stops every thread for 0.1 to 0.2 s, every few seconds.
    """
    gc.collect()
    gc.freeze()
