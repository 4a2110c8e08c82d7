"""The web application: which handler answers which path.

Starlette routes and starts and stops the worker. The path that almost all requests take, ``/v2/models/{model}/infer``,
does not pass through Starlette.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as StarletteRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from tribe.serve.bodies import Receive
from tribe.serve.http import Front, Handler, Scope, Send
from tribe.serve.protocol.messages import VERSION
from tribe.serve.routes import Routes
from tribe.serve.service import Service

PLAIN_CONTROLS = ("end", "reset", "freeze", "unfreeze", "snapshot")


class Endpoint:
    """A handler as an ASGI application."""

    def __init__(self, front: Front, handler: Handler, public: bool) -> None:
        self.front, self.handler, self.public = front, handler, public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self.front.run(self.handler, scope, receive, send, self.public)


class App:
    """The ASGI application of one server."""

    def __init__(self, service: Service) -> None:
        self.front = Front(service)
        self.routes = Routes(self.front)
        name = service.model.name
        self._hot = {f"/v2/models/{name}/infer", f"/v2/models/{name}/versions/{VERSION}/infer"}
        self._starlette = Starlette(
            routes=[self._route(*each) for each in table(self.routes)],
            lifespan=lambda _: self.running(),
            exception_handlers={HTTPException: self._not_routed},
        )
        self._starlette.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["path"] in self._hot and scope["method"] == "POST":
            await self.front.run(self.routes.infer, scope, receive, send)
        else:
            await self._starlette(scope, receive, send)

    def _route(self, method: str, path: str, handler: Handler, public: bool) -> Route:
        return Route(path, Endpoint(self.front, handler, public), methods=[method])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the worker, and stop it when the block ends."""
        await self.front.service.worker.start()
        self.routes.ready = True
        try:
            yield
        finally:
            self.routes.ready = False
            await self.front.service.worker.stop()

    async def _not_routed(self, request: StarletteRequest, error: Exception) -> JSONResponse:
        """The answer to a path that no handler has."""
        assert isinstance(error, HTTPException)
        self.front.statuses[error.status_code] += 1
        path = request.url.path[:80]
        if error.status_code == 405:
            allowed = ", ".join(sorted(_methods(self._starlette, path)))
            words = f"{path!r} has no {request.method}; expected {allowed}"
            return JSONResponse({"error": words}, 405, {"allow": allowed})
        words = f"there is no path {path!r}; docs/serving.md lists them, and GET /v2 says that the server is there"
        return JSONResponse({"error": words}, error.status_code)


def table(routes: Routes) -> list[tuple[str, str, Handler, bool]]:
    """Method, path and handler, and whether it needs no token."""
    found: list[tuple[str, str, Handler, bool]] = [
        ("GET", "/", routes.page, True),
        ("GET", "/page.css", routes.page, True),
        ("GET", "/page.js", routes.page, True),
        ("GET", "/metrics", routes.metrics, False),
        ("GET", "/v2", routes.server, True),
        ("GET", "/v2/health/live", routes.live, True),
        ("GET", "/v2/health/ready", routes.is_ready, True),
        ("POST", "/v1/predict", routes.predict_source, False),
        ("GET", "/v1/events", routes.events, False),
        ("GET", "/v1/streams", routes.streams, False),
        ("GET", "/v1/streams/{stream}", routes.stream, False),
        ("PUT", "/v1/streams/{stream}", routes.create, False),
        ("DELETE", "/v1/streams/{stream}", routes.drop, False),
        ("POST", "/v1/streams/{stream}/predict", routes.predict, False),
        ("POST", "/v1/streams/{stream}/rollback", routes.rollback, False),
        ("GET", "/v1/streams/{stream}/thumbnail", routes.thumbnail, False),
        ("GET", "/v1/streams/{stream}/state", routes.get_state, False),
        ("PUT", "/v1/streams/{stream}/state", routes.put_state, False),
    ]
    found += [("POST", f"/v1/streams/{{stream}}/{action}", routes.control, False) for action in PLAIN_CONTROLS]
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        found += [
            ("GET", model, routes.model_metadata, True),
            ("GET", f"{model}/ready", routes.model_ready, True),
            ("GET", f"{model}/config", routes.model_config, True),
            ("POST", f"{model}/infer", routes.infer_named, False),
        ]
    return found


def _methods(app: Any, path: str) -> set[str]:
    """The methods that a path has."""
    return {method for route in app.routes if route.path_regex.match(path) for method in route.methods or ()}
