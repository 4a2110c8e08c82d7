"""The store of stream states: who owns a stream, and the last state that its owner wrote.

    store = open_store("data")                    # a folder: one host, any number of processes
    store = open_store("redis://localhost:6379")  # a Redis server: several hosts

`StreamStore` is the contract of a store.
"""

from os import PathLike

from tribe.serve.store.protocol import (
    Claim,
    ClockFell,
    Fenced,
    Stored,
    StoreDamaged,
    StoreDown,
    StoreEntry,
    StreamStore,
    Write,
)
from tribe.serve.store.redis import SCHEMES, RedisStore
from tribe.serve.store.sqlite import SqliteStore

__all__ = [
    "Claim",
    "ClockFell",
    "Fenced",
    "RedisStore",
    "SqliteStore",
    "StoreDamaged",
    "StoreDown",
    "StoreEntry",
    "Stored",
    "StreamStore",
    "Write",
    "open_store",
]


def open_store(place: str | PathLike[str]) -> StreamStore:
    """Open the store at a place: the address of a Redis server, or else a folder, which is made if it is missing."""
    return RedisStore(place) if isinstance(place, str) and place.startswith(SCHEMES) else SqliteStore(place)
