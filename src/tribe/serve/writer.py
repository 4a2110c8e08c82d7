"""Write-behind: states that changed are stored in rounds, the oldest change first.

A stream is held while its state is turned into bytes, so that the bytes, the clock and the request ids belong together.
Predictions go on meanwhile. The writing itself holds nothing. Streams are held together, because each has to wait for
the step that runs.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple

from tribe.serve.events import Events
from tribe.serve.exposition import Counter
from tribe.serve.ownership import Served
from tribe.serve.policy import Policy
from tribe.serve.store.protocol import Claim, Fenced, Store, StoreDown

TOGETHER = 64  # most streams that are held at the same time


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
        self._size = 0  # bytes of the last state
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
        changed.sort(key=lambda served: served.dirty_since or 0.0)
        written = 0
        while changed and written < self.policy.write_bytes:
            # States of one fleet have one size, so that the last one says how many fit.
            count = min(TOGETHER, max(1, (self.policy.write_bytes - written) // self._size)) if self._size else 1
            group, changed = changed[:count], changed[count:]
            try:
                written += await self._write_all(group)
            except StoreDown:
                return

    async def write(self, served: Served) -> int:
        """Store one stream if it has changed, and return how many bytes. `StoreDown`: nothing was stored."""
        async with self._lock, self._all_or_dirty([served]):
            captured = await self._capture(served)
            return 0 if captured is None else await self._store(served, captured)

    async def _write_all(self, group: list[Served]) -> int:
        """Store some streams. All are held at the same time: one after another, each would wait for a step."""
        async with self._lock, self._all_or_dirty(group):
            found = await asyncio.gather(*(self._capture(served) for served in group), return_exceptions=True)
            written, down = 0, None
            for served, captured in zip(group, found, strict=True):
                if isinstance(captured, BaseException):
                    self._complain(served, captured)
                elif captured is not None and down is not None:
                    self._put_back(served)
                elif captured is not None:
                    try:
                        written += await self._store(served, captured)
                    except StoreDown as error:
                        down = error
                    except Exception as error:  # the others are stored all the same
                        self._complain(served, error)
            if down is not None:
                raise down
            return written

    async def _store(self, served: Served, captured: Captured) -> int:
        claim, blob, clock, requests, meta = captured
        try:
            await self._in_thread(lambda: self.store.write(claim, blob, clock=clock, requests=requests, meta=meta))
        except Fenced as error:
            self.fenced.add()
            served.writing_since = None
            await self._lost(served, str(error))
            return 0
        except BaseException as error:
            self._put_back(served)
            if isinstance(error, StoreDown):
                self.note_failure(error)
            raise
        served.writing_since = None
        self._size = len(blob)
        self._complained.discard(served.name)
        self.note_success()
        self.writes.add()
        self.bytes.add(len(blob))
        return len(blob)

    @asynccontextmanager
    async def _all_or_dirty(self, group: Iterable[Served]) -> AsyncIterator[None]:
        """What was captured inside and is not stored at the end counts as changed: `stop` cancels a round anywhere."""
        try:
            yield
        finally:
            for served in group:
                if served.writing_since is not None:
                    self._put_back(served)

    @staticmethod
    def _put_back(served: Served) -> None:
        """What was captured is not stored: it counts as changed again."""
        served.dirty_since, served.writing_since = served.writing_since, None

    def _complain(self, served: Served, error: BaseException) -> None:
        """A stream cannot be stored for a reason of its own, such as a state that is not finite."""
        self.failed.add()
        if served.name not in self._complained:
            self._complained.add(served.name)
            self.events.add("not-stored", f"it cannot be stored: {error}", served.name, logging.ERROR)

    async def _capture(self, served: Served) -> Captured | None:
        """The state of a stream as bytes, with what belongs to it; None: there is nothing to store."""
        if served.claim is None:
            return None
        async with self._hold(served.name):
            if served.dirty_since is None or served.claim is None:
                return None
            blob: bytes = await self._in_thread(lambda: self._to_bytes(served.name))
            if served.claim is None:  # lost meanwhile
                return None
            meta = {"owner": served.claim.owner, "learned": served.learned_at, "captured": time.time()}
            served.writing_since, served.dirty_since = served.dirty_since, None
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
