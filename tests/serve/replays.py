"""A worker for tests: on a small network, with a store that fails or waits on demand, and the replay of a stream.

The replay is what the streams of a worker are compared with.
"""

import contextlib
import threading

import tribe
from tribe.core.state import digest
from tribe.serve.config import Policy
from tribe.serve.store import StoreDown
from tribe.serve.worker import Worker
from tribe.streams import stream_seed
from tribe.testing import images, small_network

# Nothing happens unless a test asks for it, and no request waits for a larger batch: the clock may stand still.
POLICY = Policy(max_batch_delay=0, write_every=1000, renew=300, lease=1000, idle=1000, drain=1000)


def new_fleet(**options):
    return tribe.fleet(small_network(), h0=2.0, exact=True, **options)


class Paused:
    """A fleet whose steps wait until a test lets them go."""

    def __init__(self):
        self.fleet, self.go = new_fleet(), threading.Event()
        self.go.set()

    def __call__(self, images):
        self.go.wait()
        return self.fleet(images)

    def __getattr__(self, name):
        return getattr(self.fleet, name)

    def __contains__(self, name):
        return name in self.fleet


def batch(seed, size=2):
    return images(1, size, seed)[0]


def replay(fleet, stream, batches):
    """The digest of a stream that learned from these batches, one by one, through `Method.step` alone."""
    state = fleet.method.init(fleet.net, 1, stream_seed(stream, fleet.seed))
    for x in batches:
        _, state = fleet.method.step(fleet.net, state, x[None])
    return digest(state)


@contextlib.asynccontextmanager
async def working(fleet=None, store=None, policy=POLICY, **options):
    """A worker, which stops at the end."""
    worker = Worker(new_fleet() if fleet is None else fleet, store, policy=policy, **options)
    await worker.start()
    try:
        yield worker
    finally:
        if isinstance(store, Guided):
            store.go.set()
        await worker.stop()


def kinds(worker):
    """The kinds of the events of a worker."""
    return [event.kind for event in worker.log.kept]


class Guided:
    """A store whose calls fail or wait while a test says so."""

    def __init__(self, store):
        self.store = store
        self.fails = set()  # names of calls that do nothing and fail; "all": every call
        self.fails_after = set()  # those that do what they should, then fail: the caller hears of the failure only
        self.waits, self.go, self.reached = None, threading.Event(), threading.Event()

    def wait_in(self, name):
        """From now on a call of this name waits for `go`."""
        self.waits = name
        self.go.clear()
        self.reached.clear()

    def __getattr__(self, name):
        call = getattr(self.store, name)

        def guided(*arguments, **options):
            if name == self.waits:
                self.reached.set()
                self.go.wait()
            if self.fails & {name, "all"}:
                raise StoreDown("the disk is full")
            result = call(*arguments, **options)
            if name in self.fails_after:
                raise StoreDown("the connection was closed")
            return result

        return guided
