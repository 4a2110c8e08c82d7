"""Write-behind: what is not stored stays to be stored, and many small states are stored at once."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest

from tribe.serve import writer as writing
from tribe.serve.config import Policy
from tribe.serve.errors import NotStored
from tribe.serve.events import Events
from tribe.serve.metrics import Metrics
from tribe.serve.ownership import Served
from tribe.serve.store import SqliteStore
from tribe.serve.store.protocol import StoreDown
from tribe.serve.writer import Writer


class Counting(SqliteStore):
    """A store that notes how many states each call stores."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.calls = []

    def write_many(self, writes):
        self.calls.append([write.claim.stream for write in writes])
        return super().write_many(writes)


@pytest.fixture
def store(tmp_path):
    kept = Counting(tmp_path)
    yield kept
    kept.close()


@asynccontextmanager
async def hold(name):
    yield


async def at_once(function):
    return function()


def claimed(store, count, name="cam"):
    """Owned streams that have changed."""
    return [
        Served(f"{name}{i}", "owned", 0.0, store.claim(f"{name}{i}", "me", 60), clock=1, dirty_since=1.0 + i)
        for i in range(count)
    ]


def new_writer(store, in_thread=at_once, to_bytes=lambda name: b"state", lost=None):
    async def fail(served, why):
        raise AssertionError(why)

    made = Writer(store, Policy(), lambda: 0.0, Events(10), Metrics("small"), in_thread, hold, to_bytes, lost or fail)
    made._size = 5  # of the last state: with it the writer takes several streams at once
    return made


def test_what_a_cancelled_round_has_captured_and_not_stored_counts_as_changed(store):
    async def main():
        writing, calls = asyncio.Event(), []

        async def in_thread(function):
            calls.append(function)
            if len(calls) == 4:  # three states were captured, and none is stored
                writing.set()
                await asyncio.Event().wait()  # for ever: `stop` cancels the round here
            return function()

        streams = claimed(store, 3)
        writer = new_writer(store, in_thread)
        task = asyncio.create_task(writer.round(streams))
        await writing.wait()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert [served.dirty_since for served in streams] == [1.0, 2.0, 3.0]
        await writer.round(streams)
        assert [served.dirty_since for served in streams] == [None] * 3

    asyncio.run(main())
    assert [store.read(f"cam{i}").blob for i in range(3)] == [b"state"] * 3


def test_the_states_of_a_group_are_stored_in_one_call(store):
    streams = claimed(store, 100)
    asyncio.run(new_writer(store).round(reversed(streams)))
    assert [len(call) for call in store.calls] == [64, 36]
    assert store.calls[0] == [f"cam{i}" for i in range(64)], "the oldest change first"
    assert all(served.dirty_since is served.writing_since is None for served in streams)


def test_a_call_takes_as_many_bytes_as_a_transaction_may_have_and_a_larger_state_alone(store, monkeypatch):
    monkeypatch.setattr(writing, "TRANSACTION", 10)
    streams = claimed(store, 4)
    sizes = {"cam0": 4, "cam1": 6, "cam2": 50, "cam3": 1}
    asyncio.run(new_writer(store, to_bytes=lambda name: b"x" * sizes[name]).round(streams))
    assert store.calls == [["cam0", "cam1"], ["cam2"], ["cam3"]]


def test_a_stream_that_is_refused_does_not_keep_the_others_from_being_stored(store):
    streams, gone = claimed(store, 3), []
    store.release(streams[1].claim)
    store.claim("cam1", "another", 60)
    store.write(streams[2].claim, b"later", clock=9, requests=[], meta={})  # so that clock 1 is a fall

    async def lost(served, why):
        gone.append(served.name)

    writer = new_writer(store, lost=lost)
    asyncio.run(writer.round(streams))
    assert gone == ["cam1"]
    assert [served.dirty_since for served in streams] == [None, None, 3.0]
    assert store.read("cam0").blob == b"state"
    total = writer.metrics.total
    assert (
        total("tribe_fenced_writes_total"),
        total("tribe_writes_total"),
        total("tribe_store_errors_total"),
    ) == (1, 1, 1)


def test_a_write_that_comes_after_its_stream_was_claimed_anew_does_not_lose_the_stream(store):
    """A reset claims the stream anew while an older state is on its way to the store."""
    (served,), calls = claimed(store, 1), []

    async def in_thread(function):
        calls.append(function)
        if len(calls) == 2:  # the state was captured
            store.release(served.claim)
            served.claim = store.claim("cam0", "me", 60)
            served.touch(9.0)
        return function()

    writer = new_writer(store, in_thread)
    asyncio.run(writer.round([served]))
    total = writer.metrics.total
    assert (served.dirty_since, served.writing_since, total("tribe_fenced_writes_total")) == (
        9.0,
        None,
        0,
    )
    asyncio.run(writer.round([served]))
    assert store.read("cam0").generation == 2


def test_a_state_that_cannot_be_stored_is_said_once_and_is_tried_again(store):
    (served,), bad = claimed(store, 1), [True]

    def to_bytes(name):
        if bad:
            raise ValueError("it is not finite")
        return b"state"

    writer = new_writer(store, to_bytes=to_bytes)
    asyncio.run(writer.round([served]))
    for _ in range(2):
        with pytest.raises(NotStored, match="'cam0' cannot be stored: it is not finite"):
            asyncio.run(writer.write(served))
    assert [event.kind for event in writer.events.kept] == ["not-stored"]
    assert served.dirty_since == 1.0
    bad.clear()
    assert asyncio.run(writer.write(served)) == 5
    assert not served.changed


def test_a_store_that_fails_leaves_all_to_be_stored_later(store):
    streams = claimed(store, 3)
    plain = store.write_many

    def fail(writes):
        raise StoreDown("the disk is full")

    store.write_many = fail
    writer = new_writer(store)
    asyncio.run(writer.round(streams))
    assert writer.down
    assert [served.dirty_since for served in streams] == [1.0, 2.0, 3.0]
    store.write_many, writer._paused_until = plain, 0.0
    asyncio.run(writer.round(streams))
    assert not writer.down
    assert [served.dirty_since for served in streams] == [None] * 3
