"""What can be done to one stream besides predicting: create, end, reset, freeze, roll back, drop, read and replace."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

from tribe.serve.errors import NotOwner, NotStored, Overloaded, UnknownStream
from tribe.serve.keeper import InThread, Keeper
from tribe.serve.ownership import Kept, Served, read_intact
from tribe.serve.store.protocol import Stored, StoreDown

Done = Coroutine[Any, Any, dict[str, Any]]  # an action, to be awaited: what is known of the stream after it


class Controls:
    """Actions on streams, one at a time for each stream, and never during a step of it.

    All but ``create``, ``end`` and reading a state need a stream that exists and that this worker owns. An action that
    has begun runs to its end, also if its caller is cancelled.

    ============  ===================================================================================================
    create        open the stream: claim it, resume its stored state or make a new one. It never resets.
    end           learn what waits, store the stream, release it. Its next request opens it again.
    reset         return it to the source model
    freeze        only predict from now on; `unfreeze`: learn again
    snapshot      keep a copy of the state in memory; the last few are kept
    rollback      return to the last snapshot, or to the one of the given clock: ``to=120``
    drop          delete the stream and its stored states
    ============  ===================================================================================================
    """

    def __init__(
        self,
        keeper: Keeper,
        hold: Callable[[str], AbstractAsyncContextManager[None]],
        drained: Callable[[str], Awaitable[None]],
        in_thread: InThread,
        describe: Callable[[str], dict[str, Any]],
    ) -> None:
        self.keeper, self.fleet, self.policy = keeper, keeper.fleet, keeper.policy
        self._hold, self._drained, self._in_thread, self._describe = hold, drained, in_thread, describe

    async def __call__(self, action: str, stream: str, **arguments: Any) -> dict[str, Any]:
        """Do it, and return what is known of the stream afterwards. A store that fails: `Overloaded`."""
        actions: dict[str, Callable[..., Done]] = {
            **{"create": self._create, "end": self._end, "reset": self._reset, "freeze": self._freeze},
            **{"unfreeze": self._unfreeze, "snapshot": self._snapshot, "rollback": self._rollback, "drop": self._drop},
        }
        if action not in actions:
            raise ValueError(f"there is no action {action!r}; expected one of {', '.join(actions)}")
        return await self._finish(actions[action](stream, **arguments))

    async def _finish(self, action: Done) -> dict[str, Any]:
        try:
            return await self.keeper.tasks.finish(action)
        except StoreDown as error:
            raise Overloaded(f"the store fails: {error}", self.policy.retry_most) from error

    # -- which stream -------------------------------------------------------------------------------------------------

    async def _existing(self, stream: str) -> Served:
        """A stream that is here or in the store; nothing is made."""
        served = self.keeper.ready(stream, self.keeper.clock())
        if served is not None:
            return served
        store = self.keeper.store
        if stream not in self.keeper.streams:
            entry = None if store is None else await self.keeper.ask(lambda: store.entry(stream))
            if entry is None:
                raise UnknownStream(f"there is no stream {stream!r}: its first request makes it")
        return await self.keeper.open(stream)

    async def _owned(self, stream: str) -> Served:
        served = await self._existing(stream)
        if (reason := self.keeper.blocked(stream)) in ("owner", "lease"):
            why = "its lease was not renewed in time" if reason == "lease" else "another worker owns it"
            if served.role == "unreachable":
                why = "the store cannot be asked who owns it"
            raise NotOwner(f"stream {stream!r} cannot be changed here: {why}. Try again, or ask its owner")
        return served

    # -- actions ------------------------------------------------------------------------------------------------------

    async def _create(self, stream: str) -> dict[str, Any]:
        if self.keeper.ready(stream, self.keeper.clock()) is None:
            await self.keeper.open(stream)
        return self._describe(stream)

    async def _end(self, stream: str) -> dict[str, Any]:
        served = self.keeper.streams.get(stream)
        if served is None:
            return {"name": stream, "state": "released"}
        try:
            async with asyncio.timeout(self.policy.drain):
                await self._drained(stream)
        except TimeoutError:
            raise Overloaded(f"stream {stream!r} still learns what waits", self.policy.drain) from None
        await self.keeper.release(served)
        if stream in self.keeper.streams:  # without a store it stays, and so it does if a request has come meanwhile
            return self._describe(stream)
        return {"name": stream, "state": "released", "clock": served.clock}

    async def _reset(self, stream: str) -> dict[str, Any]:
        served = await self._owned(stream)
        words = "returned to the source model"
        return await self._replace(served, lambda: self.fleet.reset(stream), (), "reset", words)

    async def _freeze(self, stream: str) -> dict[str, Any]:
        return await self._set_frozen(stream, True)

    async def _unfreeze(self, stream: str) -> dict[str, Any]:
        return await self._set_frozen(stream, False)

    async def _set_frozen(self, stream: str, frozen: bool) -> dict[str, Any]:
        served = await self._owned(stream)
        async with self._hold(stream):
            await self._in_thread(lambda: (self.fleet.freeze if frozen else self.fleet.unfreeze)(stream))
            served.frozen = frozen
            served.touch(self.keeper.clock())
        self.keeper.events.add(*(("frozen", "it only predicts") if frozen else ("unfrozen", "it learns again")), stream)
        return self._describe(stream)

    async def _snapshot(self, stream: str) -> dict[str, Any]:
        served = await self._owned(stream)
        async with self._hold(stream):
            snapshot = await self._in_thread(lambda: self.fleet.snapshot(stream))
            served.snapshots.append(Kept(served.clock, snapshot, tuple(served.recent)))
            while len(served.snapshots) > self.policy.snapshots:
                served.snapshots.popleft()
        return self._describe(stream) | {"snapshot": served.snapshots[-1].clock}

    async def _rollback(self, stream: str, to: int | None = None) -> dict[str, Any]:
        served = await self._owned(stream)
        found = [kept for kept in served.snapshots if to is None or kept.clock == to]
        if not found:
            known = ", ".join(str(kept.clock) for kept in served.snapshots) or "none: take one first"
            raise UnknownStream(
                f"stream {stream!r} has no snapshot{'' if to is None else f' of clock {to}'}; it has {known}"
            )
        clock, snapshot, requests = found[-1]
        words = f"returned to the snapshot of clock {clock}"
        return await self._replace(served, lambda: self.fleet.restore(stream, snapshot), requests, "rollback", words)

    async def _drop(self, stream: str) -> dict[str, Any]:
        if stream in self.keeper.streams:
            await self.keeper.delete(await self._owned(stream))
        else:  # not opened: a state that does not fit this model can be deleted, too
            await self.keeper.delete_stored(stream)
        return {"name": stream, "state": "deleted"}

    async def _replace(
        self, served: Served, change: Callable[[], Any], requests: Iterable[str], kind: str, words: str
    ) -> dict[str, Any]:
        """Change the state of a stream to one whose clock may be earlier, and store it at once.

        A stored clock never falls within a generation, so the stream is stored as it is and claimed anew first.

        Args:
            served: the stream.
            change: replaces the state in the fleet.
            requests: ids of the last requests that the new state has learned, as far as they are known.
            kind: of the event.
            words: of the event.
        """
        writer, name = self.keeper.writer, served.name
        if writer is not None:
            with suppress(NotStored):  # it is replaced: a state that is not finite can be reset
                await writer.write(served)
        try:
            async with self._hold(name):
                await self.keeper.claim_anew(served)
                await self._in_thread(change)
                served.recent = dict.fromkeys(requests)
                self.keeper.read_fleet(served)
                served.touch(self.keeper.clock())
        except NotOwner as error:
            if served.claim is not None:
                await self.keeper.lose(served, str(error))
            raise
        self.keeper.events.add(kind, words, name)
        if writer is not None:
            await writer.write(served)
        return self._describe(name)

    # -- states as files ----------------------------------------------------------------------------------------------

    async def get_state(self, stream: str) -> bytes:
        """The state file of a stream: of this moment if it is here, else as stored."""
        served = self.keeper.streams.get(stream)
        if served is not None and served.loaded:
            async with self._hold(stream):
                data: bytes = await self._in_thread(lambda: self.fleet.to_bytes(stream))
                return data
        store = self.keeper.store
        stored: Stored | None = None
        if store is not None:
            try:
                stored, _ = await self.keeper.ask(lambda: read_intact(store, stream))
            except StoreDown as error:
                raise Overloaded(f"the store fails: {error}", self.policy.retry_most) from error
        if stored is None:
            raise UnknownStream(f"there is no stream {stream!r}, or it has learned nothing yet")
        return stored.blob

    async def put_state(self, stream: str, data: bytes) -> dict[str, Any]:
        """Replace the state of a stream by that of a file, or make a stream of it; a wrong file changes nothing."""
        return await self._finish(self._put_state(stream, data))

    async def _put_state(self, stream: str, data: bytes) -> dict[str, Any]:
        await self._in_thread(lambda: self.fleet.check_bytes(stream, data))  # before a stream is made for it
        if self.keeper.ready(stream, self.keeper.clock()) is None:
            await self.keeper.open(stream)
        served = await self._owned(stream)
        words = "its state was replaced"  # a file does not say which requests it has learned
        return await self._replace(served, lambda: self.fleet.from_bytes(stream, data), (), "replaced", words)
