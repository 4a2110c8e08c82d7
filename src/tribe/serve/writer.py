"""Write-behind of states: those that changed are stored in rounds, the oldest change first.

A stream is held while its state is turned into bytes, so that the bytes, the clock and the request ids belong together;
predictions go on. The writing itself holds nothing. Streams are held together, because each has to wait for the step
that runs, and small states are stored together, because each transaction waits for the disk.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

from tribe.serve.errors import NotOwner, NotStored, as_serve_error
from tribe.serve.runtime import Runtime, StreamSession
from tribe.serve.store import Fenced, StoreDown, StreamStore, Write

TOGETHER = 64  # most streams that are held at the same time

OnFenced = Callable[[StreamSession, str], Awaitable[None]]
Captured = tuple[StreamSession, Write]  # a stream, and its state as bytes with what belongs to it


class Writer:
    """Stores the states of owned streams; ``on_fenced`` is called with one that another worker owns now, and why."""

    def __init__(self, runtime: Runtime, store: StreamStore, on_fenced: OnFenced) -> None:
        self.runtime, self.policy, self.store, self._on_fenced = runtime, runtime.policy, store, on_fenced
        self._lock = asyncio.Lock()  # one write at a time: an older state must not overtake a newer one
        self._size = 0  # bytes of the last state
        self._failures = 0
        self._paused_until = 0.0

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
        """Store one stream if it has changed; after `StoreDown` or `NotStored` it counts as changed still."""
        await self._write([session])
        if session.unstorable is not None:
            raise NotStored(f"stream {session.name!r} cannot be stored: {session.unstorable}")

    def exclusive(self) -> asyncio.Lock:
        """Return a context in which nothing else is written. Enter it before a stream is held, not while it is."""
        return self._lock

    async def write_held(self, session: StreamSession) -> None:
        """Store a stream that is held, in the context `exclusive`, as it is; the errors are those of `write`.

        `NotOwner` is raised where another worker owns it.
        """
        session.dirty_since = session.dirty_since or self.runtime.clock()
        try:
            try:
                captured = await self._capture_held(session)
            except Exception as error:
                self._report_failure(session, error)
                raise NotStored(f"stream {session.name!r} cannot be stored: {session.unstorable}") from error
            if captured is not None:
                await self._store([captured], _raise_fenced)
        finally:
            self._unwritten(session)
        if session.unstorable is not None:
            raise NotStored(f"stream {session.name!r} cannot be stored: {session.unstorable}")

    def _unwritten(self, session: StreamSession) -> None:
        """Count a stream that was captured and not stored as changed."""
        if session.writing_since is not None:
            session.dirty_since, session.writing_since = session.writing_since, None

    async def _write(self, group: Sequence[StreamSession]) -> int:
        """Store streams, and return how many bytes. All are held at the same time: else each would wait for a step."""
        async with self._lock:
            try:
                captured = await asyncio.gather(*map(self._capture, group), return_exceptions=True)
                good = list[Captured]()
                for session, one in zip(group, captured, strict=True):
                    if isinstance(one, BaseException):
                        self._report_failure(session, one)
                    elif one is not None:
                        good.append(one)
                return await self._store(good) if good else 0
            finally:  # what was captured and not stored counts as changed: `stop` cancels a round anywhere
                for session in group:
                    self._unwritten(session)

    async def _capture(self, session: StreamSession) -> Captured | None:
        """Return the state of a stream as bytes, with what belongs to it; None: there is nothing to store."""
        if session.claim is None:
            return None
        async with self.runtime.hold(session.name):
            return await self._capture_held(session)

    async def _capture_held(self, session: StreamSession) -> Captured | None:
        """Capture a stream that is held."""
        if session.dirty_since is None or session.claim is None:
            return None
        blob = await self.runtime.run("writer", lambda: self.runtime.fleet.to_bytes(session.name))
        if session.claim is None:  # lost meanwhile
            return None
        session.writing_since, session.dirty_since = session.dirty_since, None
        return session, Write(session.claim, blob, session.clock, tuple(session.recent), session.keep)

    async def _store(self, captured: Sequence[Captured], on_fenced: OnFenced | None = None) -> int:
        """Store captured states in one transaction, and return how many bytes."""
        try:
            refused = await self.runtime.run("writer", partial(self.store.write, [write for _, write in captured]))
        except StoreDown as error:
            self.note_failure(error)
            raise
        if self._failures:
            self.runtime.events.add("store-up", "the store works again")
        self._failures, self._paused_until, written = 0, 0.0, 0
        for session, write in captured:
            reason = refused.get(session.name)
            if reason is None:
                session.writing_since = session.unstorable = session.keep = None
                self._size = len(write.blob)
                self.runtime.metrics.writes.inc()
                self.runtime.metrics.write_bytes.inc(len(write.blob))
                written += len(write.blob)
            elif isinstance(reason, Fenced):
                session.writing_since = None
                if session.claim is None or session.claim.generation == write.claim.generation:
                    self.runtime.metrics.fenced.inc()
                    await (on_fenced or self._on_fenced)(
                        session, str(reason)
                    )  # else it was claimed anew, and this state was replaced
            else:
                self._report_failure(session, reason)  # and it counts as changed again
        return written

    def _report_failure(self, session: StreamSession, error: BaseException) -> None:
        """Note that a state cannot be stored for a reason of its own, such as a number that is not finite."""
        self.runtime.metrics.store_errors.inc()
        why = str(as_serve_error(error)) if isinstance(error, Exception) else type(error).__name__
        reported, session.unstorable = session.unstorable is not None, why
        if not reported:
            self.runtime.events.add("not-stored", f"it cannot be stored: {why}", session.name, logging.ERROR, error)

    def note_failure(self, error: Exception) -> None:
        """Pause because the store failed, longer each time; the first time, add an event."""
        self.runtime.metrics.store_errors.inc()
        pause = min(self.policy.retry_most, self.policy.retry * 2**self._failures)
        self._failures = min(self._failures + 1, 30)
        self._paused_until = self.runtime.clock() + pause
        if self._failures == 1:
            words = "the store fails. Streams go on; their learning is not stored until it works again"
            self.runtime.events.add("store-down", words, level=logging.ERROR, error=error)


async def _raise_fenced(session: StreamSession, why: str) -> None:
    raise NotOwner(f"another worker has claimed stream {session.name!r} at this moment; nothing was changed")
