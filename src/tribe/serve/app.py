"""The web application: a Starlette application of one worker, with the handler of each path."""

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tribe.core.shortage import is_out_of_memory
from tribe.fields import printable
from tribe.serve import errors, plain, protocol
from tribe.serve.arguments import ARGUMENTS, NoArguments, ShareArguments
from tribe.serve.decoding import PIECE, Decoders, Unpacker
from tribe.serve.edge import EarlyAnswers
from tribe.serve.errors import EXPECTED, BadRequest, NotFound, as_serve_error
from tribe.serve.fairness import Shares
from tribe.serve.protocol import InferResult
from tribe.serve.security import Principal
from tribe.serve.service import Service
from tribe.streams.names import check_stream_name

T = TypeVar("T")
log = logging.getLogger("tribe.serve")
Handler = Callable[[Request], Awaitable[Response]]

LARGE, LARGE_JSON = 2**20, 2**16  # bytes that are decoded in a thread, so that the event loop goes on
MANY = 10_000  # numbers that are encoded in a thread
MAX_ARGUMENTS = 2**16  # bytes of the JSON of a control request
HEARTBEAT = 15.0  # seconds: a comment keeps proxies from closing a stream of events
BINARY, JSON = "application/octet-stream", "application/json"
METRICS = "text/plain; version=0.0.4; charset=utf-8"
SINGLE = (  # headers of which a request may have one only: a proxy may read the other one
    *("x-tribe-stream", "inference-header-content-length", "content-encoding", "authorization", "host", "origin"),
)
ACTIONS = (  # on a stream
    *("end", "reset", "freeze", "unfreeze", "promote", "demote", "snapshot", "rollback", "move", "back"),
)
ALL = ("promote", "demote")  # on all streams of a token
PAGE = {  # path -> file, type
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/tokens.js": ("tokens.js", "text/javascript"),
}
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


class StreamsQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The query of ``GET /v1/streams``."""

    stored: bool = False  # also names of the streams in the store, in order, a page of them
    after: str = ""  # the last name of the page before


class AllQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The query of an action on all streams."""

    after: str = ""  # the name that the answer before says


class MetricsQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The query of ``GET /metrics``."""

    streams: bool = False  # also gauges of single streams


class App(Starlette):
    """The application of a server."""

    def __init__(self, service: Service) -> None:
        self.handlers = handlers = Handlers(service)
        super().__init__(
            routes=_routes(handlers),
            exception_handlers=dict.fromkeys((*EXPECTED, ClientDisconnect, HTTPException, Exception), handlers.error),
            lifespan=lambda _: service.running(),
        )
        self.router.redirect_slashes = False
        self._edge = EarlyAnswers(super().__call__)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; until its answer is sent, it counts as one of its user's."""
        try:
            await self._edge(scope, receive, send)
        finally:
            if (user := scope.get("user")) is not None:
                self.handlers.requests.add(user, -1)


def _routes(handlers: "Handlers") -> list[Route]:
    """Return the routes; those that take most requests first."""

    def route(method: str, path: str, handler: Handler, public: bool = False) -> Route:
        async def answer(request: Request) -> Response:
            handlers.check(request, public)
            try:
                response = await handler(request)
            except RuntimeError as error:  # torch has no type of its own for a lack of memory
                if is_out_of_memory(error):
                    raise errors.as_serve_error(error) from error
                raise
            if public and not handlers.service.access.is_open:  # a pipeline of a stranger ends with its first request
                response.headers["connection"] = "close"
            handlers.responses.labels(response.status_code).inc()
            return response

        return Route(path, answer, methods=[method])

    def public(path: str, handler: Handler) -> Route:
        return route("GET", path, handler, public=True)

    def constant(path: str, value: Any) -> Route:
        async def answer(request: Request) -> Response:
            return as_json(value)

        return public(path, answer)

    stream, served = "/v1/streams/{stream}", handlers.model
    models = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
    return [
        *(route("POST", f"{model}/infer", handlers.infer) for model in models),
        route("POST", f"{stream}/predict", handlers.predict),
        route("POST", "/v1/predict", handlers.predict),
        public("/v2/health/live", handlers.live),
        public("/v2/health/ready", handlers.ready),
        constant("/v2", protocol.server_metadata()),
        *(constant(model, protocol.model_metadata(served)) for model in models),
        *(public(f"{model}/ready", handlers.ready) for model in models),
        *(constant(f"{model}/config", protocol.model_config(served)) for model in models),
        route("POST", f"{models[1]}/move", handlers.move_share),
        route("POST", f"{models[1]}/back", handlers.back_all),
        route("GET", "/v1/streams", handlers.streams),
        route("GET", "/v1/events", handlers.events),
        route("GET", stream, handlers.stream),
        route("PUT", stream, partial(handlers.control, action="create")),
        route("DELETE", stream, partial(handlers.control, action="drop")),
        *(route("POST", f"{stream}/{action}", partial(handlers.control, action=action)) for action in ACTIONS),
        *(route("POST", f"/v1/{action}", partial(handlers.control_all, action=action)) for action in ALL),
        route("GET", f"{stream}/thumbnail", handlers.thumbnail),
        route("GET", f"{stream}/state", handlers.get_state),
        route("PUT", f"{stream}/state", handlers.put_state),
        route("GET", "/metrics", handlers.metrics),
        *(public(path, handlers.page) for path in PAGE),
    ]


def as_json(value: Any, status: int = 200) -> Response:
    """Return an answer in JSON: a number that is not finite becomes null, a value of another type a text."""
    return Response(msgspec.json.encode(value, enc_hook=str), status, media_type=JSON)


class Bodies:
    """Reads bodies, and bounds the bytes of all that the server holds at the same time, which users share."""

    def __init__(self, limit: int, decoders: Decoders, alone: bool = True) -> None:
        self.limit, self.decoders = limit, decoders
        words = "the server holds {used:,} bytes of other requests, {own:,} of them yours; try again"
        self.shares = Shares(limit, words, alone)

    @property
    def used(self) -> int:
        """Return how many bytes requests hold."""
        return self.shares.used

    @asynccontextmanager
    async def read(self, request: Request, limit: int, seconds: float) -> AsyncIterator[bytearray]:
        """Read a body of at most ``limit`` bytes, also after decompression. Its bytes count until the block ends."""
        if (length := int(request.headers.get("content-length", 0))) > limit:  # the parser of HTTP has checked it
            words = f"the body has {length:,} bytes; expected {limit:,} at most. Send fewer images at once"
            raise errors.TooLarge(words)
        taken, user = 0, request.user
        try:
            body = bytearray()
            try:
                async with asyncio.timeout(seconds):
                    async for chunk in request.stream():
                        taken += self._take(user, len(chunk))
                        body += chunk
                        if len(body) > limit:
                            raise errors.TooLarge(f"the body has more than {limit:,} bytes. Send fewer images at once")
            except TimeoutError:
                words = f"the body did not arrive within {seconds:g} s; the connection is closed. Send it again"
                raise errors.TooSlow(words) from None
            encoding = request.headers.get("content-encoding", "identity").lower()
            if encoding != "identity":
                unpacker, body = Unpacker(body, encoding), bytearray()
                while not unpacker.done:
                    taken += self._take(user, PIECE)
                    piece = await self.decoders.run(user, unpacker.read)
                    body += piece
                    self.shares.add(user, len(piece) - PIECE)
                    taken += len(piece) - PIECE
                    if len(body) > limit:
                        words = f"the body has more than {limit:,} bytes when it is unpacked"
                        raise errors.TooLarge(f"{words}. Send fewer images at once")
                del unpacker
            given = [body]
            del body  # the block alone holds it, and may free it before its end
            yield given.pop()
        finally:
            self.shares.add(user, -taken)

    @contextmanager
    def hold(self, count: int, user: Principal | None = None) -> Iterator[None]:
        """Count the bytes of images, which are up to 50 times those of a picture, until the block ends."""
        self._take(user, count)
        try:
            yield
        finally:
            self.shares.add(user, -count)

    def _take(self, user: Principal | None, count: int) -> int:
        if user is None:
            return self.shares.take(user, count)
        user.check_bytes(self.shares.of.get(user, 0) + count)
        return user.take(self.shares, count)


# -- handlers ----------------------------------------------------------------------------------------------------------


class Handlers:
    """The handler of each path."""

    def __init__(self, service: Service) -> None:
        self.service, self.model, self.limits, self.worker = service, service.model, service.limits, service.worker
        self.responses = self.worker.metrics.responses
        self.decoders = Decoders()
        alone = self._has_one_user()
        self.bodies = Bodies(service.limits.bodies, self.decoders, alone)
        words = "{used} requests are being answered, {own} of them yours; send fewer at the same time"
        self.requests = Shares(service.limits.connections, words, alone)
        self.crowded: Callable[[], bool] = lambda: False  # whether more connections are open than the limit
        self._page = {path: files("tribe.serve").joinpath(name).read_bytes() for path, (name, _) in PAGE.items()}

    def _has_one_user(self) -> bool:
        return len(self.service.access.users) < 2

    def reload_tokens(self) -> None:
        """Read the file of tokens again, on the event loop, and log what changed; a wrong file changes nothing."""
        try:
            log.warning("the file of tokens was read again: %s", self.service.access.reload())
        except (ValueError, OSError) as error:
            log.error("the tokens stay as they are: %s", printable(str(error)))
        self.bodies.shares.alone = self.requests.alone = self._has_one_user()

    def check(self, request: Request, public: bool) -> None:
        """Refuse wrong headers and names, pages of other sites and, unless the path is public, unknown users."""
        headers, access, names = request.headers, self.service.access, request.path_params
        if len(given := headers.keys()) > len(set(given)):
            for name, count in Counter(given).items():
                if count > 1 and name in SINGLE:
                    raise BadRequest(f"the header {name} occurs {count} times; expected once")
        access.check_site(headers.get("host", ""), headers.get("origin"))
        if not public:
            if (site := headers.get("sec-fetch-site", "none")) not in ("none", "same-origin"):
                raise errors.Forbidden(f"a page of another site sent this ({site[:20]}); only pages of this server may")
            self.service.check_ready()
            if access.is_open and self.crowded():  # a user with a token gets in, however many strangers there are
                raise errors.Unavailable(f"more than {self.limits.connections} connections are open; try again")
            user = access.identify(headers.get("authorization"))
            user.take(self.requests, 1)
            request.scope["user"] = user  # `App` then gives its place back
        if "model" in names:
            self.model.check(names["model"], names.get("version", ""))
        if "stream" in names:
            check_stream_name(names["stream"])
            if (named := headers.get("x-tribe-stream", names["stream"])) != names["stream"]:
                raise BadRequest(
                    f"the path names the stream {names['stream']!r}, the header x-tribe-stream {named[:130]!r}"
                )

    async def error(self, request: Request, error: Exception) -> Response:
        """Answer an error of a handler or of routing; uvicorn drops the rest of the body and logs an unexpected one."""
        path = request.scope["path"][:80]
        if isinstance(error, HTTPException) and error.status_code == 405:
            routes = [each for each in request.app.routes if each.path_regex.match(request.scope["path"])]
            allowed = ", ".join(sorted({method for each in routes for method in each.methods}))
            error = errors.WrongMethod(f"{path!r} has no {request.method}; expected {allowed}", allowed)
        elif isinstance(error, HTTPException):
            error = NotFound(f"no path {path!r}; docs/serving.md lists them, and GET /v2 says that the server is there")
        if isinstance(error, ClientDisconnect):
            response = Response(status_code=499)  # it is counted; nothing is sent
        else:
            error = as_serve_error(error)
            response = as_json({"error": str(error)}, error.status)
            response.headers.update(error.headers)
        self.responses.labels(response.status_code).inc()
        return response

    async def infer(self, request: Request) -> Response:
        """Answer POST /v2/models/{model}/infer."""
        arrived = asyncio.get_running_loop().time()
        head_size, stream = (request.headers.get(n) for n in ("inference-header-content-length", "x-tribe-stream"))
        async with self.bodies.read(request, self.limits.body, self.limits.body_seconds) as body:
            in_thread = len(body) > (LARGE_JSON if head_size is None else LARGE)
            decode = partial(protocol.decode_infer, body, head_size, self.model, stream)
            asked = await self.decoders.run(request.user, decode) if in_thread else decode()
            del body, decode
            asked = dataclasses.replace(asked, version=request.path_params.get("version"))
            with self.bodies.hold(asked.images.nbytes, request.user):
                result = await self.service.infer(asked, request.user, arrived)
        encode = partial(protocol.encode_infer, result, asked, self.model)
        content, size = await self._encode(request, result, encode)
        if size is None:
            return Response(content, media_type=JSON)
        return Response(content, headers={"inference-header-content-length": str(size)}, media_type=BINARY)

    async def predict(self, request: Request) -> Response:
        """Answer POST /v1/predict and /v1/streams/{stream}/predict; a stream begins with its first images."""
        arrived = asyncio.get_running_loop().time()
        headers, query = request.headers, _query(request)
        kind, id = headers.get("content-type", ""), headers.get("x-request-id")
        async with self.bodies.read(request, self.limits.body, self.limits.body_seconds) as body:
            options = kind, query, self.model, request.path_params.get("stream"), id
            decode = partial(plain.decode_predict, body, *options)
            at_once = len(body) <= LARGE_JSON and kind == plain.NPY  # a small picture may have many pixels
            asked = decode() if at_once else await self.decoders.run(request.user, decode)
            del body, decode
            if not (as_npy := plain.NPY in headers.get("accept", "")):
                self.model.check_answer(len(asked.images))
            with self.bodies.hold(asked.images.nbytes, request.user):
                result = await self.service.infer(asked, request.user, arrived)
        if as_npy:
            content, named = plain.encode_npy(protocol.as_numbers(result.logits)), {"x-tribe-version": result.version}
            return Response(content, headers=named, media_type=plain.NPY)
        encode = partial(plain.encode_predict, result, asked, self.model)
        return Response(await self._encode(request, result, encode), media_type=JSON)

    async def _encode(self, request: Request, result: InferResult, encode: Callable[[], T]) -> T:
        """Encode an answer, in a thread if it is large."""
        return await self.decoders.run(request.user, encode) if result.logits.numel() > MANY else encode()

    async def live(self, request: Request) -> Response:
        """Answer GET /v2/health/live: the process answers."""
        return Response()

    async def ready(self, request: Request) -> Response:
        """Answer GET /v2/health/ready and that of the model: requests are accepted."""
        return Response(status_code=200 if self.service.ready else 503)

    async def streams(self, request: Request) -> Response:
        """Answer GET /v1/streams; ``?stored=true``: also with a page of the names of those in the store."""
        query = msgspec.convert(_query(request), StreamsQuery, strict=False)
        answer: dict[str, Any] = {"model": self.model.name, "method": self.model.method}
        found = [each for each in self.worker.streams() if request.user.can_access(each["name"])]
        answer["streams"] = [self._with_thumbnail(each) for each in found]
        answer["versions"] = self.model.versions
        answer["open_streams"] = self.worker.policy.open_streams
        if request.user.sees_all:
            answer["unlearned"] = self.worker.scheduler.only_predicted
        users = self.service.access.users
        seen = users if request.user.sees_all else [each for each in users if each is request.user]
        answer["tokens"] = self.service.tokens(seen, self.bodies.shares.of)
        if query.stored:
            answer["stored"] = await self.worker.stored(request.user.token.streams, query.after)
        return as_json(answer)

    async def stream(self, request: Request) -> Response:
        """Answer GET /v1/streams/{stream}."""
        name = request.path_params["stream"]
        request.user.check("see", name)
        return as_json(self._with_thumbnail(self.worker.stream(name)))

    def _with_thumbnail(self, description: dict[str, Any]) -> dict[str, Any]:
        frame = self.service.thumbnails.get(description["name"])
        return description if frame is None else description | {"thumbnail": frame.number}

    async def control(self, request: Request, action: str) -> Response:
        """Answer PUT and DELETE /v1/streams/{stream}, and POST of an action on it, whose arguments are in the body."""
        name, arguments = request.path_params["stream"], {}
        request.user.check(action, name)
        if request.method == "POST":
            arguments = await self._arguments(request, ARGUMENTS.get(action, NoArguments))
        if action == "create":
            arguments["user"] = request.user
        elif action in ("drop", "end"):
            self.service.thumbnails.drop(name)
        return as_json(await self.worker.control(action, name, **arguments))

    async def control_all(self, request: Request, action: str) -> Response:
        """Answer POST /v1/promote and /v1/demote: all streams of the token, a page of them at a time."""
        request.user.check(action, request.user.token.streams)
        query = msgspec.convert(_query(request), AllQuery, strict=False)
        await self._arguments(request, NoArguments)
        return as_json(await self.worker.control.set_all(action, request.user, query.after))

    async def _arguments(self, request: Request, kind: type[NoArguments]) -> dict[str, Any]:
        """Return the arguments in the body of a control request."""
        async with self.bodies.read(request, MAX_ARGUMENTS, self.limits.body_seconds) as body:
            decoder = msgspec.json.Decoder(kind)
            arguments = msgspec.structs.asdict(protocol.decode_json(bytes(body.strip() or b"{}"), decoder))
        self.service.check_ready()  # it may have stopped meanwhile
        return arguments

    async def move_share(self, request: Request) -> Response:
        """Answer POST /v2/models/{model}/versions/{version}/move: move a share of all streams there."""
        request.user.check_all("move")
        version, arguments = request.path_params["version"], await self._arguments(request, ShareArguments)
        return as_json(await self.worker.control.moves.move_share(version, **arguments))

    async def back_all(self, request: Request) -> Response:
        """Answer POST /v2/models/{model}/versions/{version}/back: all streams that moved there go back."""
        request.user.check_all("back")
        await self._arguments(request, NoArguments)
        return as_json(await self.worker.control.moves.back_all(request.path_params["version"]))

    async def get_state(self, request: Request) -> Response:
        """Answer GET /v1/streams/{stream}/state: a file for `tribe.load`."""
        name = request.path_params["stream"]
        request.user.check("get_state", name)
        content = await self.worker.control.get_state(name)
        shown = {"content-disposition": f'attachment; filename="{name}.safetensors"'}
        return Response(content, headers=shown, media_type=plain.SAFETENSORS)

    async def put_state(self, request: Request) -> Response:
        """Answer PUT /v1/streams/{stream}/state: replace the state by that of a file."""
        name = request.path_params["stream"]
        request.user.check("put_state", name)  # before a large body is read
        async with self.bodies.read(request, self.limits.state, self.limits.state_seconds) as body:
            content = await asyncio.to_thread(bytes, body)
            del body
            self.service.check_ready()
            return as_json(await self.worker.control("put_state", name, data=content, user=request.user))

    async def thumbnail(self, request: Request) -> Response:
        """Answer GET /v1/streams/{stream}/thumbnail: its last frame, small, as a PNG."""
        name, thumbnails = request.path_params["stream"], self.service.thumbnails
        request.user.check("see", name)
        if not thumbnails.limit:
            raise NotFound("this server keeps no thumbnails; tribe serve --set limits.thumbnails=33554432 keeps 32 MB")
        self.worker.stream(name)
        if (frame := thumbnails.get(name)) is None:
            raise NotFound(f"no thumbnail of stream {name!r}: it has had no request, or its frame was dropped")
        content = await asyncio.to_thread(frame.encode)
        return Response(content, headers={"cache-control": "no-store"}, media_type="image/png")

    async def events(self, request: Request) -> Response:
        """Answer GET /v1/events: events of the token's streams as they happen, until the server stops."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(self._events(request), media_type="text/event-stream", headers=headers)

    async def _events(self, request: Request) -> AsyncIterator[bytes]:
        yield b": events\n\n"
        async for event in self.worker.log.listen(HEARTBEAT):
            if not self.service.access.has(request.user):
                return  # its token was withdrawn
            if event is None:
                yield b": still here\n\n"
            elif request.user.can_access(event.stream or ""):
                yield b"data: " + msgspec.json.encode(event._asdict(), enc_hook=str) + b"\n\n"

    async def metrics(self, request: Request) -> Response:
        """Answer GET /metrics, for Prometheus; ``?streams=true``: with gauges of single streams, up to a limit."""
        token = request.user.token
        if token.streams:
            raise errors.Forbidden(
                f"the token {token.name!r} is for some streams; GET /metrics needs one for all streams"
            )
        query = msgspec.convert(_query(request), MetricsQuery, strict=False)
        more = self.service.token_metrics(self.bodies.shares.of)
        return Response(self.worker.metrics_text(query.streams, more), media_type=METRICS)

    async def page(self, request: Request) -> Response:
        """Answer GET / and the files of the page: the page for people."""
        path = request.scope["path"]
        return Response(self._page[path], headers=PAGE_HEADERS, media_type=PAGE[path][1])


def _query(request: Request) -> dict[str, str]:
    """Return the query of a URL, each parameter once."""
    query = request.query_params
    if len(query.multi_items()) > len(query):
        raise BadRequest("the URL gives a parameter twice; expected each once")
    return dict(query)
