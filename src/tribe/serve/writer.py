"""Write-behind: states that changed are stored in rounds, the oldest change first.

A stream is held while its state is turned into bytes, so that the bytes, the clock and the request ids belong together.
Predictions go on meanwhile. The writing itself holds nothing. Streams are held together, because each has to wait for
the step that runs, and small states are stored together, because each transaction waits for the disk.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence

from tribe.serve.errors import NotStored
from tribe.serve.runtime import Runtime
from tribe.serve.session import StreamSession
from tribe.serve.store import Fenced, StoreDown, StreamStore, Write

TOGETHER = 64  # most streams that are held at the same time
TRANSACTION = 2**24  # bytes of states that are stored at once; a larger state is stored alone

Captured = tuple[StreamSession, Write]  # a stream, and its state as bytes with what belongs to it


class Writer:
    """Stores the states of owned streams.

    Args:
        runtime: of the worker.
        store: where to.
        on_fenced: called with a stream that another worker owns now, and why.
    """

    def __init__(
        self, runtime: Runtime, store: StreamStore, on_fenced: Callable[[StreamSession, str], Awaitable[None]]
    ) -> None:
        self.runtime, self.policy, self.store, self._on_fenced = runtime, runtime.policy, store, on_fenced
        self._lock = asyncio.Lock()  # one write at a time: an older state must not overtake a newer one
        self._size = 0  # bytes of the last state
        self._failures = 0
        self._paused_until = 0.0

    @property
    def down(self) -> bool:
        """Return whether the last call of the store failed."""
        return self._failures > 0

    async def round(self, sessions: Iterable[StreamSession]) -> None:
        """Store the streams that changed, the oldest change first, up to the bytes of a round."""
        if self.runtime.clock() < self._paused_until:
            return
        changed = [session for session in sessions if session.dirty_since is not None and session.claim is not None]
        changed.sort(key=lambda session: session.dirty_since or 0.0)
        written = 0
        while changed and written < self.policy.write_bytes:
            # States of one fleet have one size, so that the last one says how many fit.
            count = min(TOGETHER, max(1, (self.policy.write_bytes - written) // self._size)) if self._size else 1
            group, changed = changed[:count], changed[count:]
            try:
                written += await self._write(group)
            except StoreDown:
                return

    async def write(self, session: StreamSession) -> None:
        """Store one stream if it has changed.

        Raises:
            StoreDown: nothing was stored.
            NotStored: its state cannot be stored. It counts as changed, and is tried again.
        """
        await self._write([session])
        if session.unstorable is not None:
            raise NotStored(f"stream {session.name!r} cannot be stored: {session.unstorable}")

    async def _write(self, group: Sequence[StreamSession]) -> int:
        """Store streams, and return how many bytes. All are held at the same time: else each would wait for a step."""
        async with self._lock, self._restore_dirty(group):
            captured = await asyncio.gather(*(self._capture(session) for session in group), return_exceptions=True)
            for session, one in zip(group, captured, strict=True):
                if isinstance(one, BaseException):
                    self._report_failure(session, one)
            good = [one for one in captured if one is not None and not isinstance(one, BaseException)]
            return sum([await self._store(part) for part in in_parts(good)])

    async def _capture(self, session: StreamSession) -> Captured | None:
        """Return the state of a stream as bytes, with what belongs to it; None: there is nothing to store."""
        if session.claim is None:
            return None
        async with self.runtime.hold(session.name):
            if session.dirty_since is None or session.claim is None:
                return None
            blob = await self.runtime.run("writer", lambda: self.runtime.fleet.to_bytes(session.name))
            if session.claim is None:  # lost meanwhile
                return None
            session.writing_since, session.dirty_since = session.dirty_since, None
            return session, Write(session.claim, blob, session.clock, tuple(session.recent))

    async def _store(self, captured: Sequence[Captured]) -> int:
        """Store captured states in one transaction, and return how many bytes."""
        writes = [write for _, write in captured]
        try:
            refused = await self.runtime.run("writer", lambda: self.store.write(writes))
        except StoreDown as error:
            self.note_failure(error)
            raise
        self.note_success()
        written = 0
        for session, write in captured:
            reason = refused.get(session.name)
            if reason is None:
                session.writing_since = session.unstorable = None
                self._size = len(write.blob)
                self.runtime.metrics.writes.inc()
                self.runtime.metrics.write_bytes.inc(len(write.blob))
                written += len(write.blob)
            elif isinstance(reason, Fenced):
                session.writing_since = None
                if session.claim is None or session.claim.generation == write.claim.generation:
                    self.runtime.metrics.fenced.inc()
                    await self._on_fenced(session, str(reason))  # else it was claimed anew, and this state was replaced
            else:
                self._report_failure(session, reason)  # and it counts as changed again
        return written

    @contextlib.asynccontextmanager
    async def _restore_dirty(self, group: Sequence[StreamSession]) -> AsyncIterator[None]:
        """At the end, count streams as changed that were captured and not stored: `stop` cancels a round anywhere."""
        try:
            yield
        finally:
            for session in group:
                if session.writing_since is not None:
                    session.dirty_since, session.writing_since = session.writing_since, None

    def _report_failure(self, session: StreamSession, error: BaseException) -> None:
        """Note that a state cannot be stored for a reason of its own, such as a number that is not finite."""
        self.runtime.metrics.store_errors.inc()
        reported, session.unstorable = session.unstorable is not None, str(error)
        if not reported:
            self.runtime.events.add("not-stored", f"it cannot be stored: {error}", session.name, logging.ERROR)

    def note_failure(self, error: Exception) -> None:
        """Pause because the store failed, longer each time; the first time, add an event."""
        self.runtime.metrics.store_errors.inc()
        pause = min(self.policy.retry_most, self.policy.retry * 2**self._failures)
        self._failures = min(self._failures + 1, 30)
        self._paused_until = self.runtime.clock() + pause
        if self._failures == 1:
            words = f"the store fails: {error}. Streams go on; their learning is not stored until it works again"
            self.runtime.events.add("store-down", words, level=logging.ERROR)

    def note_success(self) -> None:
        """End the pause because the store works; if it had failed, add an event."""
        if self._failures:
            self.runtime.events.add("store-up", "the store works again")
        self._failures, self._paused_until = 0, 0.0


def in_parts(captured: Iterable[Captured]) -> Iterator[list[Captured]]:
    """Yield the states in their order, as many at a time as one transaction takes."""
    part: list[Captured] = []
    for one in captured:
        if part and sum(len(write.blob) for _, write in part) + len(one[1].blob) > TRANSACTION:
            yield part
            part = []
        part.append(one)
    if part:
        yield part
