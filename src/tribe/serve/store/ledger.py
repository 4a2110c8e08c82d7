"""The ledger of an SQLite store: its file, tables and transactions, and what SQLite's errors mean.

Commits are synced (``synchronous=FULL``). With a write-ahead log, ``NORMAL`` would forget the last commits in a power
failure. Then the ledger would name blobs that were removed after those commits.
"""

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tribe.io.files import NotRegular, regular_size
from tribe.serve.store.protocol import StoreDamaged, StoreDown

APPLICATION, SCHEMA = 0x54524942, 1  # "TRIB" marks the file as ours; SCHEMA is the version of the tables
OPENING = 6  # times the patience to open a ledger: when many processes start at once, each waits for all others
TABLES = (
    "CREATE TABLE streams (stream TEXT PRIMARY KEY, owner TEXT, generation INTEGER NOT NULL, expires REAL NOT NULL, "
    "deleted INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE states (stream TEXT NOT NULL, place TEXT NOT NULL, generation INTEGER NOT NULL, "
    "clock INTEGER NOT NULL, requests TEXT NOT NULL, meta TEXT NOT NULL, blob TEXT NOT NULL, bytes INTEGER NOT NULL, "
    "digest TEXT NOT NULL, written REAL NOT NULL, PRIMARY KEY (stream, place)) WITHOUT ROWID",
)
CANNOT = {  # what an error of SQLite means, where it is not damage
    sqlite3.SQLITE_FULL: "the disk is full. Free some space; what was stored before is unchanged",
    sqlite3.SQLITE_BUSY: "another process holds the ledger. If that process is stopped, continue it or end it",
    sqlite3.SQLITE_LOCKED: "another thread holds the ledger",
    sqlite3.SQLITE_READONLY: "it cannot be written. Check the permissions of the folder and its files",
    sqlite3.SQLITE_PERM: "permission is denied. Check the permissions of the folder and its files",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened. Check that the folder exists, and its permissions",
    sqlite3.SQLITE_IOERR: "the disk reports an error. Check the disk and its free space",
    sqlite3.SQLITE_NOMEM: "there is not enough memory",
    sqlite3.SQLITE_PROTOCOL: "its locks do not work here. Put the folder on a local disk",
}


class Ledger:
    """The SQLite file of a store, which is made if it is missing.

    Args:
        path: of the file, on a local disk.
        patience: how many seconds to wait for the transaction of another process.
        check_new: called before the tables of a new ledger are made; an error leaves it without tables.
    """

    def __init__(self, path: Path, patience: float, check_new: Callable[[], None]) -> None:
        self.path, self._patience, self._check_new = path, patience, check_new
        self._writing_lock, self._reading_lock = threading.Lock(), threading.Lock()
        self._closed, self._process = False, os.getpid()
        try:
            regular_size(path)
        except FileNotFoundError:
            pass  # it is made below
        except NotRegular as error:
            raise StoreDamaged(f"{path} is not a ledger: {error.strerror}") from error
        except OSError as error:
            raise StoreDown(f"the ledger {path} cannot be opened: {error.strerror}") from error
        with self._explained():
            self._writing = self._connect()
            self._use_log(self._writing)
            self._reading = self._connect()
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise
        for connection in (self._writing, self._reading):
            connection.execute(f"PRAGMA busy_timeout = {int(1000 * patience)}")

    def close(self) -> None:
        """Close the file."""
        with self._writing_lock, self._reading_lock:
            self._closed = True
            self._reading.close()
            self._writing.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction that may write: all of it is committed, or nothing if the block raises."""
        with self._writing_lock, self._explained():
            self._writing.execute("BEGIN IMMEDIATE")
            try:
                yield self._writing
                self._writing.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # some errors end the transaction themselves
                    self._writing.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A transaction that only reads. It waits for no writer: it sees what was last committed."""
        with self._reading_lock, self._explained():
            self._reading.execute("BEGIN")
            try:
                yield self._reading
            finally:
                with contextlib.suppress(sqlite3.Error):
                    self._reading.execute("ROLLBACK")

    def damaged(self, reason: object) -> StoreDamaged:
        """The error for a value that no version of the code writes."""
        return StoreDamaged(f"{self.path} is damaged ({reason}). Restore it from a backup")

    def _connect(self) -> sqlite3.Connection:
        """A connection, which one thread at a time uses."""
        connection = sqlite3.connect(
            self.path, timeout=OPENING * self._patience, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    def _use_log(self, connection: sqlite3.Connection) -> None:
        """Turn on the write-ahead log. Of processes that do so at the same time, all but one must try again."""
        until, mode = time.monotonic() + OPENING * self._patience, ""
        while mode != "wal":
            try:
                ((mode,),) = connection.execute("PRAGMA journal_mode = WAL").fetchall()
            except sqlite3.OperationalError as error:
                if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(0.02)
                continue
            if mode != "wal":
                raise StoreDown(f"{self.path} cannot have a write-ahead log (mode {mode}): put it on a local disk")

    def _prepare(self) -> None:
        """Make the tables of a new ledger, or check an old one."""
        with self.transaction() as ledger:
            ((application,),) = ledger.execute("PRAGMA application_id")
            ((schema,),) = ledger.execute("PRAGMA user_version")
            if not (application or schema or ledger.execute("SELECT 1 FROM sqlite_master").fetchall()):
                self._check_new()
                for table in TABLES:
                    ledger.execute(table)
                ledger.execute(f"PRAGMA application_id = {APPLICATION}")
                ledger.execute(f"PRAGMA user_version = {SCHEMA}")
                return
        if application != APPLICATION:
            raise StoreDamaged(f"{self.path} is an SQLite database, but not a ledger of tribe, or it is damaged")
        if schema != SCHEMA:
            raise StoreDamaged(f"{self.path} has schema {schema}; this version reads {SCHEMA}: upgrade tribe")
        with self.reading() as ledger:
            if (found := ledger.execute("PRAGMA quick_check(1)").fetchall()) != [("ok",)]:
                raise self.damaged(found[0][0])

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of SQLite into errors of a store."""
        if self._closed:
            raise StoreDown(f"the ledger {self.path} is closed")
        if os.getpid() != self._process:
            raise StoreDown(f"the ledger {self.path} was opened by another process: open it after the fork")
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the message of an error may quote a damaged file
            if reason := CANNOT.get(_code(error)):
                raise StoreDown(f"the ledger {self.path}: {reason} (SQLite: {error})") from error
            raise self.damaged(error) from error


def _code(error: Exception) -> int:
    """The primary code of an error; 255 for an error of Python's own, such as text that is not UTF-8."""
    return int(getattr(error, "sqlite_errorcode", -1)) & 0xFF
