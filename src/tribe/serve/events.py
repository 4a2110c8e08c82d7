"""Events of streams and of the store: a bounded log, live subscribers, and Python's log."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from tribe.fields import printable

log = logging.getLogger("tribe.serve")


class ServeEvent(NamedTuple):
    """An event for operators."""

    time: float  # seconds since 1970
    stream: str | None  # the stream it happened to; None: the worker
    kind: str  # a name for programs, such as opened, fenced, store-down
    words: str  # what happened and what it means, for people
    numbers: dict[str, float]  # numbers that belong to it


class Events:
    """The last events, and queues of subscribers. Used on the event loop only.

    Args:
        keep: the most events in the log, and the most that a subscriber may be behind.
    """

    def __init__(self, keep: int) -> None:
        self.kept: deque[ServeEvent] = deque(maxlen=keep)
        self._subscribers: dict[int, deque[ServeEvent]] = {}
        self._changed = asyncio.Event()
        self.closed = False

    def add(
        self, kind: str, words: str, stream: str | None = None, level: int = logging.INFO, **numbers: float
    ) -> None:
        """Add an event to the log, send it to every subscriber, and log it with its parts as attributes."""
        event = ServeEvent(time.time(), stream, kind, words, numbers)
        self.kept.append(event)
        for queue in self._subscribers.values():
            queue.append(event)  # a subscriber that is too slow loses its oldest
        self._wake()
        extra: dict[str, Any] = {"stream": stream, "kind": kind, "numbers": numbers}
        log.log(level, "%s%s", f"{printable(stream)}: " if stream is not None else "", words, extra=extra)

    def close(self) -> None:
        """End all subscriptions."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def listen(self) -> AsyncIterator[ServeEvent]:
        """Yield the events of the log, then every new one until `close`."""
        queue: deque[ServeEvent] = deque(self.kept, maxlen=self.kept.maxlen)
        self._subscribers[id(queue)] = queue
        try:
            while True:
                changed = self._changed
                while queue:
                    yield queue.popleft()
                if self.closed:
                    return
                if changed is self._changed:
                    await changed.wait()
        finally:
            del self._subscribers[id(queue)]
