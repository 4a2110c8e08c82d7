"""Tokens that open streams: what they may have, and what they cost all others."""

import asyncio
import contextlib
import shutil
import threading

import pytest
from replays import POLICY, batch, working
from small_server import MODEL, token

from stores import fast_folder
from tribe.serve.errors import NotFound, TooMany
from tribe.serve.protocol import InferRequest
from tribe.serve.security import Access
from tribe.serve.service import Service
from tribe.serve.store.sqlite import SqliteStore

LOOKUPS = ("list", "count", "entry", "read")


class Watched:
    """A store that counts calls, and whose look-ups wait while a test says so."""

    def __init__(self, store):
        self.store, self.calls, self.go, self.reached = store, [], threading.Event(), threading.Event()
        self.go.set()

    def __getattr__(self, name):
        call = getattr(self.store, name)

        def watched(*arguments, **options):
            self.calls.append(name)
            if name in LOOKUPS and not self.go.is_set():
                self.reached.set()
                self.go.wait()
            return call(*arguments, **options)

        return watched


@pytest.fixture
def store():
    folder = fast_folder()
    with contextlib.closing(SqliteStore(folder)) as kept:
        watched = Watched(kept)
        yield watched
        watched.go.set()
    shutil.rmtree(folder)


@contextlib.asynccontextmanager
async def serving(store, *tokens, policy=POLICY):
    """A service with these tokens, and its users by name."""
    async with working(store=store, policy=policy) as worker:
        service = Service(worker, MODEL, Access(tokens))
        service.ready = True
        try:
            yield service, {each.name: service.access.identify(f"Bearer {each.name}") for each in tokens}
        finally:
            if store is not None:
                store.go.set()


def infer(service, user, stream, **fields):
    return service.infer(InferRequest(batch(0), stream=stream, **fields), user, service.worker.clock())


CAMERA = token("camera", streams="a-", role="learn", most_streams=5)
WATCHER = token("watcher", streams="a-", role="predict")


@pytest.mark.parametrize(("who", "error"), [("camera", TooMany), ("watcher", NotFound)])
async def test_leases_are_renewed_while_an_unknown_stream_is_looked_up(store, who, error):
    async with serving(store, CAMERA, WATCHER) as (service, users):
        for i in range(5):
            await infer(service, users["camera"], f"a-{i}")
        store.go.clear()
        asked = asyncio.create_task(infer(service, users[who], "a-unknown"))
        while not store.reached.is_set():
            await asyncio.sleep(0)
        await asyncio.wait_for(service.worker.sessions.renew(), 2)
        assert store.calls.count("renew") == 1
        store.go.set()
        with pytest.raises(error):
            await asked


async def test_an_unknown_stream_does_not_make_the_server_list_its_store(store):
    for i in range(30):
        store.claim(f"a-{i}", "another", 1)
    async with serving(store, CAMERA, WATCHER) as (service, users):
        while "list" not in store.calls:  # the start looks at some stored states
            await asyncio.sleep(0.001)
        store.calls.clear()
        for who, error in (("camera", TooMany), ("watcher", NotFound)):
            with pytest.raises(error):
                await infer(service, users[who], "a-unknown")
        asked = list(store.calls)
    assert asked
    assert "list" not in asked


async def test_names_of_stored_streams_come_in_pages(store):
    for i in range(1500):
        store.claim(f"{'ab'[i % 2]}-{i:04d}", "another", 1)
    async with serving(store) as (service, _):
        pages, after = [], ""
        while page := await service.worker.stored("", after):
            pages, after = [*pages, page], page[-1]
        assert [len(page) for page in pages] == [1000, 500]
        assert [name for page in pages for name in page] == [entry.stream for entry in store.list(limit=2000)]
        assert len(await service.worker.stored("a-")) == 750
