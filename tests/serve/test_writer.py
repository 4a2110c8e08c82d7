"""Write-behind: what is not stored stays to be stored, and many small states are stored at once."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace

import pytest

from stores import write
from tribe.io.states import StateFileError
from tribe.serve.config import Policy
from tribe.serve.errors import NotStored
from tribe.serve.runtime import Runtime, StreamSession
from tribe.serve.store import StoreDown
from tribe.serve.store.sqlite import SqliteStore
from tribe.serve.writer import Writer


class Counting(SqliteStore):
    """A store that notes which states each call stores, and fails while a test says so."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.calls, self.down = [], False

    def write(self, writes):
        if self.down:
            raise StoreDown("the disk is full")
        self.calls.append([write.claim.stream for write in writes])
        return super().write(writes)


@pytest.fixture
def store(tmp_path):
    opened = Counting(tmp_path)
    yield opened
    opened.close()


def claimed(store, count):
    """Owned streams that have changed, the one with the lowest number first."""
    return [
        StreamSession(f"cam{i}", "owned", 0.0, store.claim(f"cam{i}", "me", 60), clock=1, dirty_since=1.0 + i)
        for i in range(count)
    ]


def new_writer(store, run=None, to_bytes=lambda name: b"state", on_fenced=None):
    """A writer whose threads are this one, so that nothing depends on timing."""

    async def at_once(thread, function):
        return function()

    async def fail(session, why):
        raise AssertionError(why)

    runtime = Runtime(SimpleNamespace(to_bytes=to_bytes), store, Policy(), "me", "model", lambda: 0.0)
    runtime.run = run or at_once
    made = Writer(runtime, store, on_fenced or fail)
    made._size = 5  # of the last state: with it the writer takes several streams at once
    return made


def dirty(sessions):
    return [session.dirty_since for session in sessions]


def total(writer, name):
    return writer.runtime.metrics.total(f"tribe_{name}_total")


async def test_what_a_cancelled_round_has_captured_and_not_stored_counts_as_changed(store):
    storing, calls = asyncio.Event(), []

    async def run(thread, function):
        calls.append(function)
        if len(calls) == 4:  # three states were captured, and none is stored
            storing.set()
            await asyncio.Event().wait()  # for ever: `stop` cancels the round here
        return function()

    sessions = claimed(store, 3)
    writer = new_writer(store, run)
    task = asyncio.create_task(writer.round(sessions))
    await storing.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert dirty(sessions) == [1.0, 2.0, 3.0]
    await writer.round(sessions)
    assert dirty(sessions) == [None] * 3
    assert [store.read(f"cam{i}").blob for i in range(3)] == [b"state"] * 3


async def test_the_states_of_a_group_are_stored_in_one_call(store):
    sessions = claimed(store, 100)
    await new_writer(store).round(reversed(sessions))
    assert [len(call) for call in store.calls] == [64, 36]
    assert store.calls[0] == [f"cam{i}" for i in range(64)], "the oldest change first"
    assert not any(session.changed for session in sessions)


async def test_a_stream_that_is_refused_does_not_keep_the_others_from_being_stored(store):
    sessions, gone = claimed(store, 3), []
    store.release(sessions[1].claim)
    store.claim("cam1", "another", 60)
    write(store, sessions[2].claim, 9)  # so that clock 1 is a fall

    async def on_fenced(session, why):
        gone.append(session.name)

    writer = new_writer(store, on_fenced=on_fenced)
    await writer.round(sessions)
    assert gone == ["cam1"]
    assert dirty(sessions) == [None, None, 3.0]
    assert store.read("cam0").blob == b"state"
    assert [total(writer, name) for name in ("fenced_writes", "writes", "store_errors")] == [1, 1, 1]


async def test_a_write_that_comes_after_its_stream_was_claimed_anew_does_not_lose_the_stream(store):
    """A reset claims the stream anew while an older state is on its way to the store."""
    (session,), calls = claimed(store, 1), []

    async def run(thread, function):
        calls.append(function)
        if len(calls) == 2:  # the state was captured
            store.release(session.claim)
            session.claim = store.claim("cam0", "me", 60)
            session.dirty_since = 9.0
        return function()

    writer = new_writer(store, run)
    await writer.round([session])
    assert (session.dirty_since, session.writing_since, total(writer, "fenced_writes")) == (9.0, None, 0)
    await writer.round([session])
    assert store.read("cam0").generation == 2


async def test_a_state_that_cannot_be_stored_is_reported_once_and_is_tried_again(store):
    (session,), bad = claimed(store, 1), [True]

    def to_bytes(name):
        if bad:
            raise StateFileError("it is not finite")
        return b"state"

    writer = new_writer(store, to_bytes=to_bytes)
    await writer.round([session])
    for _ in range(2):
        with pytest.raises(NotStored, match="finite"):
            await writer.write(session)
    assert [event.kind for event in writer.runtime.events.kept] == ["not-stored"]
    assert session.dirty_since == 1.0
    bad.clear()
    await writer.write(session)
    assert not session.changed
