"""What happened to streams and to the store: a bounded list, live subscribers, and the log."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from tribe.fields import document, printable

log = logging.getLogger("tribe.serve")


class Event(NamedTuple):
    """Something an operator may want to know."""

    time: float
    stream: str | None
    kind: str
    words: str
    numbers: dict[str, float]


document(
    Event,
    time="Seconds since 1970.",
    stream="The stream it happened to; None: the worker.",
    kind="A name for programs, such as opened, fenced, store-down.",
    words="What happened and what it means, for people.",
    numbers="Numbers that belong to it.",
)


class Events:
    """The last events, and queues of those who listen. Used on the event loop only."""

    def __init__(self, keep: int) -> None:
        self.kept: deque[Event] = deque(maxlen=keep)
        self._listeners: dict[int, deque[Event]] = {}
        self._changed = asyncio.Event()
        self.closed = False

    def add(
        self, kind: str, words: str, stream: str | None = None, level: int = logging.INFO, **numbers: float
    ) -> None:
        """Keep an event, give it to every listener, and log it with its parts as attributes of the record."""
        event = Event(time.time(), stream, kind, words, numbers)
        self.kept.append(event)
        for queue in self._listeners.values():
            queue.append(event)  # a listener that is too slow loses its oldest
        self._wake()
        extra: dict[str, Any] = {"stream": stream, "kind": kind, "numbers": numbers}
        log.log(level, "%s%s", f"{printable(stream)}: " if stream is not None else "", words, extra=extra)

    def close(self) -> None:
        """End all listeners."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def listen(self, recent: bool = True) -> AsyncIterator[Event]:
        """The kept events, then every new one until the worker stops."""
        queue: deque[Event] = deque(self.kept if recent else (), maxlen=self.kept.maxlen)
        self._listeners[id(queue)] = queue
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
            del self._listeners[id(queue)]
