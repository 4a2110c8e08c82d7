"""The reader of the ledger of stream states. The states are state files, which have a reader of their own."""

import contextlib

from fuzz.registry import digest, reader
from stores import write
from tribe.serve.store import SqliteStore
from tribe.serve.store.sqlite import LEDGER

STREAM = "gate-3"


@reader("ledger", "", ("tribe.serve.store.sqlite.Ledger._connect", "tribe.serve.store.sqlite.SqliteStore._fetch"))
class LedgerFile:
    @staticmethod
    def make(folder):
        """A store with two states of a stream, in a single ledger file."""
        with contextlib.closing(SqliteStore(folder / "store", now=lambda: 1000.0)) as store:
            claim = store.claim(STREAM, "worker", 10)
            for clock in (1, 2):
                write(store, claim, clock)
        return folder / "store" / LEDGER

    @staticmethod
    def read(folder):
        """What is read of a stream, and of the ledger."""
        with contextlib.closing(SqliteStore(folder / "store", now=lambda: 1000.0)) as store:
            return digest(store.read(STREAM), store.list())
