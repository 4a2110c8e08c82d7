"""What the HTTP and gRPC sides ask of a worker."""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal, Protocol

from torch import Tensor

Action = Literal["create", "end", "reset", "freeze", "unfreeze", "snapshot", "rollback", "drop"]  # on a stream


class Result(Protocol):
    """What a worker answers for images."""

    @property
    def logits(self) -> Tensor:
        """Of each image, (B, K)."""

    @property
    def adapted(self) -> bool:
        """Whether the stream learns from the images."""

    @property
    def clock(self) -> int | None:
        """How many images the stream has learned from."""

    @property
    def generation(self) -> int | None:
        """The generation of the stream's owner."""

    @property
    def health(self) -> Mapping[str, Any] | None:
        """What is known of the stream's health."""


class Backend(Protocol):
    """A worker: it predicts, learns, and keeps streams."""

    async def start(self) -> None:
        """Begin to work, in the running event loop."""

    async def stop(self) -> None:
        """Finish what was begun, store every stream, and release them."""

    async def infer(
        self,
        stream: str | None,
        images: Tensor,
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        learn: bool = True,
    ) -> Result:
        """Predict images (B, ...) and learn from them; the deadline is a time of the event loop."""

    async def control(self, action: Action, stream: str, **arguments: Any) -> dict[str, Any]:
        """Create, end, reset, freeze, unfreeze, snapshot, roll back or drop a stream."""

    async def get_state(self, stream: str) -> bytes:
        """The state file of a stream."""

    async def put_state(self, stream: str, data: bytes) -> dict[str, Any]:
        """Replace the state of a stream by that of a file."""

    def streams(self) -> list[dict[str, Any]]:
        """What is known of all streams; each has a name."""

    def stream(self, name: str) -> dict[str, Any]:
        """What is known of one stream."""

    async def stored(self, prefix: str = "") -> set[str]:
        """The names of streams in the store that begin so; a worker without a store has none."""

    def events(self) -> AsyncIterator[dict[str, Any]]:
        """What happens, as it happens."""

    def metrics_text(self, streams: bool = False) -> str:
        """The metrics of the worker, as Prometheus reads them; ``streams``: also of single streams, up to a limit."""
