"""The streams of a worker: opened at the first request, renewed, followed where others own them, released if idle."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any

from tribe.io.states import StateFileError
from tribe.serve.condition import plain
from tribe.serve.config import Policy
from tribe.serve.errors import NotOwner, NotStored, UnknownStream, WrongState
from tribe.serve.events import Events
from tribe.serve.ownership import Found, Served, look_up, new_generation
from tribe.serve.store.protocol import Claim, Store, StoreDown
from tribe.serve.tasks import Tasks
from tribe.serve.writer import Writer
from tribe.streams import Fleet

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


class Keeper:
    """Opens and closes streams. Used on the event loop; the store is asked in a thread.

    Args:
        fleet: holds the states.
        store: holds the claims and the stored states; None: this worker owns every stream and stores nothing.
        policy: how long and how often.
        owner: this worker's name in the store.
        clock: the worker's.
        events: where to say what happens.
        in_thread: runs a function in the thread that asks the store.
        in_states: runs one in the thread that changes the fleet, which may wait for a step.
        hold: keeps a stream from being stepped.
        closed: called with the name of a stream that is gone, while it is held.
    """

    def __init__(
        self,
        fleet: Fleet,
        store: Store | None,
        policy: Policy,
        owner: str,
        clock: Callable[[], float],
        events: Events,
        in_thread: InThread,
        in_states: InThread,
        hold: Callable[[str], AbstractAsyncContextManager[None]],
        closed: Callable[[str], None],
    ) -> None:
        self.fleet, self.store, self.policy, self.owner = fleet, store, policy, owner
        self.clock, self.events = clock, events
        self._in_thread, self._in_states, self._hold, self._closed = in_thread, in_states, hold, closed
        self.streams: dict[str, Served] = {}
        self.tasks = Tasks()  # changes of streams, which run to their end
        self.writer: Writer | None = None  # set by the worker
        self._opening: dict[str, asyncio.Task[Served]] = {}

    async def ask(self, question: Callable[[], Any]) -> Any:
        """Call the store in its thread."""
        return await self._in_thread(question)

    # -- opening ------------------------------------------------------------------------------------------------------

    def ready(self, name: str, now: float) -> Served | None:
        """A stream that can be answered for at once; None: it must be opened, or looked up again."""
        served = self.streams.get(name)
        if served is None:
            return None
        served.used = now
        if served.role != "owned" and now - served.checked > self._patience(served):
            return None
        return served

    def _patience(self, served: Served) -> float:
        return self.policy.staleness if served.role == "followed" else self.policy.retry

    async def open(self, name: str) -> Served:
        """Claim a stream, or read what its owner stored last. Callers at the same time share one look-up."""
        task = self._opening.get(name)
        if task is None:
            task = self._opening[name] = self.tasks.start(self._open(name))
            task.add_done_callback(lambda _: self._opening.pop(name, None))
        return await asyncio.shield(task)

    async def _open(self, name: str) -> Served:
        served, now = self.streams.get(name), self.clock()
        if self.store is None:
            return served or await self._open_without_store(name, now)
        if served is not None and served.role == "owned":
            return served
        store, mark = self.store, served.mark if served is not None else None
        try:
            found: Found = await self._in_thread(lambda: look_up(store, name, self.owner, self.policy.lease, mark))
        except StoreDown as error:
            if self.writer is not None:
                self.writer.note_failure(error)
            if served is None:
                served = self.streams[name] = Served(name, "unreachable", now, loaded=False)
            served.checked = now
            return served
        if found.damaged:
            self.events.add("damaged", f"{found.damaged} The state before it is used", name, logging.ERROR)
        served = served or Served(name, "followed", now, loaded=False)
        try:
            await self._load(served, found, now)
        except StateFileError as error:
            if (claim := found.claim) is not None:
                await self._in_thread(lambda: store.release(claim))
            raise WrongState(
                f"stream {name!r} has a stored state that does not fit: {error}. Serve it with the model and method it "
                "was stored with, or delete the stream"
            ) from error
        self.streams[name] = served
        return served

    async def _open_without_store(self, name: str, now: float) -> Served:
        if name not in self.fleet:
            await self._in_states(lambda: self.fleet.add(name))
        served = self.streams[name] = Served(name, "owned", now)
        self.read_fleet(served)
        self.events.add("opened", "a new stream", name)
        return served

    async def _load(self, served: Served, found: Found, asked: float) -> None:
        """Bring the fleet to what the store says of a stream."""
        name, stored = served.name, found.stored
        if stored is not None:
            await self._in_states(lambda: self.fleet.from_bytes(name, stored.blob))
            served.recent = dict.fromkeys(stored.requests[-self.policy.requests :])
            served.loaded = True
        elif found.claim is not None:
            if name in self.fleet:
                await self._in_states(lambda: self.fleet.drop(name))
            await self._in_states(lambda: self.fleet.add(name))
            served.recent, served.loaded = {}, True
        first = served.checked == -math.inf
        served.checked, served.mark = asked, found.mark
        if found.claim is not None:
            served.renewed(found.claim, asked, self.policy.lease, self.policy.margin)
            words = "a new stream" if stored is None else f"resumed at clock {stored.clock}"
            self.events.add("opened", words, name, generation=found.claim.generation)
        elif first or served.role != "followed":
            served.role = "followed"
            self.events.add("followed", "another worker owns it: predictions come from its last stored state", name)
        if served.loaded:
            self.read_fleet(served)

    def read_fleet(self, served: Served) -> None:
        """Note the clock of the state that the fleet has, whether it is frozen, and how it does."""
        info = self.fleet.info(served.name)
        served.clock, served.frozen = info.steps, info.frozen
        served.condition = plain(self.fleet.health_many([served.name])[served.name])

    # -- leases -------------------------------------------------------------------------------------------------------

    def blocked(self, name: str) -> str | None:
        """Why a stream must not learn now; None: it may."""
        served = self.streams.get(name)
        if served is None or served.role != "owned" or not served.loaded:
            return "owner"
        now = self.clock()
        if now >= served.learn_until:
            return "lease"
        return "lag" if served.lag(now) > self.policy.lag and self.store is not None else None

    async def renew(self) -> None:
        """Renew all leases. A stream whose claim is lost is dropped; its next request looks it up."""
        store, asked = self.store, self.clock()
        claims = {name: served.claim for name, served in self.streams.items() if served.claim is not None}
        if store is None or not claims:
            return
        try:
            renewed = await self._in_thread(lambda: store.renew(list(claims.values()), self.policy.lease))
        except StoreDown as error:
            if self.writer is not None:
                self.writer.note_failure(error)
            return
        for name, claim in claims.items():
            served = self.streams.get(name)
            if served is None or served.claim is None or served.claim.generation != claim.generation:
                continue  # released or claimed anew meanwhile
            if name in renewed:
                served.renewed(renewed[name], asked, self.policy.lease, self.policy.margin)
            else:
                await self.lose(served, "its claim has ended, or another worker has claimed it")

    async def lose(self, served: Served, why: str) -> None:
        """Forget a stream that another worker owns now; what was learned and not stored is lost."""
        lag = served.lag(self.clock())
        served.claim, served.learn_until = None, -math.inf
        served.dirty_since = served.writing_since = None
        async with self._hold(served.name):
            await self._forget(served)
        self.events.add("fenced", f"{why}. What it learned here and did not store is lost", served.name,
                        logging.WARNING, seconds=lag)  # fmt: skip

    async def _forget(self, served: Served) -> None:
        """Drop a stream that is held; its waiting requests are placed again."""
        if self.streams.get(served.name) is served:
            del self.streams[served.name]
            if served.loaded:
                await self._in_states(lambda: self.fleet.drop(served.name))
        self._closed(served.name)

    @contextmanager
    def _claim_at_stake(self, served: Served) -> Iterator[None]:
        """In this context the store is asked to end or to replace a stream's claim.

        If it fails, it is unknown whether the claim holds. Nothing is learned until a renewal confirms it.
        """
        claim = served.claim
        try:
            yield
        except BaseException as error:
            served.claim, served.learn_until = claim, -math.inf
            if isinstance(error, StoreDown) and self.writer is not None:
                self.writer.note_failure(error)
            raise

    # -- releasing ----------------------------------------------------------------------------------------------------

    async def release(self, served: Served) -> None:
        """Store a stream if it changed, end its claim, and forget it. `StoreDown` or `NotStored`: it stays.

        Without a store there is nowhere to keep it, so it stays in the fleet.
        """
        if self.store is None:
            return
        if self.writer is not None:
            await self.writer.write(served)
        await self.tasks.finish(self._release_stored(served, self.store))

    async def _release_stored(self, served: Served, store: Store) -> None:
        async with self._hold(served.name):
            if self.streams.get(served.name) is not served or served.changed:
                return  # lost meanwhile, or it has learned again: later
            if (claim := served.claim) is not None:
                with self._claim_at_stake(served):
                    served.claim, served.learn_until = None, -math.inf  # new requests need not wait for the store
                    await self._in_thread(lambda: store.release(claim))
            await self._forget(served)
        self.events.add("released", "stored and released" if claim else "forgotten", served.name)

    async def release_idle(self, busy: Callable[[str], bool]) -> None:
        """Release streams without a request for a while. One that cannot be stored stays, and keeps no other."""
        before = self.clock() - self.policy.idle
        for served in [s for s in self.streams.values() if s.used < before and not busy(s.name)]:
            try:
                await self.release(served)
            except NotStored:
                continue  # the writer has said so
            except StoreDown:
                return

    async def delete(self, served: Served) -> None:
        """Delete the stored states of an owned stream, and forget it."""
        store = self.store
        async with self._hold(served.name):
            claim = self._check_still_here(served)
            with self._claim_at_stake(served):
                served.claim, served.learn_until = None, -math.inf
                if claim is not None and store is not None:
                    await self._in_thread(lambda: store.delete(claim))
            served.dirty_since = None
            await self._forget(served)
        self.events.add("deleted", "deleted, with its stored states", served.name)

    async def delete_stored(self, name: str) -> None:
        """Delete the stored states of a stream that is not opened here."""
        store, claim = self.store, None
        if store is None or await self._in_thread(lambda: store.entry(name)) is None:
            raise UnknownStream(f"there is no stream {name!r}")
        claim = await self._in_thread(lambda: store.claim(name, self.owner, self.policy.lease))
        if claim is None:
            raise NotOwner(f"stream {name!r} cannot be deleted here: another worker owns it. Ask its owner, or wait")
        await self._in_thread(lambda: store.delete(claim))
        self.events.add("deleted", "deleted, with its stored states", name)

    async def claim_anew(self, served: Served) -> None:
        """Raise the generation of an owned stream, so that a state with an earlier clock may be stored.

        Call it while the stream is held, with everything stored.
        """
        claim, store = self._check_still_here(served), self.store
        if claim is None or store is None:
            return
        asked = self.clock()
        with self._claim_at_stake(served):
            new = await self._in_thread(lambda: new_generation(store, claim, self.policy.lease))
            if new is None:
                raise NotOwner(f"another worker has claimed stream {served.name!r} at this moment; nothing was changed")
        served.renewed(new, asked, self.policy.lease, self.policy.margin)

    def _check_still_here(self, served: Served) -> Claim | None:
        """The claim of a stream that is held; refuse one that was released or lost before it was held."""
        if self.streams.get(served.name) is not served or (served.claim is None and self.store is not None):
            raise NotOwner(
                f"stream {served.name!r} was released or lost at this moment; nothing was changed. Try again"
            )
        return served.claim
