"""Write-behind: states that changed are stored in rounds, the oldest change first.

A stream is held while its state is turned into bytes, so that the bytes, the clock and the request ids belong together.
Predictions go on meanwhile. The writing itself holds nothing.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, TypeVar

from tribe.serve.events import Events
from tribe.serve.exposition import Counter
from tribe.serve.ownership import Served
from tribe.serve.policy import Policy
from tribe.serve.store.protocol import Claim, Fenced, Store, StoreDown

T = TypeVar("T")
InThread = Callable[[Callable[[], T]], Awaitable[T]]


class Captured(NamedTuple):
    """A state as bytes, and what belongs to it."""

    claim: Claim
    blob: bytes
    clock: int
    requests: tuple[str, ...]
    meta: Mapping[str, Any]


class Writer:
    """Stores the states of owned streams.

    Args:
        store: where to.
        policy: how often and how much.
        clock: the worker's.
        in_thread: runs a function in the writer's thread.
        hold: keeps a stream from being stepped.
        to_bytes: the state of a stream.
        lost: what to do with a stream that another worker owns now.
    """

    def __init__(
        self,
        store: Store,
        policy: Policy,
        clock: Callable[[], float],
        events: Events,
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        hold: Callable[[str], AbstractAsyncContextManager[None]],
        to_bytes: Callable[[str], bytes],
        lost: Callable[[Served, str], Awaitable[None]],
    ) -> None:
        self.store, self.policy, self.clock, self.events = store, policy, clock, events
        self._in_thread, self._hold, self._to_bytes, self._lost = in_thread, hold, to_bytes, lost
        self._lock = asyncio.Lock()  # one write at a time: an older state must not overtake a newer one
        self._complained: set[str] = set()  # streams that could not be stored for a reason of their own
        self._failures = 0
        self._paused_until = 0.0
        self.writes = Counter("tribe_writes_total", "States that were stored.")
        self.bytes = Counter("tribe_write_bytes_total", "Bytes of states that were stored.")
        self.fenced = Counter("tribe_fenced_writes_total", "Writes that were refused: another worker owns the stream.")
        self.failed = Counter("tribe_store_errors_total", "Calls of the store that failed.")

    @property
    def down(self) -> bool:
        """Whether the last call of the store failed."""
        return self._failures > 0

    async def round(self, streams: Iterable[Served]) -> None:
        """Store the streams that changed, the oldest change first, up to the bytes of a round."""
        if self.clock() < self._paused_until:
            return
        changed = [served for served in streams if served.dirty_since is not None and served.claim is not None]
        written = 0
        for served in sorted(changed, key=lambda served: served.dirty_since or 0.0):
            try:
                written += await self.write(served)
            except StoreDown:
                return
            except Exception as error:  # such as a state that is not finite: the others are stored all the same
                self.failed.add()
                if served.name not in self._complained:
                    self._complained.add(served.name)
                    self.events.add("not-stored", f"it cannot be stored: {error}", served.name, logging.ERROR)
            if written >= self.policy.write_bytes:
                return

    async def write(self, served: Served) -> int:
        """Store one stream if it has changed, and return how many bytes. `StoreDown`: nothing was stored."""
        async with self._lock:
            if served.claim is None:
                return 0
            async with self._hold(served.name):
                if served.dirty_since is None or served.claim is None:
                    return 0
                captured = await self._capture(served)
                served.writing_since, served.dirty_since = served.dirty_since, None
            try:
                await self._in_thread(
                    lambda: self.store.write(
                        captured.claim,
                        captured.blob,
                        clock=captured.clock,
                        requests=captured.requests,
                        meta=captured.meta,
                    )
                )
            except Fenced as error:
                self.fenced.add()
                served.writing_since = None
                await self._lost(served, str(error))
                return 0
            except BaseException as error:
                served.dirty_since, served.writing_since = served.writing_since, None
                if isinstance(error, StoreDown):
                    self.note_failure(error)
                raise
            served.writing_since = None
            self._complained.discard(served.name)
            self.note_success()
            self.writes.add()
            self.bytes.add(len(captured.blob))
            return len(captured.blob)

    async def _capture(self, served: Served) -> Captured:
        assert served.claim is not None
        blob: bytes = await self._in_thread(lambda: self._to_bytes(served.name))
        meta = {"owner": served.claim.owner, "learned": served.learned_at, "captured": time.time()}
        return Captured(served.claim, blob, served.clock, tuple(served.recent), meta)

    def note_failure(self, error: Exception) -> None:
        """The store failed: pause, longer each time, and say so once."""
        self.failed.add()
        pause = min(self.policy.retry_most, self.policy.retry * 2**self._failures)
        self._failures = min(self._failures + 1, 30)
        self._paused_until = self.clock() + pause
        if self._failures == 1:
            self.events.add(
                "store-down",
                f"the store fails: {error}. Streams go on; what they learn is not stored until it works again",
                level=logging.ERROR,
            )

    def note_success(self) -> None:
        """The store works: no pause, and say so if it did not."""
        if self._failures:
            self.events.add("store-up", "the store works again")
        self._failures, self._paused_until = 0, 0.0
