"""Work that runs to its end although its caller is cancelled: a client goes away, or the server stops.

A change of a stream is made in several places: in the store, in the fleet and in the worker's own notes. If it ended in
the middle, they would not agree.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger("tribe.serve")


class Tasks:
    """The tasks that run on the event loop and must not be cancelled."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, doing: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something; the event loop alone would not keep it alive."""
        task = asyncio.get_running_loop().create_task(doing)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def finish(self, doing: Coroutine[Any, Any, T]) -> T:
        """Run something and return its result. If the caller is cancelled, it goes on, and an error is only logged."""
        task = self.start(doing)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.add_done_callback(_log_error)
            raise
        return task.result()

    async def done(self) -> None:
        """Wait until nothing runs."""
        while self._running:
            await asyncio.wait(self._running)


def _log_error(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("its caller was cancelled, and it failed: %s: %s", type(error).__name__, error)
