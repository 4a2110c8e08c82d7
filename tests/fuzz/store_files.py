"""Readers of the store of stream states: its ledger and its blobs."""

import contextlib

from fuzz.registry import digest, reader
from tribe.serve.store import SqliteStore
from tribe.serve.store.sqlite import LEDGER

STREAM = "gate 3"
BLOB_FUNCTIONS = ("tribe.serve.store.blobs.Blobs.read", "tribe.serve.store.records.stored")


def written_store(folder):
    """A store with two states of a stream, in a single ledger file."""
    with contextlib.closing(SqliteStore(folder / "store", now=lambda: 1000.0)) as store:
        claim = store.claim(STREAM, "worker", 10)
        for clock in (1, 2):
            store.write(claim, b"state" * 50 * clock, clock=clock, requests=[f"r{clock}"], meta={"method": "tribe"})
        return store._blobs.path(store._record(STREAM, "current").blob)


def read_store(folder):
    """What is read of a stream, and of the ledger."""
    with contextlib.closing(SqliteStore(folder / "store", now=lambda: 1000.0)) as store:
        return digest(store.read(STREAM), store.list())


@reader("ledger", "", ("tribe.serve.store.ledger.Ledger._connect", *BLOB_FUNCTIONS))
class LedgerFile:
    @staticmethod
    def make(folder):
        written_store(folder)
        return folder / "store" / LEDGER

    @staticmethod
    def read(folder):
        return read_store(folder)


@reader("blob", "", BLOB_FUNCTIONS, sealed=True)
class BlobFile:
    @staticmethod
    def make(folder):
        return written_store(folder)

    @staticmethod
    def read(folder):
        return read_store(folder)
