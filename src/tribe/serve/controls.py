"""Actions on one stream besides predicting: create, end, reset, freeze, roll back, drop, read and replace its state."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, NamedTuple

from tribe.health.history import Snapshot
from tribe.serve.errors import EXPECTED, NotOwner, NotStored, Unavailable, UnknownStream, as_serve_error
from tribe.serve.moves import Moves
from tribe.serve.runtime import StreamSession
from tribe.serve.security import Principal
from tribe.serve.sessions import Sessions, read_intact
from tribe.serve.store import StoreDown
from tribe.streams.names import check_stream_name

Description = dict[str, Any]
TOGETHER = 100  # streams that a request for all of them changes: each is stored, which takes some time
SHADOW = "the source answers from now on, and adapting goes on in shadow"


class SessionSnapshot(NamedTuple):
    """A copy of a stream's state for rollback, with what belongs to it."""

    clock: int
    state: Snapshot
    version: str  # of the network
    requests: tuple[str, ...]  # ids of the last requests that it has learned


class Controls:
    """Actions on streams, one at a time for each stream, and never during a step of it.

    All but ``create``, ``end`` and reading a state need a stream that exists and that this worker owns. An action that
    has begun runs to its end, also if its caller is cancelled.

    ============  ===================================================================================================
    create        open the stream: claim it, resume its stored state or make a new one. It never resets.
    end           learn what waits, store the stream, release it. Its next request opens it again.
    reset         return it to the source model
    freeze        only predict from now on; `unfreeze`: learn again
    promote       let what adapts answer from now on; `demote`: let the source answer, while it goes on learning
    snapshot      copy the state in memory; the last few copies stay
    rollback      return to the last snapshot, or to the one of the given clock: ``to=120``
    move          go on in another version of the network; the state before it is kept: see `moves.Moves`
    back          return to the state before the last move
    put_state     replace its state by that of a file, or make a stream of it; a wrong file changes nothing
    drop          delete the stream and its stored states
    ============  ===================================================================================================
    """

    def __init__(
        self, sessions: Sessions, drained: Callable[[str], Awaitable[None]], describe: Callable[[str], Description]
    ) -> None:
        self.sessions, self.runtime, self.fleet = sessions, sessions.runtime, sessions.fleet
        self.policy = sessions.policy
        self._drained, self._describe = drained, describe
        self.moves = Moves(sessions, self._owned, describe)

    async def __call__(self, action: str, stream: str, **arguments: Any) -> Description:
        """Do it, and return the description of the stream afterwards. If the store fails: `Unavailable`."""
        actions: dict[str, Callable[..., Coroutine[Any, Any, Description]]] = {
            **{"create": self._create, "end": self._end, "reset": self._reset, "drop": self._drop},
            **{"snapshot": self._snapshot, "rollback": self._rollback, "put_state": self._put_state},
            **{"move": self.moves.move, "back": self.moves.back},
            **{"freeze": partial(self._set_frozen, frozen=True), "unfreeze": partial(self._set_frozen, frozen=False)},
            **{"promote": partial(self._set_shadow, shadow=False), "demote": partial(self._set_shadow, shadow=True)},
        }
        if action not in actions:
            raise ValueError(f"no action {action!r}; expected one of {', '.join(actions)}")
        change = actions[action](check_stream_name(stream), **arguments)
        try:
            return await asyncio.shield(self.runtime.start(change))
        except StoreDown as error:
            raise Unavailable(str(as_serve_error(error)), self.policy.retry_most) from error

    async def _owned(self, stream: str) -> StreamSession:
        """Return a stream that is here or in the store, and that this worker owns; none is made."""
        session = self.sessions.ready(stream)
        if session is None:
            if not await self.sessions.exists(stream):
                raise UnknownStream(f"no stream {stream!r}: its first request makes it")
            session = await self.sessions.open(stream)
        if (reason := self.sessions.blocked(stream)) in ("owner", "lease"):
            why = "its lease was not renewed in time" if reason == "lease" else "another worker owns it"
            if session.role == "unreachable":
                why = "the store cannot be asked who owns it"
            elif session.role == "unfit":
                words = "its stored state does not fit this model and method. Serve it as it was stored, or delete it"
                raise NotOwner(f"stream {stream!r} cannot be changed here: {words}")
            raise NotOwner(f"stream {stream!r} cannot be changed here: {why}. Try again, or ask its owner")
        return session

    async def _create(self, stream: str, user: Principal | None = None) -> Description:
        await self.sessions.open(stream, user)
        return self._describe(stream)

    async def _end(self, stream: str) -> Description:
        session = self.sessions.by_name.get(stream)
        if session is None:
            return {"name": stream, "state": "released"}
        try:
            async with asyncio.timeout(self.policy.drain):
                await self._drained(stream)
        except TimeoutError:
            raise Unavailable(f"stream {stream!r} still learns what waits", self.policy.drain) from None
        await self.sessions.release(session)
        if stream in self.sessions.by_name:  # without a store it stays; or a request has come meanwhile
            return self._describe(stream)
        return {"name": stream, "state": "released", "clock": session.clock}

    async def _reset(self, stream: str) -> Description:
        session = await self._owned(stream)
        words = "returned to the source model"
        return await self._replace(session, lambda: self.fleet.reset(stream), (), "reset", words)

    async def _set_frozen(self, stream: str, frozen: bool) -> Description:
        session = await self._owned(stream)
        async with self.runtime.hold(stream):
            self.sessions.check_still_here(session)
            await self._change(session, lambda: (self.fleet.freeze if frozen else self.fleet.unfreeze)(stream))
        kind, words = ("frozen", "it only predicts") if frozen else ("unfrozen", "it learns again")
        self.runtime.events.add(kind, words, stream)
        return self._describe(stream)

    async def _set_shadow(self, stream: str, shadow: bool) -> Description:
        """Change who answers, and store that at once: after a crash a demoted stream must not answer."""
        session = await self._owned(stream)
        async with self.runtime.hold(stream):
            self.sessions.check_still_here(session)
            await self._change(session, lambda: self.fleet.set_shadow(stream, shadow))
        if shadow:
            self.runtime.metrics.demotions["person"].inc()
        kind, words = ("demoted", SHADOW) if shadow else ("promoted", "what adapts answers from now on")
        self.runtime.events.add(kind, words, stream)
        if self.sessions.writer is not None:
            await self.sessions.writer.write(session)
        return self._describe(stream)

    async def set_all(self, action: str, user: Principal, after: str = "") -> dict[str, Any]:
        """Promote or demote the streams of a user, those that are stored, too, in the order of their names.

        At most `TOGETHER` of them after a name; the answer says after which one to go on, and why others, such as
        those of another worker, stay as they are.
        """
        here, owned = set(self.sessions.by_name), dict[str, bool]()
        if (store := self.runtime.store) is not None:
            try:
                prefix = user.token.streams
                entries = await self.runtime.run("lookups", lambda: store.list(prefix, TOGETHER, after))
            except StoreDown as error:
                raise Unavailable(str(as_serve_error(error)), self.policy.retry_most) from error
            owned = {entry.stream: not entry.held or entry.owner == self.runtime.owner for entry in entries}
        names = sorted(name for name in here | owned.keys() if name > after and user.can_access(name))[:TOGETHER]
        changed, failed = list[str](), dict[str, str]()
        for name in names:
            try:
                if not owned.get(name, True):
                    raise NotOwner("another worker owns it")
                await self(action, name)
                changed.append(name)
                if name not in here:
                    await self("end", name)
            except EXPECTED as error:
                failed[name] = str(as_serve_error(error))
        more = names[-1] if len(names) == TOGETHER else None
        return {"action": action, "changed": changed, "failed": failed, "after": more}

    async def _snapshot(self, stream: str) -> Description:
        session = await self._owned(stream)
        async with self.runtime.hold(stream):
            self.sessions.check_still_here(session)
            state = await self.runtime.run("states", lambda: self.fleet.snapshot(stream))
            version = self.fleet.version_of(stream)
            session.snapshots.append(SessionSnapshot(session.clock, state, version, tuple(session.recent)))
            del session.snapshots[: -self.policy.snapshots]
        return self._describe(stream) | {"snapshot": session.snapshots[-1].clock}

    async def _rollback(self, stream: str, to: int | None = None) -> Description:
        session = await self._owned(stream)
        own = [each for each in session.snapshots if each.version == self.fleet.version_of(stream)]
        matching = [snapshot for snapshot in own if to is None or snapshot.clock == to]
        if not matching:
            clocks = ", ".join(str(snapshot.clock) for snapshot in own) or "none: take one first"
            which = "" if to is None else f" of clock {to}"
            raise UnknownStream(f"stream {stream!r} has no snapshot{which}; it has {clocks}")
        clock, state, _, requests = matching[-1]
        words = f"returned to the snapshot of clock {clock}"
        return await self._replace(session, lambda: self.fleet.restore(stream, state), requests, "rollback", words)

    async def _drop(self, stream: str) -> Description:
        session = self.sessions.by_name.get(stream)
        if session is not None and session.role != "unfit":
            await self.sessions.delete(await self._owned(stream))
        else:  # also a state that does not fit this model can be deleted
            await self.sessions.delete_stored(stream)
        return {"name": stream, "state": "deleted"}

    async def _replace(
        self, session: StreamSession, change: Callable[[], Any], requests: Iterable[str], kind: str, words: str
    ) -> Description:
        """Change the state of a stream to one whose clock may be earlier, and store it at once.

        A stored clock never falls within a generation, so the stream is stored as it is and claimed anew first.
        ``requests`` are the ids of the last requests that the new state has learned, if there is a record of them.
        """
        writer, name = self.sessions.writer, session.name
        if writer is not None:
            with contextlib.suppress(NotStored):  # it is replaced: a state that is not finite can be reset
                await writer.write(session)
        try:
            async with self.runtime.hold(name):
                await self.sessions.claim_anew(session)
                await self._change(session, change)
                session.recent = deque(requests, self.policy.requests)
        except NotOwner as error:
            if session.claim is not None:
                await self.sessions.lose(session, str(error))
            raise
        self.runtime.events.add(kind, words, name)
        if writer is not None:
            await writer.write(session)
        return self._describe(name)

    async def _change(self, session: StreamSession, change: Callable[[], Any]) -> None:
        """Change a stream that is held."""

        def change_and_report() -> dict[str, Any]:
            change()
            return self.runtime.after_commit.reports(self.fleet, [session.name])[session.name]

        report = await self.runtime.run("states", change_and_report)
        session.note_report(report, changed=self.runtime.clock())

    async def get_state(self, stream: str) -> bytes:
        """Return the state file of a stream: of this moment if it is here, else as stored."""
        session, store = self.sessions.by_name.get(check_stream_name(stream)), self.runtime.store
        if session is not None and session.loaded:
            async with self.runtime.hold(stream):
                return await self.runtime.run("states", lambda: self.fleet.to_bytes(stream))
        stored = None
        if store is not None:
            stored, _ = await self.runtime.run("lookups", lambda: read_intact(store, stream))
        if stored is None:
            raise UnknownStream(f"no stream {stream!r}, or it has learned nothing yet")
        return stored.blob

    async def _put_state(self, stream: str, data: bytes, user: Principal | None = None) -> Description:
        await self.runtime.run("states", lambda: self.fleet.check_bytes(stream, data))  # before a stream is made for it
        await self._create(stream, user)
        session = await self._owned(stream)
        words = "its state was replaced"  # a file does not hold the ids of requests that it has learned
        shadow = self.fleet.in_shadow(stream)  # whoever puts a state does not promote the stream by that
        return await self._replace(session, lambda: self.fleet.from_bytes(stream, data, shadow), (), "replaced", words)
