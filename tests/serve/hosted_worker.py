"""A process that hosts a worker and its load: run it, kill it, and read what it learned from its output.

It prints a line of JSON for every answer. Every stream has a client, which sends requests one after the other, with
ids that name the process and count up. The images of a request follow from its id, so that a test can replay it.
SIGTERM stops the clients, and then the worker as a server does.
"""

import asyncio
import contextlib
import hashlib
import json
import signal
import sys
import time

import torch

import tribe
from tribe.data.datasets.files import mnist_test
from tribe.serve.config import Policy
from tribe.serve.store import REDIS
from tribe.serve.store.redis import RedisStore
from tribe.serve.store.sqlite import SqliteStore
from tribe.serve.worker import Worker
from tribe.testing import images, small_network


def number(text):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def images_of(network, request_id):
    """The images of a request: one or two digits, or images of the small network."""
    drawn = number(request_id)
    if network == "small":
        return images(1, 1 + drawn % 2, drawn)[0]
    digits = mnist_test()[0]
    chosen = [(drawn + 7919 * i) % len(digits) for i in range(1 + drawn % 2)]
    return torch.tensor(digits[chosen])[:, None] / 255


def new_fleet(network):
    if network == "small":
        return tribe.fleet(small_network(), h0=2.0, exact=True)
    return tribe.fleet(tribe.models.load("compact", tribe.models.find("compact", "mnist")), exact=True)


async def client(worker, stream, network, name, count, rest):
    for i in range(count):
        request_id = f"{name}-{stream}-{i}"
        for _ in range(number(request_id) % 5):  # odd arrival times
            await asyncio.sleep(rest)
        answer = await worker.infer(stream, images_of(network, request_id), request_id=request_id)
        line = [stream, request_id, answer.adapted, answer.clock, answer.generation, time.time()]
        print(json.dumps(line), flush=True)


def open_place(place, shift=0.0):
    """Open the store in a folder, whose clock is ``shift`` seconds ahead, or at the address of a Redis server."""
    return RedisStore(place) if place.startswith(REDIS) else SqliteStore(place, now=lambda: time.time() + shift)


async def main(place, network, name, streams, count, rest, shift, policy):
    """Serve ``count`` requests of each of some streams."""
    torch.set_num_threads(1)
    store = open_place(place, shift)
    worker = Worker(new_fleet(network), store, policy=Policy(**policy), owner=name)
    await worker.start()
    clients = asyncio.gather(*(client(worker, f"cam{i}", network, name, count, rest) for i in range(streams)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, clients.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await clients
    await worker.stop()
    store.close()
    print("stopped", flush=True)


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
