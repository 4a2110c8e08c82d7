"""Several workers on Ray Serve: ``tribe serve --ray 4``.

Ray starts the workers, on one machine or on many, restarts those that die, and balances requests over them. Its router
sends the requests of a stream, by the header ``x-tribe-stream``, to one worker, by consistent hashing. All workers
share one store, which decides who may teach a stream: a request that reaches another worker is answered there, and not
learned.

Ray Serve is the extra `ray-serve`: ``pip install 'tribe-tta[ray-serve]'``.
"""

import contextlib
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import Any

from tribe.fields import is_whole, require
from tribe.health.prepared import Prepared
from tribe.methods import AnyMethod
from tribe.serve.app import App
from tribe.serve.config import Limits
from tribe.serve.security import read_tokens
from tribe.serve.server import HANG_UP, HOST, Server, Tokens, new_access, on_signals, refuse_open, shorten_collections
from tribe.serve.versions import Model, network_of

HEADER = "x-tribe-stream"
SESSION_KEY = "RAY_SERVE_SESSION_ID_HEADER_KEY"  # where Ray reads which header names a session, when it starts
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
ONGOING = 1000  # requests that one worker is given at the same time; it refuses by its own rules
GRACE = 60.0  # seconds that a worker gets to store its streams when it stops


def application(
    model: Model | Mapping[str, Model],
    method: str | AnyMethod | Prepared | PathLike[str] = "tribe",
    *,
    data: str | PathLike[str],
    workers: int = 2,
    device: str = "cpu",
    name: str = "model",
    resources: Mapping[str, Any] | None = None,
    tokens: Tokens = None,
    **options: Any,
) -> Any:
    """Return an application for ``ray.serve.run``: several workers with one store.

    The other arguments are those of `tribe.serve.Server`, without ports and TLS. Limits on connections are Ray's.

    Args:
        model: it is sent to every worker.
        data: the store that all workers share: a folder on one machine, a Redis server for several.
        workers: how many.
        device: where each of them has its network.
        resources: what Ray reserves for each worker; None: one core, and one GPU if ``device`` is one.
        tokens: a file is read here.
    """
    require(is_whole(workers, least=1), "workers is how many there are, at least 1", workers)
    if data is None:
        raise ValueError("several workers need one store: give data, a folder or the address of a Redis server")
    ray_serve = ray_serve_library()
    entries = read_tokens(tokens) if isinstance(tokens, str | PathLike) else tokens
    refuse_open(new_access(entries), options.get("host", HOST), options.get("limits") or Limits())

    def build() -> App:
        shorten_collections()
        for each in model.values() if isinstance(model, Mapping) else [model]:
            network_of(each).to(device)
        return Server(model, method, name=name, data=data, tokens=entries, **options).app

    deployment = ray_serve.deployment(
        ray_serve.ingress(build)(),
        name=name,
        num_replicas=workers,
        max_ongoing_requests=ONGOING,
        graceful_shutdown_timeout_s=GRACE,
        ray_actor_options=dict(resources or {"num_cpus": 1, "num_gpus": int(device.startswith("cuda"))}),
        request_router_config=ray_serve.config.RequestRouterConfig(request_router_class=ROUTER),
    )
    return deployment.bind()


@contextlib.contextmanager
def running(app: Any, host: str = HOST, port: int = 8000, address: str | None = None) -> Iterator[str]:
    """Run an `application` on Ray, and stop it at the end; gives its URL.

    ``address`` is that of a Ray cluster; None: that in RAY_ADDRESS, or one of this machine alone, which ends with it.
    A cluster that runs already must have been started with the environment variable
    RAY_SERVE_SESSION_ID_HEADER_KEY=x-tribe-stream, for streams to stay with their workers.
    """
    ray_serve, ray = ray_serve_library(), importlib.import_module("ray")
    own = not ray.is_initialized()
    if own:
        ray.init(address=address or os.environ.get("RAY_ADDRESS"), include_dashboard=False, log_to_driver=False)
    try:
        ray_serve.start(http_options={"host": host, "port": port})
        ray_serve.run(app, name="tribe", route_prefix="/")
        yield f"http://{host}:{port}"
    finally:
        ray_serve.shutdown()
        if own:
            ray.shutdown()


def run(app: Any, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Run an application on Ray until SIGINT or SIGTERM; then every worker stores its streams."""
    ended = threading.Event()
    ignored = on_signals(lambda *_: None, HANG_UP)  # workers have the tokens that the file had at the start
    with ignored, on_signals(lambda *_: ended.set()), running(app, host, port) as url:
        ready(url)
        ended.wait()


def ray_serve_library() -> Any:
    """Ray Serve, or an error that says how to install it."""
    os.environ.setdefault(SESSION_KEY, HEADER)  # read when Ray is imported, and by what it starts
    try:
        importlib.import_module(ROUTER.rpartition(".")[0])
        return importlib.import_module("ray.serve")
    except ImportError as error:
        raise ModuleNotFoundError(
            f"several workers on Ray need Ray Serve, 2.60 or later ({error}): pip install 'tribe-tta[ray-serve]'"
        ) from error
