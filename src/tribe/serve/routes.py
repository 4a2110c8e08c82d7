"""What each path of the server does. Each handler takes a `Call` and returns a `Reply`, or raises a `ServeError`."""

import asyncio
import json
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any

from tribe.io import json_files
from tribe.serve.backend import Action
from tribe.serve.bodies import Bytes
from tribe.serve.http import Call, Front, Reply, as_json, finite
from tribe.serve.protocol import metadata, plain, v2
from tribe.serve.protocol.errors import BadRequest, NotFound, Unavailable
from tribe.serve.protocol.messages import Answer, Request
from tribe.serve.protocol.names import stream_name
from tribe.serve.service import LARGE, translated
from tribe.serve.thumbnails import encode

BINARY, EVENTS = b"application/octet-stream", b"text/event-stream"
STATE = b"application/x-safetensors"
METRICS = b"text/plain; version=0.0.4; charset=utf-8"
MANY = 10_000  # numbers that are written in a thread: the event loop goes on meanwhile
MOST_ARGUMENTS = 2**16  # bytes of the JSON of a control request
HEARTBEAT = 15.0  # seconds: a comment keeps proxies from closing a stream of events
ROLLBACK = {"to?": (int, None)}
PAGE = {  # the files of the page, by the last part of their path
    "": ("page.html", b"text/html; charset=utf-8"),
    "page.css": ("page.css", b"text/css; charset=utf-8"),
    "page.js": ("page.js", b"text/javascript; charset=utf-8"),
}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SAFE = ((b"content-security-policy", POLICY), (b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-cache"))


class Routes:
    """The handlers of one server."""

    def __init__(self, front: Front) -> None:
        self.front, self.service = front, front.service
        self.model, self.limits, self.worker = self.service.model, self.service.limits, self.service.worker
        self.ready = False  # between the start of the worker and its stop
        self.closing = asyncio.Event()  # set when the server begins to stop

    # -- Open Inference Protocol --------------------------------------------------------------------------------------

    async def infer(self, call: Call) -> Reply:
        """POST /v2/models/{model}/infer."""
        length = call.header(b"inference-header-content-length")
        aligned = int(length) if length is not None and length.isdecimal() and len(length) < 9 else 0
        body = await call.body.read(self.limits.body, self.limits.body_seconds, aligned)
        json_size = len(body) if length is None else aligned
        stream = call.header(b"x-tribe-stream")
        if json_size < LARGE // 16:
            request = v2.parse_infer(body, length, self.model, stream)
        else:
            request = await asyncio.to_thread(v2.parse_infer, body, length, self.model, stream)
        answer = await self._answer(request, call)
        if answer.logits.size < MANY:
            encoded = v2.encode_infer(answer, request, self.model)
        else:
            encoded = await asyncio.to_thread(v2.encode_infer, answer, request, self.model)
        if encoded.json_size is None:
            return Reply(encoded.body)
        return Reply(encoded.body, BINARY, ((b"inference-header-content-length", str(encoded.json_size).encode()),))

    async def infer_named(self, call: Call) -> Reply:
        """The same, for any name of a model."""
        self._check_model(call)
        return await self.infer(call)

    async def _answer(self, request: Request, call: Call) -> Answer:
        if not self.ready:
            raise Unavailable("the server starts or stops; try again")
        return await self.service.infer(request, call.holder, call.arrived)

    async def live(self, call: Call) -> Reply:
        """GET /v2/health/live: the process answers."""
        return Reply(b"")

    async def is_ready(self, call: Call) -> Reply:
        """GET /v2/health/ready: requests are taken."""
        return Reply(b"") if self.ready else Reply(b"", status=503)

    async def server(self, call: Call) -> Reply:
        """GET /v2."""
        return as_json(metadata.server_metadata())

    async def model_ready(self, call: Call) -> Reply:
        """GET /v2/models/{model}/ready."""
        self._check_model(call)
        return await self.is_ready(call)

    async def model_metadata(self, call: Call) -> Reply:
        """GET /v2/models/{model}."""
        self._check_model(call)
        return as_json(metadata.model_metadata(self.model))

    async def model_config(self, call: Call) -> Reply:
        """GET /v2/models/{model}/config."""
        self._check_model(call)
        return as_json(metadata.model_config(self.model))

    def _check_model(self, call: Call) -> None:
        parts = call.scope["path_params"]
        self.model.check(parts["model"], parts.get("version", ""))

    # -- plain API ----------------------------------------------------------------------------------------------------

    async def predict(self, call: Call) -> Reply:
        """POST /v1/streams/{stream}/predict: the stream begins with its first images."""
        return await self._predict(call, stream_name(call.part("stream")))

    async def predict_source(self, call: Call) -> Reply:
        """POST /v1/predict: the source model predicts, and nothing learns."""
        return await self._predict(call, None)

    async def _predict(self, call: Call, stream: str | None) -> Reply:
        body = await call.body.read(self.limits.body, self.limits.body_seconds)
        kind, given, query = call.header(b"content-type") or "", call.header(b"x-request-id"), call.query()

        def parse() -> Request:
            return plain.parse_predict(
                body, kind, query, self.model, stream=stream, id=given, most_pixels=self.limits.pixels
            )

        answer = await self._answer(await asyncio.to_thread(parse), call)
        if plain.NPY in (call.header(b"accept") or ""):
            return Reply(plain.encode_npy(answer.logits), plain.NPY.encode())
        return Reply(await asyncio.to_thread(plain.encode_predict, answer, self.model))

    async def streams(self, call: Call) -> Reply:
        """GET /v1/streams: those of the token. ``?stored=true``: also the names of all that are in the store."""
        found: dict[str, Any] = {"model": self.model.name, "method": self.model.method}
        found["streams"] = [self._shown(each) for each in self.worker.streams() if call.holder.sees(each["name"])]
        if switch(call.query(), "stored"):
            found["stored"] = sorted(await translated(self.worker.stored(call.holder.token.streams)))
        return as_json(found)

    async def stream(self, call: Call) -> Reply:
        """GET /v1/streams/{stream}."""
        name = stream_name(call.part("stream"))
        call.holder.check("see", name)
        return as_json(self._shown(await translated(_ready(self.worker.stream, name))))

    def _shown(self, known: dict[str, Any]) -> dict[str, Any]:
        """What is known of a stream, with the number of its thumbnail, if there is one."""
        number = self.service.thumbnails.number(known["name"])
        return known if number is None else known | {"thumbnail": number}

    async def thumbnail(self, call: Call) -> Reply:
        """GET /v1/streams/{stream}/thumbnail: its last frame, small, as a PNG."""
        name, kept = stream_name(call.part("stream")), self.service.thumbnails
        call.holder.check("see", name)
        if not kept.limit:
            raise NotFound("this server keeps no thumbnails; tribe serve --thumbnails keeps them")
        await translated(_ready(self.worker.stream, name))
        if (found := kept.get(name)) is None:
            raise NotFound(f"there is no thumbnail of stream {name!r}: it has had no request, or its frame was dropped")
        return Reply(await asyncio.to_thread(encode, found), b"image/png", ((b"cache-control", b"no-store"),))

    async def create(self, call: Call) -> Reply:
        """PUT /v1/streams/{stream}: create it, unless it exists."""
        return as_json(await self.service.create(stream_name(call.part("stream")), call.holder))

    async def drop(self, call: Call) -> Reply:
        """DELETE /v1/streams/{stream}: it and its stored state are gone."""
        name = stream_name(call.part("stream"))
        return as_json(await self.service.control("drop", name, call.holder))

    async def control(self, call: Call) -> Reply:
        """POST /v1/streams/{stream}/end, reset, freeze, unfreeze or snapshot."""
        action: Action = call.scope["path"].rpartition("/")[2]  # the router knows no other
        await self._arguments(call, {})
        return as_json(await self.service.control(action, stream_name(call.part("stream")), call.holder))

    async def rollback(self, call: Call) -> Reply:
        """POST /v1/streams/{stream}/rollback with nothing, or {"to": 120}: the clock of a snapshot."""
        name = stream_name(call.part("stream"))
        call.holder.check("rollback", name)
        arguments = {key: value for key, value in (await self._arguments(call, ROLLBACK)).items() if value is not None}
        return as_json(await self.service.control("rollback", name, call.holder, **arguments))

    async def get_state(self, call: Call) -> Reply:
        """GET /v1/streams/{stream}/state: a file for `tribe.load`."""
        name = stream_name(call.part("stream"))
        call.holder.check("get_state", name)
        content = await translated(self.worker.get_state(name))
        shown = f'attachment; filename="{name}.safetensors"'.encode()
        return Reply(content, STATE, ((b"content-disposition", shown),))

    async def put_state(self, call: Call) -> Reply:
        """PUT /v1/streams/{stream}/state: replace the state by that of a file."""
        name = stream_name(call.part("stream"))
        call.holder.check("put_state", name)
        body: Bytes = await call.body.read(self.limits.state, self.limits.state_seconds)
        await self.service.admit_stream(name, call.holder)
        return as_json(await self.service.put_state(name, await asyncio.to_thread(body.tobytes)))

    async def _arguments(self, call: Call, schema: dict[str, Any]) -> dict[str, Any]:
        """The JSON object in the body of a control request; an empty body is an empty one."""
        body = bytes(await call.body.read(MOST_ARGUMENTS, self.limits.body_seconds))
        if not body.strip():
            return {}
        try:
            found: dict[str, Any] = json_files.parse(body, schema or dict, "the JSON of the request")
        except ValueError as error:
            raise BadRequest(str(error)) from None
        known = {name.removesuffix("?") for name in schema}
        if unknown := sorted(found.keys() - known):
            raise BadRequest(f"there is no argument {unknown[0][:40]!r}; expected {', '.join(sorted(known)) or 'none'}")
        return found

    # -- watching -----------------------------------------------------------------------------------------------------

    async def events(self, call: Call) -> Reply:
        """GET /v1/events: server-sent events of the token's streams, until the client or the server goes."""
        return Reply(self._events(call), EVENTS, ((b"cache-control", b"no-store"),))

    async def _events(self, call: Call) -> AsyncIterator[bytes]:
        yield b": events\n\n"
        source = self.worker.events()
        over: list[asyncio.Future[Any]] = [asyncio.ensure_future(self.closing.wait())]
        over.append(asyncio.ensure_future(call.body.client_gone()))
        following: asyncio.Future[dict[str, Any]] = asyncio.ensure_future(anext(source))
        try:
            while True:
                await asyncio.wait((*over, following), timeout=HEARTBEAT, return_when=asyncio.FIRST_COMPLETED)
                if any(each.done() for each in over):
                    return
                if not following.done():
                    yield b": still here\n\n"
                    continue
                event = following.result()
                named = event.get("stream")
                if call.holder.sees("" if named is None else named):
                    yield b"data: " + json.dumps(finite(event), allow_nan=False).encode() + b"\n\n"
                following = asyncio.ensure_future(anext(source))
        except StopAsyncIteration:
            return
        finally:
            for each in (*over, following):
                each.cancel()

    async def metrics(self, call: Call) -> Reply:
        """GET /metrics, for Prometheus; ``?streams=true``: with gauges of single streams, up to a limit."""
        call.holder.check_all("GET /metrics")
        name = "tribe_http_responses_total"
        lines = [f"# HELP {name} Answers over HTTP by their status.", f"# TYPE {name} counter"]
        lines += [f'{name}{{status="{status}"}} {count}' for status, count in sorted(self.front.statuses.items())]
        of_worker = self.worker.metrics_text(switch(call.query(), "streams"))
        return Reply((of_worker + "\n".join(lines) + "\n").encode(), METRICS)

    async def page(self, call: Call) -> Reply:
        """GET /, /page.css and /page.js: the page for people."""
        name, kind = PAGE[call.scope["path"].rpartition("/")[2]]
        return Reply(files("tribe.serve").joinpath(name).read_bytes(), kind, SAFE)


def switch(query: dict[str, str], name: str) -> bool:
    """The value of the only query parameter that a path has: true or false."""
    if unknown := sorted(query.keys() - {name}):
        raise BadRequest(f"there is no query parameter {unknown[0][:40]!r}; expected {name}")
    if (value := query.get(name, "false").lower()) not in plain.SWITCHES:
        raise BadRequest(f"{name} is {value[:40]!r}; expected true or false")
    return plain.SWITCHES[value]


async def _ready(function: Any, *arguments: Any) -> Any:
    """The result of an ordinary function, to await."""
    return function(*arguments)
