"""The store of stream states: who owns a stream, and the last state that its owner wrote.

    store = open_store("data")  # a folder: one host, any number of processes

`tribe.serve.store.protocol.Store` says what a store promises.
"""

from os import PathLike

from tribe.serve.store.protocol import Claim, Entry, Fenced, Store, Stored, StoreDamaged, StoreDown
from tribe.serve.store.sqlite import SqliteStore

__all__ = [
    "Claim",
    "Entry",
    "Fenced",
    "SqliteStore",
    "Store",
    "StoreDamaged",
    "StoreDown",
    "Stored",
    "open_store",
]


def open_store(place: str | PathLike[str]) -> Store:
    """Open the store in a folder, which is made if it is missing."""
    return SqliteStore(place)
