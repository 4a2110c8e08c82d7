"""Write-behind: states that changed are stored in rounds, the oldest change first.

A stream is held while its state is turned into bytes, so that the bytes, the clock and the request ids belong together.
Predictions go on meanwhile. The writing itself holds nothing. Streams are held together, because each has to wait for
the step that runs, and small states are stored together, because each transaction waits for the disk.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from tribe.serve.config import Policy
from tribe.serve.errors import NotStored
from tribe.serve.events import Events
from tribe.serve.metrics import Metrics
from tribe.serve.ownership import Served
from tribe.serve.store.protocol import Fenced, Store, StoreDown, Write

TOGETHER = 64  # most streams that are held at the same time
TRANSACTION = 2**24  # bytes of states that are stored at once; a larger state is stored alone


Captured = tuple[Served, Write]  # a stream, and its state as bytes with what belongs to it


class Writer:
    """Stores the states of owned streams.

    Args:
        store: where to.
        policy: how often and how much.
        clock: the worker's.
        events: where failures are reported.
        metrics: where writes are counted.
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
        metrics: Metrics,
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        hold: Callable[[str], AbstractAsyncContextManager[None]],
        to_bytes: Callable[[str], bytes],
        lost: Callable[[Served, str], Awaitable[None]],
    ) -> None:
        self.store, self.policy, self.clock, self.events, self.metrics = store, policy, clock, events, metrics
        self._in_thread, self._hold, self._to_bytes, self._lost = in_thread, hold, to_bytes, lost
        self._lock = asyncio.Lock()  # one write at a time: an older state must not overtake a newer one
        self._size = 0  # bytes of the last state
        self._failures = 0
        self._paused_until = 0.0

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
        """Store one stream if it has changed, and return how many bytes.

        Raises:
            StoreDown: nothing was stored.
            NotStored: its state cannot be stored. It counts as changed, and is tried again.
        """
        written = await self._write_all([served])
        if served.unstorable is not None:
            raise NotStored(f"stream {served.name!r} cannot be stored: {served.unstorable}")
        return written

    async def _write_all(self, group: list[Served]) -> int:
        """Store some streams. All are held at the same time: one after another, each would wait for a step."""
        async with self._lock, self._all_or_dirty(group):
            found = await asyncio.gather(*(self._capture(served) for served in group), return_exceptions=True)
            captured: list[Captured] = []
            for served, one in zip(group, found, strict=True):
                if isinstance(one, BaseException):
                    self._complain(served, one)
                elif one is not None:
                    captured.append(one)
            return sum([await self._store(part) for part in in_parts(captured)])

    async def _store(self, captured: Sequence[Captured]) -> int:
        """Store captured states in one transaction, and return how many bytes."""
        writes = [write for _, write in captured]
        try:
            refused = await self._in_thread(lambda: self.store.write_many(writes))
        except BaseException as error:
            for served, _ in captured:
                self._put_back(served)
            if isinstance(error, StoreDown):
                self.note_failure(error)
            raise
        self.note_success()
        written = 0
        for served, write in captured:
            reason = refused.get(served.name)
            if reason is None:
                served.writing_since = None
                self._size = len(write.blob)
                served.unstorable = None
                self.metrics.writes.inc()
                self.metrics.write_bytes.inc(len(write.blob))
                written += len(write.blob)
            elif isinstance(reason, Fenced):
                served.writing_since = None
                if served.claim is None or served.claim.generation == write.claim.generation:
                    self.metrics.fenced.inc()
                    await self._lost(served, str(reason))  # else it was claimed anew, and this state was replaced
            else:
                self._put_back(served)
                self._complain(served, reason)
        return written

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
        self.metrics.store_errors.inc()
        said, served.unstorable = served.unstorable is not None, str(error)
        if not said:
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
            return served, Write(served.claim, blob, served.clock, tuple(served.recent), meta)

    def note_failure(self, error: Exception) -> None:
        """The store failed: pause, longer each time, and say so once."""
        self.metrics.store_errors.inc()
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


def in_parts(captured: Iterable[Captured]) -> Iterator[list[Captured]]:
    """The states in their order, as many at a time as one transaction takes."""
    part: list[Captured] = []
    for one in captured:
        if part and sum(len(write.blob) for _, write in part) + len(one[1].blob) > TRANSACTION:
            yield part
            part = []
        part.append(one)
    if part:
        yield part
