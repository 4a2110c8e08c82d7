"""A process that serves two versions of the small network over HTTP: a test kills it, and starts another.

It prints its port when it listens. The clock of its store is ahead by ``shift``, so that the leases of the one before
it have ended.
"""

import json
import sys
import time

import torch
from small_server import MODEL
from version_networks import versions_of

from tribe.serve.config import Policy
from tribe.serve.server import Listener
from tribe.serve.service import Service
from tribe.serve.store import REDIS
from tribe.serve.store.redis import RedisStore
from tribe.serve.store.sqlite import SqliteStore
from tribe.serve.worker import Worker


def main(place, port, shift, policy):
    torch.set_num_threads(1)
    clock = {"now": lambda: time.time() + shift}
    store = RedisStore(place, **clock) if place.startswith(REDIS) else SqliteStore(place, **clock)
    versions = versions_of("1", "2")
    model = MODEL.__class__(MODEL.name, MODEL.shape, MODEL.classes, method="tribe", versions=versions.names)
    listener = Listener(Service(Worker(versions, store, policy=Policy(**policy)), model, store=store), port=port)
    listener.run(lambda: print(listener.port, flush=True))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
