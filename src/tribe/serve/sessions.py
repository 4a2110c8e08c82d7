"""The streams of a worker: opened at the first request, renewed, followed where others own them, released.

Functions that call the store or change the fleet run in threads. All bookkeeping is on the event loop.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from tribe.io import states
from tribe.io.states import StateFileError
from tribe.serve.errors import FULL_AGAIN, NotOwner, NotStored, Unavailable, UnknownStream
from tribe.serve.fairness import fits_share
from tribe.serve.runtime import Mark, Runtime, StreamSession
from tribe.serve.security import Principal
from tribe.serve.store import Claim, KeptState, Stored, StoreDamaged, StoreDown, StreamStore
from tribe.serve.writer import Writer

CHECKED = 8  # stored states that are looked at when a server starts
Opening = asyncio.Task[StreamSession]


def new_owner() -> str:
    """Return a name for one start of one process: a restarted worker must not be taken for its predecessor."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


class LookupResult(NamedTuple):
    """The store's answer for a stream."""

    claim: Claim | None  # this worker's; None: another worker owns the stream
    stored: Stored | None  # its state; None: there is none, or the follower has it already
    damage: str | None  # why the last state could not be used, and the one before it was
    mark: Mark | None = None  # of the owner's state
    kept: KeptState | None = None  # the state that stays after a move, of a stream that is claimed


def look_up(
    store: StreamStore,
    stream: str,
    owner: str,
    lease: float,
    mark: Mark | None = None,
    user: Principal | None = None,
    most: int | None = None,
) -> LookupResult:
    """Claim a stream and read its state; if another worker owns it, read its last state unless ``mark`` is of that.

    A stream that is not in the store is created if the user may, and fewer than ``most`` are. A worker calls this in
    one thread, so it counts and claims at once. Several workers may at the same time create one too many each.
    """
    entry = store.entry(stream)  # first: reading waits for no other worker
    if entry is None:
        if user is not None:
            user.check_new(stream, store.count)
        if most is not None and (number := store.count("")) >= most:
            words = f"the store has {number} streams, as many as policy.stored_streams allows"
            raise Unavailable(f"{words}; delete some with DELETE /v1/streams/NAME", FULL_AGAIN)
    if (user is None or user.may_claim) and (entry is None or not entry.held or entry.owner == owner):
        if (claim := store.claim(stream, owner, lease)) is not None:
            try:
                return LookupResult(claim, *read_intact(store, stream), kept=store.kept(stream))
            except StoreDamaged:
                store.release(claim)
                raise
        entry = store.entry(stream)
    new = None if entry is None else (entry.generation, entry.clock, entry.written)
    if entry is None or entry.written is None or new == mark:
        return LookupResult(None, None, None, new)
    return LookupResult(None, *read_intact(store, stream), new)


def read_intact(store: StreamStore, stream: str) -> tuple[Stored | None, str | None]:
    """Return the last state, or the one before it if the last one is damaged; and the damage in words.

    A state file holds a digest of its content, which is checked here.
    """
    damage: Exception | None = None
    for previous in (False, True):
        try:
            stored = store.read(stream, previous=previous)
            if stored is not None:
                states.decode(stored.blob, f"the stored state of stream {stream!r}")
            elif damage is not None:
                break
            return stored, None if damage is None else str(damage)
        except (StoreDamaged, StateFileError) as error:
            damage = error
    raise StoreDamaged(str(damage)) from damage


def _install(
    runtime: Runtime, name: str, blob: bytes | None = None, keep: bool = False, version: str | None = None
) -> dict[str, Any]:
    """Put a stored state into the fleet, or a new one of a version, and return its report.

    ``keep``: unless there is one.
    """
    fleet = runtime.fleet
    if blob is not None:
        fleet.from_bytes(name, blob)
    else:
        if name in fleet and not keep:
            fleet.drop(name)
        if name not in fleet:
            fleet.add(name, version)
    return runtime.after_commit.reports(fleet, [name])[name]


def _give_back(store: StreamStore, claim: Claim) -> Mark | None:
    """Release a claim, and return the mark of the state that was stored under it."""
    entry = store.entry(claim.stream)  # before the release: until then no other worker writes
    store.release(claim)
    return None if entry is None else (entry.generation, entry.clock, entry.written)


class Sessions:
    """Opens and closes the streams of a worker; ``on_closed`` is called with one that is gone, while it is held."""

    def __init__(self, runtime: Runtime, on_closed: Callable[[str], None]) -> None:
        self.runtime, self.fleet, self.store, self.policy = runtime, runtime.fleet, runtime.store, runtime.policy
        self._on_closed = on_closed
        self.on_claimed: Callable[[StreamSession], None] = lambda session: None  # called with one that is open now
        self.by_name: dict[str, StreamSession] = {}
        self.writer = None if self.store is None else Writer(runtime, self.store, self.lose)
        self._opening: dict[str, dict[Principal | None, Opening]] = {}  # by name and user
        self.refused_streams = 0

    def ready(self, name: str, user: Principal | None = None) -> StreamSession | None:
        """Return a stream that can be answered for at once; None: it must be opened, or looked up again."""
        session = self.by_name.get(name)
        if session is None:
            return None
        session.used = now = self.runtime.clock()
        if session.role == "owned":
            return None if session.resting else session
        if session.unclaimed and (user is None or user.may_claim):
            return None
        patience = self.policy.retry if session.role == "unreachable" else self.policy.staleness
        return session if session.looked_up is not None and now - session.looked_up <= patience else None

    async def open(self, name: str, user: Principal | None = None, version: str | None = None) -> StreamSession:
        """Claim a stream, or read what its owner stored last, as far as a user may; a new one starts in a version.

        Requests of one user at the same time share one look-up. Those of others, with other rights, come after it.
        """
        tasks = self._opening.get(name, {})
        if user not in tasks:
            if name not in self.by_name:
                self._check_room(name, user)
            self._opening[name] = tasks
            tasks[user] = self.runtime.start(self._open_after(list(tasks.values()), name, user, version))
            tasks[user].add_done_callback(lambda _: self._opened(name, user))
        return await asyncio.shield(tasks[user])

    def _opened(self, name: str, user: Principal | None) -> None:
        del self._opening[name][user]
        if not self._opening[name]:
            del self._opening[name]

    async def _open_after(
        self, before: Sequence[Opening], name: str, user: Principal | None, version: str | None
    ) -> StreamSession:
        if before:
            await asyncio.wait(before)
        return (before and self.ready(name, user)) or await self._open(name, user, version)

    def _check_room(self, name: str, user: Principal | None) -> None:
        """Raise if no more streams may be opened here by a user; those that are being opened count."""
        names = (self.by_name.keys() | self._opening.keys()) - {name}
        if self.store is None and user is not None:
            user.check_new(name, lambda prefix: sum(each.startswith(prefix) for each in names))
        used, most = len(names) + 1, self.policy.open_streams
        own = 0
        if 3 * used > 2 * most:  # below that every share fits
            own = 1 + sum(session.opener is user for session in self.by_name.values())
            own += sum(user in tasks for each, tasks in self._opening.items() if each not in self.by_name)
        if not fits_share(own, used, most, alone=user is None or user.alone):
            self.refused_streams += 1
            words = f"{used - 1} streams are open, and policy.open_streams is {most}, which all tokens share"
            raise Unavailable(f"{words}. End some, or wait until idle ones are released", FULL_AGAIN)

    async def _open(self, name: str, user: Principal | None, version: str | None) -> StreamSession:
        session, writer, asked = self.by_name.get(name), self.writer, self.runtime.clock()
        if session is not None and session.resting and not await self._wake(session):
            session = None
        if session is None:
            session = StreamSession(name, "followed", asked, loaded=False, recent=deque(maxlen=self.policy.requests))
            session.opener = user
        elif session.role == "owned":
            return session
        if writer is None:
            session.role, session.loaded = "owned", True
            install = partial(_install, self.runtime, name, keep=True, version=version)
            session.note_report(await self.runtime.run("states", install))
            self.runtime.events.add("opened", "a new stream", name)
            self.on_claimed(session)
        else:
            owner, lease = self.runtime.owner, self.policy.lease
            try:
                if session.unfit is not None and await self._is_unfit_still(session, writer.store):
                    session.looked_up = asked
                    return session
                look = partial(
                    look_up, writer.store, name, owner, lease, session.mark, user, self.policy.stored_streams
                )
                found = await self.runtime.run("lookups", look)
                session.unclaimed = user is not None and not user.may_claim
                await self._load(session, found, asked, version)
            except StoreDown as error:
                writer.note_failure(error)
                if user is not None and user.is_limited and name not in self.by_name:
                    raise  # whether it may create the stream is not known
                if session.looked_up is None:
                    session.role = "unreachable"
            except StoreDamaged as error:
                await self._note_unfit(session, "its stored states are damaged", None, error)
            session.looked_up = asked
        self.by_name[name] = session
        return session

    async def _load(
        self, session: StreamSession, found: LookupResult, asked: float, version: str | None = None
    ) -> None:
        """Bring the fleet and the session to the store's answer."""
        name, claim, stored = session.name, found.claim, found.stored
        if found.damage is not None:
            words = "its last stored state is damaged. The state before it is used"
            self.runtime.events.add("damaged", words, name, logging.ERROR, found.damage)
        if stored is not None or claim is not None:
            blob = None if stored is None else stored.blob
            try:
                install = partial(_install, self.runtime, name, blob, version=version)
                session.note_report(await self.runtime.run("states", install))
            except StateFileError as error:
                mark = found.mark
                if claim is not None and self.store is not None:
                    mark = await self.runtime.run("claims", partial(_give_back, self.store, claim))
                await self._note_unfit(session, f"its stored state does not fit: {error}", mark)
                return
            session.loaded, session.unfit = True, None
            session.recent = deque(() if stored is None else stored.requests, self.policy.requests)
        session.mark = found.mark
        if claim is not None:
            session.renewed(claim, asked, self.policy.lease, self.policy.margin)
            session.note_kept(found.kept, asked + self.policy.keep_moved)
            words = "a new stream" if stored is None else f"resumed at clock {stored.clock}"
            self.runtime.events.add("opened", words, name, generation=claim.generation)
            self.on_claimed(session)
        elif session.looked_up is None or session.role != "followed":
            session.role = "followed"
            why = "a token that may not claim it asked" if session.unclaimed else "another worker owns it"
            words = f"{why}: predictions come from its last stored state"
            self.runtime.events.add("followed", words, name)

    async def _is_unfit_still(self, session: StreamSession, store: StreamStore) -> bool:
        """Return whether the store has the same state that could not be used; nothing is claimed for that."""
        entry = await self.runtime.run("lookups", lambda: store.entry(session.name))
        return entry is not None and (entry.clock, entry.written) == session.unfit

    async def _note_unfit(
        self, session: StreamSession, words: str, mark: Mark | None, error: Exception | None = None
    ) -> None:
        """Let the source model predict for a stream whose stored state cannot be used; that state stays as it is."""
        noted, loaded = session.role == "unfit", session.loaded
        session.role, session.loaded, session.mark = "unfit", False, mark
        session.unfit = None if mark is None else mark[1:]
        session.report, session.clock = {}, 0
        if loaded:
            await self.runtime.run("states", lambda: self.fleet.drop(session.name))
        if not noted:
            rest = "The source model predicts, and nothing is learned or overwritten. Serve it as it was stored"
            words = f"{words}. {rest}, or delete the stream: it then begins anew"
            self.runtime.events.add("unfit", words, session.name, logging.WARNING, error)

    async def check_stored(self) -> None:
        """Log at the start whether states in the store fit, of the first streams; a request finds out about its own."""
        store, reasons, checked = self.store, list[str](), 0
        if store is None:
            return
        with contextlib.suppress(StoreDown):
            for entry in await self.runtime.run("lookups", lambda: store.list(limit=CHECKED)):
                with contextlib.suppress(StoreDamaged):
                    stored = await self.runtime.run("lookups", partial(store.read, entry.stream))
                    if stored is None:
                        continue
                    checked += 1
                    try:
                        check = partial(self.fleet.check_bytes, entry.stream, stored.blob)
                        await self.runtime.run("states", check)
                    except StateFileError as error:
                        reasons.append(str(error))
        if reasons:
            words = f"{len(reasons)} of {checked} stored states that were looked at do not fit: {reasons[0]}"
            rest = "For such streams the source model predicts, and their states stay in the store"
            self.runtime.events.add("unfit", f"{words}. {rest}", level=logging.WARNING)

    async def exists(self, name: str) -> bool:
        """Return whether there is a stream, here or in the store."""
        store = self.store
        if name in self.by_name or store is None:
            return name in self.by_name
        return await self.runtime.run("lookups", lambda: store.entry(name)) is not None

    def blocked(self, name: str) -> str | None:
        """Return why a stream must not learn now: owner, lease or lag; None: it may."""
        session = self.by_name.get(name)
        if session is None or session.role != "owned" or not session.loaded:
            return "owner"
        now = self.runtime.clock()
        if now >= session.learn_until:
            return "lease"
        return "lag" if session.lag(now) > self.policy.lag else None

    async def renew(self) -> None:
        """Renew all leases but those of streams without requests, which another worker may claim when they end.

        A stream whose claim is lost is dropped; its next request looks it up.
        """
        writer, asked = self.writer, self.runtime.clock()
        for each in self.by_name.values():
            idle = asked - each.used > self.policy.rest and not each.changed
            each.resting = each.claim is not None and idle and not self.runtime.scheduler.unlearned(each.name)
        claims = {
            name: session.claim for name, session in self.by_name.items() if session.claim and not session.resting
        }
        if writer is None or not claims:
            return
        held, lease = list(claims.values()), self.policy.lease
        try:
            renewed = await self.runtime.run("claims", lambda: writer.store.renew(held, lease))
        except StoreDown as error:
            writer.note_failure(error)
            return
        for name, claim in claims.items():
            session = self.by_name.get(name)
            if session is None or session.claim is None or session.claim.generation != claim.generation:
                continue  # released or claimed anew meanwhile
            if name in renewed:
                session.renewed(renewed[name], asked, self.policy.lease, self.policy.margin)
            else:
                await self.lose(session, "its claim has ended, or another worker has claimed it")

    async def _wake(self, session: StreamSession) -> bool:
        """Renew the claim of a stream that rests; if another worker has claimed it meanwhile, forget it: False."""
        writer, claim, asked = self.writer, session.claim, self.runtime.clock()
        if writer is None or claim is None:
            return True
        try:
            renewed = await self.runtime.run("claims", lambda: writer.store.renew([claim], self.policy.lease))
        except StoreDown as error:
            writer.note_failure(error)
            session.resting = False  # it only predicts, until `renew` succeeds
            return True
        if session.name in renewed:
            session.renewed(renewed[session.name], asked, self.policy.lease, self.policy.margin)
            return True
        session.lost()
        async with self.runtime.hold(session.name):
            await self._forget(session)
        self.runtime.events.add("released", "another worker claimed it while no request came here", session.name)
        return False

    async def lose(self, session: StreamSession, why: str) -> None:
        """Forget a stream that another worker owns now; learning that is not stored is lost."""
        lag = session.lag(self.runtime.clock())
        session.lost()
        session.dirty_since = session.writing_since = None
        async with self.runtime.hold(session.name):
            await self._forget(session)
        words = f"{why}. What it learned here and did not store is lost"
        self.runtime.events.add("fenced", words, session.name, logging.WARNING, seconds=lag)

    async def _forget(self, session: StreamSession) -> None:
        """Drop a stream that is held; its waiting requests are placed again."""
        if self.by_name.get(session.name) is session:
            del self.by_name[session.name]
            if session.loaded and session.name in self.fleet:
                await self.runtime.run("states", lambda: self.fleet.drop(session.name))
        self._on_closed(session.name)

    @contextlib.contextmanager
    def _suspend_learning_on_error(self, session: StreamSession) -> Iterator[None]:
        """Ask the store to end or to replace a stream's claim in this context.

        If it fails, it is unknown whether the claim holds. Nothing is learned until a renewal confirms it.
        """
        claim = session.claim
        try:
            yield
        except BaseException as error:
            session.lost()
            session.claim = claim
            if isinstance(error, StoreDown) and self.writer is not None:
                self.writer.note_failure(error)
            raise

    async def release(self, session: StreamSession) -> None:
        """Store a stream if it changed, end its claim, and forget it. Without a store it stays in the fleet.

        It also stays if the store fails (`StoreDown`) or its state cannot be stored (`NotStored`).
        """
        if self.writer is not None:
            await self.writer.write(session)
            await asyncio.shield(self.runtime.start(self._release_stored(session, self.writer.store)))

    async def _release_stored(self, session: StreamSession, store: StreamStore) -> None:
        async with self.runtime.hold(session.name):
            if self.by_name.get(session.name) is not session or session.changed:
                return  # lost meanwhile, or it has learned again: later
            if (claim := session.claim) is not None:
                with self._suspend_learning_on_error(session):
                    session.lost()  # new requests need not wait for the store
                    await self.runtime.run("claims", lambda: store.release(claim))
            await self._forget(session)
        self.runtime.events.add("released", "stored and released" if claim else "forgotten", session.name)

    async def release_idle(self) -> None:
        """Release streams without a request for a while. One that cannot be stored stays, without effect on others."""
        before, unlearned = self.runtime.clock() - self.policy.idle, self.runtime.scheduler.unlearned
        for session in [s for s in self.by_name.values() if s.used < before and not unlearned(s.name)]:
            try:
                await self.release(session)
            except NotStored:
                continue  # the writer has added an event
            except StoreDown:
                return

    async def delete(self, session: StreamSession) -> None:
        """Delete the stored states of an owned stream, and forget it."""
        async with self.runtime.hold(session.name):
            claim, store = self.check_still_here(session), self.store
            with self._suspend_learning_on_error(session):
                session.lost()
                if claim is not None and store is not None:
                    await self.runtime.run("claims", lambda: store.delete(claim))
            session.dirty_since = None
            await self._forget(session)
        self.runtime.events.add("deleted", "deleted, with its stored states", session.name)

    async def delete_stored(self, name: str) -> None:
        """Delete the stored states of a stream that is not opened here, or that cannot use them."""
        store = self.store
        if store is None or await self.runtime.run("claims", lambda: store.entry(name)) is None:
            raise UnknownStream(f"no stream {name!r}")
        claim = await self.runtime.run("claims", lambda: store.claim(name, self.runtime.owner, self.policy.lease))
        if claim is None:
            raise NotOwner(f"stream {name!r} cannot be deleted here: another worker owns it. Ask its owner, or wait")
        await self.runtime.run("claims", lambda: store.delete(claim))
        if (session := self.by_name.get(name)) is not None:
            async with self.runtime.hold(name):
                await self._forget(session)
        self.runtime.events.add("deleted", "deleted, with its stored states", name)

    async def claim_anew(self, session: StreamSession) -> None:
        """Raise the generation of an owned stream, so that a state with an earlier clock may be stored.

        Call it while the stream is held, with everything stored.
        """
        claim, store = self.check_still_here(session), self.store
        if claim is None or store is None:
            return

        def new_generation() -> Claim | None:
            store.release(claim)
            return store.claim(claim.stream, claim.owner, self.policy.lease)

        asked = self.runtime.clock()
        with self._suspend_learning_on_error(session):
            new = await self.runtime.run("claims", new_generation)
            if new is None:
                raise NotOwner(
                    f"another worker has claimed stream {session.name!r} at this moment; nothing was changed"
                )
        session.renewed(new, asked, self.policy.lease, self.policy.margin)

    def check_still_here(self, session: StreamSession) -> Claim | None:
        """Return the claim of a stream that is held; refuse one that was released or lost before it was held."""
        if self.by_name.get(session.name) is not session or (session.claim is None and self.store is not None):
            raise NotOwner(
                f"stream {session.name!r} was released or lost at this moment; nothing was changed. Try again"
            )
        return session.claim
