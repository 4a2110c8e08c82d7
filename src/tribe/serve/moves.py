"""Moves of streams between versions of the network, and back.

A move is one change: the stream is held, its state is stored, its claim is raised, and the state in the new version is
stored with the state before it beside it. So a worker that is killed at any moment leaves the stream in one of the two
versions, with a whole state. The state before stays for `Policy.keep_moved` seconds, or until the next move, and `back`
returns to it bit for bit.

Until then the stream is on trial: it goes back by itself if an alarm says that adapting goes wrong, or if its estimated
accuracy falls below what was estimated before the move, by more than the interval of the estimate.
"""

import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from tribe.serve.errors import Conflict, NotOwner, NotStored, ServeError, as_serve_error
from tribe.serve.runtime import StreamSession
from tribe.serve.sessions import Sessions
from tribe.serve.store import BEFORE, UNDONE, KeptState, Stored, StoreDown
from tribe.serve.versions import STARTS, Start, check_share, is_in_share

WRONG = ("drift", "collapse", "scatter")  # alarms of adapting that goes wrong
HOW = {
    "carry": "it goes on with its state",
    "relative": "it goes on with what changed in its state since the source",
    "source": "it starts from the source model",
    "kept": "it goes on with the state that it had there before",
}
Description = dict[str, Any]


class Moves:
    """Moves streams between versions; ``owned`` returns a stream that this worker may change."""

    def __init__(
        self,
        sessions: Sessions,
        owned: Callable[[str], Awaitable[StreamSession]],
        describe: Callable[[str], Description],
    ) -> None:
        self.sessions, self.runtime, self.versions = sessions, sessions.runtime, sessions.fleet
        self.policy, self._owned, self._describe = sessions.policy, owned, describe
        self._starts: dict[str, Start] = {}  # of the shares
        self._going_back: set[str] = set()
        sessions.on_claimed = self._follow_share

    # -- one stream ---------------------------------------------------------------------------------------------------

    async def move(self, stream: str, version: str, start: Start = "auto", by: str = "move") -> Description:
        """Move a stream to another version; one that is there already stays as it is."""
        self.versions.check(version)
        session = await self._owned(stream)
        before = self.versions.version_of(stream)
        if before == version:
            return self._describe(stream)
        kept = await self._read_kept(session, UNDONE) if start == "kept" else None
        if start == "kept" and (kept is None or self.versions.version_for(stream, kept.blob) != version):
            raise Conflict(
                f"stream {stream!r} has no state in version {version!r} that it has left; {STARTS['source']}"
            )
        accuracy = session.report.get("accuracy")
        async with self._changing(session):
            if kept is None:
                change: Callable[[], Start] = partial(self.versions.move, stream, version, start)
            else:
                change = partial(self._restore, stream, kept)
            how = await self._change(session, change, BEFORE)
            session.accuracy_before = accuracy
        words = f"it moved from version {before} to version {version}; {HOW[how]}"
        self.runtime.metrics.moved(version, by)
        self.runtime.events.add("moved", words, stream)
        return self._describe(stream)

    async def back(self, stream: str, why: str | None = None) -> Description:
        """Return a stream to its state before the last move, bit for bit, and so to the version of that state."""
        session = await self._owned(stream)
        left = self.versions.version_of(stream)
        kept = await self._read_kept(session, BEFORE)
        if kept is None:
            words = "has no state from before a move: it has not moved, has gone back, or the state was collected"
            raise Conflict(f"stream {stream!r} {words} (policy.keep_moved)")
        await self.runtime.run("states", lambda: self.versions.check_bytes(stream, kept.blob))
        async with self._changing(session, lenient=True):
            await self._change(session, partial(self._restore, stream, kept), UNDONE)
            session.recent = deque(kept.requests, self.policy.requests)
        version = self.versions.version_of(stream)
        words = f"it went back from version {left} to version {version}, to its state before the move"
        self.runtime.metrics.moved(version, "back" if why is None else "auto")
        level = logging.INFO if why is None else logging.WARNING
        self.runtime.events.add("moved-back", words if why is None else f"{words}: {why}", stream, level)
        return self._describe(stream)

    def _restore(self, stream: str, kept: Stored) -> Start:
        self.versions.from_bytes(stream, kept.blob, self.versions.in_shadow(stream))
        return "kept"

    async def _read_kept(self, session: StreamSession, place: str) -> Stored | None:
        """Return the state that is kept at a place."""
        if session.kept is None or session.kept.place != place:
            return None
        if (store := self.runtime.store) is None:
            return session.kept_state
        return await self.runtime.run("lookups", partial(store.read, session.name, place=place))

    @contextlib.asynccontextmanager
    async def _changing(self, session: StreamSession, lenient: bool = False) -> AsyncIterator[None]:
        """Hold a stream whose state is stored as it is, with a new claim; nothing else is written meanwhile.

        ``lenient``: also one whose state cannot be stored, such as one that is not finite.
        """
        name, writer = session.name, self.sessions.writer
        try:
            async with contextlib.AsyncExitStack() as stack:
                if writer is not None:
                    await stack.enter_async_context(writer.exclusive())
                await stack.enter_async_context(self.runtime.hold(name))
                self.sessions.check_still_here(session)
                if writer is None:
                    blob = await self.runtime.run("states", lambda: self.versions.to_bytes(name))
                    session.kept_state = Stored(0, session.clock, tuple(session.recent), blob)
                else:
                    with contextlib.suppress(*[NotStored] if lenient else []):
                        await writer.write_held(session)
                    await self.sessions.claim_anew(session)
                yield
                if writer is not None:
                    await writer.write_held(session)
        except NotOwner as error:
            if session.claim is not None:
                await self.sessions.lose(session, str(error))
            raise

    async def _change(self, session: StreamSession, change: Callable[[], Start], keep: str) -> Start:
        """Change the state of a stream, and note where the one before it stays; return how it goes on."""

        def change_and_report() -> tuple[Start, dict[str, Any]]:
            how = change()
            return how, self.runtime.after_commit.reports(self.versions, [session.name])[session.name]

        how, report = await self.runtime.run("states", change_and_report)
        now = self.runtime.clock()
        session.note_report(report, changed=now)
        session.keep = keep if self.sessions.writer is not None else None
        session.note_kept(KeptState(keep, 0.0), now + self.policy.keep_moved)
        session.accuracy_before = None
        return how

    # -- many streams -------------------------------------------------------------------------------------------------

    async def move_share(self, version: str, share: float, start: Start = "auto") -> Description:
        """Move a share of all streams to a version: those that are open here now, and others when they are opened.

        A hash of the name decides which streams these are, so a larger share moves only more of them. One that has gone
        back stays where it is.
        """
        self.versions.check(version)
        self.versions.shares.pop(version, None)
        if check_share(share) > 0:
            self.versions.shares[version], self._starts[version] = share, start
        wanted = [s for s in self._owned_here() if is_in_share(s.name, share) and self._may_follow(s)]
        return await self._each(version, wanted, lambda name: self.move(name, version, start))

    async def back_all(self, version: str) -> Description:
        """Return all streams that are open here and have moved to a version; its share ends."""
        self.versions.check(version)
        self.versions.shares.pop(version, None)
        here = [s for s in self._owned_here() if self.versions.version_of(s.name) == version]
        moved = [session for session in here if session.kept is not None and session.kept.place == BEFORE]
        return await self._each(version, moved, self.back)

    def _owned_here(self) -> list[StreamSession]:
        return [each for each in self.sessions.by_name.values() if each.role == "owned" and each.loaded]

    async def _each(
        self, version: str, some: list[StreamSession], act: Callable[[str], Awaitable[Description]]
    ) -> Description:
        """Move streams one after another; one that cannot be moved stays, and the answer says why."""
        moved, failed = list[str](), dict[str, str]()
        for name in [session.name for session in some]:
            before = self.versions.version_of(name)
            try:
                await act(name)
            except (ServeError, StoreDown) as error:
                failed[name] = str(as_serve_error(error))
            if self.versions.version_of(name) != before:
                moved.append(name)
        return {"version": version, "share": self.versions.shares.get(version, 0.0), "moved": moved, "failed": failed}

    def _may_follow(self, session: StreamSession) -> bool:
        """Return whether a stream may be moved with a share: not one that has gone back."""
        return session.kept is None or session.kept.place != UNDONE

    def _follow_share(self, session: StreamSession) -> None:
        """Move a stream that was opened, if a share says so."""
        name, target = session.name, self.versions.start_of(session.name)
        elsewhere = target in self.versions.shares and self.versions.version_of(name) != target
        if elsewhere and self._may_follow(session):
            self.runtime.start(self._quietly(self.move(name, target, self._starts[target]), name))

    async def _quietly(self, change: Awaitable[Description], stream: str) -> None:
        """Await a change in the background; an event says if it fails."""
        try:
            await change
        except (ServeError, StoreDown) as error:
            words = f"it was not moved: {as_serve_error(error)}"
            self.runtime.events.add("not-moved", words, stream, logging.WARNING, error)
        finally:
            self._going_back.discard(stream)

    # -- on trial -----------------------------------------------------------------------------------------------------

    def note_alarm(self, stream: str, kind: str) -> None:
        """Return a stream on trial if an alarm that began says that adapting goes wrong."""
        session = self.sessions.by_name.get(stream)
        if session is not None and kind in WRONG:
            self._go_back(session, f"the alarm {kind} began after the move")

    def note_estimate(self, session: StreamSession) -> None:
        """Return a stream on trial if its estimated accuracy fell below that before the move."""
        before, high = session.accuracy_before, session.report.get("accuracy_high")
        if before is not None and high is not None and high < before:
            words = f"its estimated accuracy is at most {high:.2f}, and was {before:.2f} before the move"
            self._go_back(session, words)

    def _go_back(self, session: StreamSession, why: str) -> None:
        on_trial = session.kept is not None and session.kept.place == BEFORE
        if self.policy.auto_back and on_trial and session.name not in self._going_back:
            self._going_back.add(session.name)
            self.runtime.start(self._quietly(self.back(session.name, why), session.name))

    async def collect(self) -> None:
        """Remove the states that were kept long enough."""
        now, store = self.runtime.clock(), self.runtime.store
        for session in [each for each in self._owned_here() if each.kept is not None and each.kept_until <= now]:
            claim = session.claim
            async with self.runtime.hold(session.name):
                if store is not None and claim is not None:
                    await self.runtime.run("claims", partial(store.forget, claim))
                session.kept_state = None
                session.note_kept(None)
            self.runtime.events.add("collected", "the state from before its move was removed", session.name)
