"""Both kinds of stores for tests, and a real Redis server for one of them."""

import atexit
import contextlib
import functools
import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from tribe.serve.store import Write
from tribe.serve.store.redis import RedisStore
from tribe.serve.store.sqlite import SqliteStore

KINDS = ("sqlite", "redis")
numbers = itertools.count()


class Clock:
    """A clock that tests set."""

    def __init__(self):
        self.time = 1000.0

    def __call__(self):
        return self.time


class RedisServer:
    """A process of `redis-server` in a folder, which listens on a socket there and writes every change to the disk."""

    def __init__(self, *options):
        self.folder = Path(tempfile.mkdtemp(prefix="redis-"))
        self.socket = self.folder / "socket"
        self.address = f"unix://{self.socket}"
        self.command = ["redis-server", "--port", "0", "--unixsocket", self.socket, "--dir", self.folder]
        self.command += ["--save", "", "--appendonly", "yes", "--appendfsync", "no", *options]
        self.start()

    def start(self):
        """Start it, again with its data; it is ready when it says so."""
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said = []
        for line in self.process.stdout:
            said.append(line)
            if "ready to accept connections" in line.lower():
                return
        raise AssertionError(f"redis-server ended with {self.process.wait()}:\n{''.join(said)}")

    def kill(self):
        """End it at once, as a crash does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def remove(self):
        with contextlib.suppress(ProcessLookupError):
            self.kill()
        shutil.rmtree(self.folder)


def need_redis():
    """Skip a test where Redis is not installed."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (Debian: apt install redis-server)")
    if importlib.util.find_spec("redis") is None:
        pytest.skip("the extra redis is not installed: pip install 'tribe-tta[redis]'")


@functools.cache
def shared_server():
    """A server for all tests of this process that do not stop it."""
    server = RedisServer()
    atexit.register(server.remove)
    return server


def fast_folder():
    """A new folder in memory where the platform has one: a sync to a disk takes longer than all else in these tests."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="tribe-store-", dir=memory if os.access(memory, os.W_OK) else None))


def open_kind(kind, folder, clock=None, cls=None):
    """A function that opens a store of a kind, new at first; ``cls`` takes the place of `SqliteStore`."""
    if kind == "sqlite":
        given = {} if clock is None else {"now": clock}
        return functools.partial(cls or SqliteStore, folder / "store", **given)
    need_redis()
    return functools.partial(RedisStore, shared_server().address, prefix=f"test {next(numbers)}:", now=clock)


def write(store, claim, clock, blob=None):
    """Write a state that follows from its clock; an error if it is refused."""
    for error in store.write([a_write(claim, clock, blob)]).values():
        raise error


def a_write(claim, clock, blob=None):
    return Write(claim, b"state %d" % clock if blob is None else blob, clock, [f"request {clock}"])
