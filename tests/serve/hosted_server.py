"""A process that serves the small network over HTTP; its streams begin in shadow. It prints its port, and serves on.

Its store's clock is ``shift`` seconds ahead, so that the leases of a process that was killed have ended.
"""

import json
import sys
import time

import torch
from small_server import serving, small_fleet

from tribe.serve.config import Policy
from tribe.serve.store.sqlite import SqliteStore
from tribe.serve.worker import Worker


def main(place, shift, policy):
    torch.set_num_threads(1)
    store = SqliteStore(place, now=lambda: time.time() + shift)
    worker = Worker(small_fleet(shadow=True), store, policy=Policy(**policy), model="small")
    listener = serving(worker)
    listener.run(lambda: print(listener.port, flush=True))
    store.close()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
