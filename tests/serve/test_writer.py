"""Write-behind: what is not stored stays to be stored."""

import asyncio
from contextlib import asynccontextmanager, suppress

from tribe.serve.events import Events
from tribe.serve.ownership import Served
from tribe.serve.policy import Policy
from tribe.serve.store import SqliteStore
from tribe.serve.writer import Writer


def test_what_a_cancelled_round_has_captured_and_not_stored_counts_as_changed(tmp_path):
    store = SqliteStore(tmp_path)

    async def main():
        writing, calls = asyncio.Event(), []

        async def in_thread(function):
            calls.append(function)
            if len(calls) == 5:  # three states were captured and one was stored
                writing.set()
                await asyncio.Event().wait()  # for ever: `stop` cancels the round here
            return function()

        @asynccontextmanager
        async def hold(name):
            yield

        async def lost(served, why):
            raise AssertionError(why)

        def claimed(name):
            return Served(name, "owned", 0.0, store.claim(name, "me", 60), clock=1, dirty_since=1.0)

        streams = [claimed(f"cam{i}") for i in range(3)]
        writer = Writer(store, Policy(), lambda: 0.0, Events(10), in_thread, hold, lambda name: b"state", lost)
        writer._size = 5  # of the last state: with it the writer takes several streams at once
        task = asyncio.create_task(writer.round(streams))
        await writing.wait()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert [served.dirty_since for served in streams] == [None, 1.0, 1.0]
        await writer.round(streams)
        assert [served.dirty_since for served in streams] == [None] * 3

    asyncio.run(main())
    assert [store.read(f"cam{i}").blob for i in range(3)] == [b"state"] * 3
    store.close()
