"""A worker and its users, shared by HTTP and gRPC: check the rights, call the worker, keep the last frames."""

import dataclasses
import io
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from torch import Tensor

from tribe.data.images import require_pillow
from tribe.fields import require
from tribe.serve.config import Limits
from tribe.serve.errors import Unavailable
from tribe.serve.fairness import Tally
from tribe.serve.protocol import InferRequest, InferResult, ModelInfo
from tribe.serve.security import USED, Access, Principal
from tribe.serve.store import StreamStore
from tribe.serve.worker import Worker

USING = {  # what a token uses now -> the help text of tribe_token_NAME
    "open": "Streams that a token has opened and that are open.",
    "waiting": "Requests of a token that wait for an answer.",
    "bytes": "Bytes that requests of a token hold.",
}
SIDE = 96  # most pixels of a thumbnail's side
log = logging.getLogger("tribe.serve")


class Thumbnail(NamedTuple):
    """The last frame of a stream, small, for people."""

    pixels: NDArray[np.uint8]  # (H, W) or (H, W, 3)
    number: int  # of the frame: another number, another frame

    def encode(self) -> bytes:
        """Return the frame as a PNG."""
        file = io.BytesIO()
        require_pillow("thumbnails").fromarray(self.pixels).save(file, "PNG")
        return file.getvalue()


class Thumbnails(dict[str, Thumbnail]):
    """The last frames of streams, at most ``limit`` bytes: the oldest are dropped first. Used on the event loop."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes, self._frames = limit, 0, 0

    def update_from(self, stream: str, images: Tensor) -> None:
        """Keep the last of some images (B, C, H, W) in [0, 1], if it can be shown: one channel or three."""
        if not self.limit or images.dim() != 4 or images.shape[1] not in (1, 3):
            return
        self.drop(stream)
        self._frames += 1
        self[stream] = frame = Thumbnail(shrink(images[-1]), self._frames)
        self.bytes += frame.pixels.nbytes
        while self.bytes > self.limit:
            self.drop(next(iter(self)))

    def drop(self, stream: str) -> None:
        """Drop the frame of a stream."""
        if (old := self.pop(stream, None)) is not None:
            self.bytes -= old.pixels.nbytes


def shrink(image: Tensor) -> NDArray[np.uint8]:
    """Return every n-th pixel of an image (C, H, W) in [0, 1], at most 96 a side: (H, W), or (H, W, 3).

    >>> shrink(__import__("torch").ones(1, 200, 10)).shape
    (67, 4)
    """
    every = max(1, -(-max(image.shape[1:]) // SIDE))
    small = image[:, ::every, ::every].detach().cpu().nan_to_num(0.0).clamp(0, 1).mul(255).round().byte().numpy()
    return np.ascontiguousarray(small[0] if len(small) == 1 else small.transpose(1, 2, 0))


class Service:
    """A worker, and who may use it; ``store`` is closed after the worker has stopped."""

    def __init__(
        self,
        worker: Worker,
        model: ModelInfo,
        access: Access | None = None,
        limits: Limits | None = None,
        store: StreamStore | None = None,
    ) -> None:
        self.worker, self.access, self.limits = worker, access or Access(), limits or Limits()
        pixels, total = self.limits.pixels, self.limits.request_pixels
        self.model = dataclasses.replace(
            model, most_pixels=pixels, request_pixels=total, any_range=self.limits.any_range
        )
        least = math.prod(size or 1 for size in model.shape[1:])
        words = f"an image of the model has {least:,} pixels, and limits.pixels and limits.request_pixels allow as many"
        require(least <= min(pixels, total), words, (pixels, total))
        self.store = store
        self.thumbnails = Thumbnails(self.limits.thumbnails)
        self.ready = False  # between the start of the worker and its stop

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the worker, and stop it when the block ends."""
        try:
            await self.worker.start()
            self.ready = True
            try:
                yield
            finally:
                self.ready = False
                await self.worker.stop()
        finally:
            if self.store is not None:
                self.store.close()

    def check_ready(self) -> None:
        """Raise `Unavailable` before the worker has started and once it stops."""
        if not self.ready:
            raise Unavailable("the server starts or stops; try again")

    async def infer(self, request: InferRequest, user: Principal, arrived: float) -> InferResult:
        """Predict the images of a request, and let its stream, which it may make, learn from them.

        The deadline counts from ``arrived``, a time of the event loop.
        """
        self.check_ready()
        stream, images, learn = request.stream, request.images, request.learn
        deadline = None if request.timeout is None else arrived + request.timeout / 1e6
        if stream is not None:
            user.check("create" if request.start else "end" if request.end else "predict", stream)
        user.count_images(len(images))
        learn = learn and stream is not None and user.may_learn(len(images))
        infer = partial(self.worker.infer, request_id=request.id, deadline=deadline, learn=learn, user=user)
        infer = partial(infer, version=request.version)
        try:
            result = await infer(stream, images)
        except Unavailable:
            user.used["refused"] += 1
            raise
        if stream is not None and request.end:
            self.thumbnails.drop(stream)
            try:
                await self.worker.control("end", stream)
            except Exception as error:  # it is logged: an error would say that nothing was learned
                words = "stream %r was not released after its last request, and stays until it is idle: %s"
                log.warning(words, stream, error)
        elif stream is not None and self.thumbnails.limit:
            with self.worker.runtime.after_commit.isolated("its thumbnail", stream):
                self.thumbnails.update_from(stream, images)
        return result

    def tokens(self, users: Iterable[Principal], held: Tally) -> list[dict[str, Any]]:
        """Return what tokens may do and what they use; ``held`` is how many bytes their requests hold."""
        streams = Counter(session.opener for session in self.worker.sessions.by_name.values())
        waiting, facts = self.worker.scheduler.waiting_of, list[dict[str, Any]]()
        for each in users:
            now = {"open": streams[each], "waiting": waiting.get(each, 0), "bytes": held.get(each, 0)}
            facts.append(dataclasses.asdict(each.token) | each.used | now)
            del facts[-1]["digest"]
        return facts

    def token_metrics(self, held: Tally) -> list[Metric]:
        """Return metrics of tokens by name: of as many tokens as of streams."""
        facts, metrics = self.tokens(self.access.users, held), []
        for name, words in (USED | USING).items():
            numbers = Counter[str]()  # tokens with the same name count as one
            for each in facts:
                numbers[each["name"]] += each[name]
            some = dict(list(numbers.items())[: self.worker.policy.stream_metrics])
            suffix, kind = ("_total", CounterMetricFamily) if name in USED else ("", GaugeMetricFamily)
            metrics.append(self.worker.metrics.read(f"tribe_token_{name}{suffix}", words, some, "token", kind))
        return metrics if facts else []
