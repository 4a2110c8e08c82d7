"""A server for tests of what surrounds a worker. Its worker has one adapter a stream and one thread, and no store."""

import asyncio
import importlib.util
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tribe
from tribe.serve.errors import Overloaded, UnknownStream
from tribe.serve.listener import Listener
from tribe.serve.protocol.messages import ModelInfo
from tribe.testing import CLASSES, small_network

MODEL = ModelInfo("small", (3, 8, 8), CLASSES, labels=tuple("abcdefgh"[:CLASSES]), method="tribe")


def listening(**options):
    """A server of the small network on a free port."""
    return Listener(SmallWorker(small_network(), h0=2.0), MODEL, port=options.pop("port", 0), **options)


def has_grpc():
    """Whether the extra `grpc` is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("grpc", "google.protobuf"))


class Inferred(NamedTuple):
    logits: Any
    adapted: bool
    clock: int | None
    generation: int | None
    health: dict | None


class SmallWorker:
    """What the HTTP side needs of a worker."""

    def __init__(self, net, **fields):
        self.net = tribe.Backbone(net)
        self.fields = fields
        self.adapters, self.seen, self.snapshots = {}, {}, {}
        self.thread = ThreadPoolExecutor(1)
        self.queue = []
        self.busy = False  # refuse everything, as under overload
        self.calls = []

    async def start(self):
        self.listeners = []

    async def stop(self):
        self.thread.shutdown()

    def _run(self, function, *arguments):
        return asyncio.get_running_loop().run_in_executor(self.thread, function, *arguments)

    def _adapter(self, stream):
        if stream not in self.adapters:
            self.adapters[stream] = tribe.adapt(self.net, "tribe", **self.fields)
            self.seen[stream] = set()
            self._tell(stream, "opened")
        return self.adapters[stream]

    def _known(self, stream):
        if stream not in self.adapters:
            raise UnknownStream(f"there is no stream {stream!r}")
        return self.adapters[stream]

    def _tell(self, stream, kind):
        for queue in self.listeners:
            queue.put_nowait({"stream": stream, "kind": kind})

    async def infer(self, stream, images, *, request_id=None, deadline=None, learn=True):
        self.calls.append((stream, request_id, deadline, learn))
        if self.busy:
            raise Overloaded("the answer would be late", 1.5)
        if stream is None:
            source = tribe.adapt(self.net, "source")
            return Inferred(await self._run(source.predict, images), False, None, None, None)
        adapter = self._adapter(stream)
        learn = learn and request_id not in self.seen[stream]
        logits = await self._run(adapter if learn else adapter.predict, images)
        if learn and request_id is not None:
            self.seen[stream].add(request_id)
        info = adapter.info[0]
        return Inferred(logits, learn, info.steps, 1, {"images": info.images, "entropy": float(torch.nan)})

    async def control(self, action, stream, **arguments):
        if action == "create":
            self._adapter(stream)
            return self.stream(stream)
        if action == "end":
            return {"name": stream, "state": "released"}
        adapter = self._known(stream)
        if action == "drop":
            del self.adapters[stream]
            return {"name": stream, "state": "deleted"}
        if action == "snapshot":
            self.snapshots[stream] = adapter.snapshot()
        elif action == "rollback":
            adapter.restore(self.snapshots[stream])
        else:
            getattr(adapter, action)()
        self._tell(stream, action)
        return self.stream(stream)

    async def get_state(self, stream):
        with tempfile.TemporaryDirectory() as folder:
            self._known(stream).save(path := Path(folder) / "state")
            return path.read_bytes()

    async def put_state(self, stream, data):
        with tempfile.TemporaryDirectory() as folder:
            (path := Path(folder) / "state").write_bytes(data)
            self.adapters[stream] = tribe.load(path, self.net)
            self.seen[stream] = set()
        return self.stream(stream)

    def streams(self):
        return [self.stream(name) for name in self.adapters]

    def stream(self, name):
        adapter = self._known(name)
        return {"name": name, "images": adapter.info[0].images, "clock": adapter.info[0].steps, "lag": float("inf")}

    async def stored(self, prefix=""):
        return set()

    async def events(self):
        self.listeners.append(queue := asyncio.Queue())
        while True:
            yield await queue.get()

    def metrics_text(self, streams=False):
        return "# TYPE tribe_streams gauge\ntribe_streams 1\n" + "tribe_stream_images 0\n" * streams
