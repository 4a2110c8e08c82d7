"""Serve many adapting streams of one network to clients on other machines.

    with tribe.serve.Server(net, data="streams") as server:             # in a thread; `tribe serve` from a shell
        client = tribe.serve.Client(server.url, "model")
        logits = client.predict("cam1", images)                         # (B, C, H, W) in [0, 1]; cam1 adapts

The extra `serve`: ``pip install 'tribe-tta[serve]'``. A client needs no extra. See docs/serving.md.
"""

from typing import TYPE_CHECKING, Any

from tribe.serve.client import Client, ClientError, Prediction

if TYPE_CHECKING:
    from tribe.serve.server import Server

EXTRA = ("h11", "msgspec", "prometheus_client", "starlette", "uvicorn")  # packages of the extra `serve`

__all__ = ["Client", "ClientError", "Prediction", "Server"]


def __getattr__(name: str) -> Any:
    """Import `Server`, which needs the extra, at its first use."""
    if name != "Server":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from tribe.serve.server import Server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        raise ImportError(f"a server needs {error.name}: pip install 'tribe-tta[serve]'") from error
    return Server
