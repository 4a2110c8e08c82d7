"""A store in a folder of one host: a ledger in SQLite, and a file for each state.

    ledger.sqlite   who owns each stream, and the names, clocks and requests of its last two states
    blobs/          the states; a file is never changed, and is removed when the ledger no longer names it

Any number of processes of the host may use the folder at the same time. It must be on a local disk: SQLite's
write-ahead log needs memory that its processes share.

A write first puts the blob on the disk, and then names it in the ledger, in a transaction that checks the generation. A
process that is killed in between leaves a file without a name, which the next claim of the stream or opening the store
removes. A state that was committed and that the ledger does not explain is an error when the store is opened: the
ledger has lost transactions. A blob is removed only after the ledger on the disk has ceased to name it, so that not
even a power failure leaves a name without its file. For that, commits are synced (``synchronous=FULL``).
"""

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path

from tribe.fields import require
from tribe.io.files import write_new
from tribe.serve import store
from tribe.serve.store import Claim, StateRecord, StoreDamaged, StoreDown, StreamStore, Write
from tribe.serve.store.blobs import BlobFile, Blobs, KnownStream, refuse_link

LEDGER = "ledger.sqlite"
LOST = ("refuse", "adopt", "set-aside")  # what to do with states that the ledger does not explain
PATIENCE = 5.0  # seconds to wait for the transaction of another process
OPENING = 6  # times the patience to open a ledger: when many processes start at once, each waits for all others
APPLICATION, SCHEMA = 0x54524942, 1  # "TRIB" marks the file as ours; SCHEMA is the version of the tables
TABLES = (  # the checks are those of the file's content when it is opened: a damaged one may hold other types
    "CREATE TABLE streams (stream TEXT PRIMARY KEY, owner TEXT, generation INTEGER NOT NULL, expires REAL NOT NULL, "
    "deleted INTEGER NOT NULL, CHECK (typeof(generation) = 'integer' AND typeof(expires) = 'real' "
    "AND typeof(owner) IN ('text', 'null'))) WITHOUT ROWID",
    "CREATE TABLE states (stream TEXT NOT NULL, place TEXT NOT NULL, generation INTEGER NOT NULL, "
    "clock INTEGER NOT NULL, requests TEXT NOT NULL, blob TEXT NOT NULL, bytes INTEGER NOT NULL, "
    "written REAL NOT NULL, PRIMARY KEY (stream, place), CHECK (typeof(generation) = 'integer' "
    "AND typeof(clock) = 'integer' AND typeof(bytes) = 'integer' AND typeof(written) = 'real' "
    "AND typeof(requests) = 'text' AND typeof(blob) = 'text')) WITHOUT ROWID",
)
RECORD = ", ".join(StateRecord._fields)
ENTRIES = (
    "SELECT s.stream, s.owner, s.generation, s.expires, ifnull(t.clock, 0), ifnull(t.bytes, 0), t.written FROM "
    f"streams s LEFT JOIN states t ON t.stream = s.stream AND t.place = '{store.CURRENT}' WHERE NOT s.deleted AND "
)
LAST_CHARACTER = "\U0010ffff"
REASONS = {  # what an error of SQLite means, where it is not damage
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


class SqliteStore(StreamStore):
    """A store in a folder, which is made if it is missing; ``now`` is its clock, the same for all processes.

    ``lost``: what to do with states that the ledger does not explain, because it was damaged: "refuse" to open, "adopt"
    them, so that their streams go on from them, or move them to the folder "set-aside".
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        now: Callable[[], float] = time.time,
        patience: float = PATIENCE,
        lost: str = LOST[0],
    ) -> None:
        require(lost in LOST, f"lost is one of {', '.join(LOST)}", lost)
        self.folder, self._now, self._lost = Path(folder), now, lost
        self._blobs = Blobs(self.folder)
        self._ledger = Ledger(self.folder / LEDGER, patience, self._check_new)
        with contextlib.ExitStack() as stack:
            stack.callback(self._ledger.close)
            self.unexplained = self._sweep()  # how many states were adopted or set aside
            stack.pop_all()

    def _check_new(self) -> None:
        """Raise `StoreDamaged` if there are states, before the tables of a new ledger are made."""
        if self._lost == "refuse" and any(file.committed for file in self._blobs.files()):
            raise self._lost_states(f"{self._blobs.folder} holds states, but {self.folder / LEDGER} is empty")

    def _lost_states(self, words: str) -> StoreDamaged:
        return StoreDamaged(
            f"{words}: it was lost, or its last transactions were, as with a damaged {LEDGER}-wal. Restore the folder "
            f"from a backup; or run `tribe store {self.folder} --adopt`, and streams go on from these states; or "
            f"`tribe store {self.folder} --set-aside`, and they go on from what the ledger has, or start anew"
        )

    def _sweep(self) -> int:
        """Remove what killed writers left, and return how many states the ledger does not explain."""
        files = self._blobs.files()  # before the ledger is read
        with self._ledger.reading() as rows:
            found = rows.execute(
                "SELECT s.stream, s.generation, s.deleted, t.generation, t.clock FROM streams s "
                f"LEFT JOIN states t ON t.stream = s.stream AND t.place = '{store.CURRENT}'"
            )
            known = {
                store.stream_hash(stream): KnownStream(most, None if clock is None else (generation, clock), bool(gone))
                for stream, most, gone, generation, clock in found
            }
            named = {name for (name,) in rows.execute("SELECT blob FROM states")}
        unexplained = self._blobs.sweep(files, known, named)
        if unexplained and self._lost == "refuse":
            some = ", ".join(file.name for file in unexplained[:3])
            words = f"{self._blobs.folder} holds {len(unexplained)} states that {LEDGER} does not explain ({some})"
            raise self._lost_states(words)
        try:
            if unexplained:
                self._blobs.move(unexplained, self._lost)
        except OSError as error:
            raise StoreDown(f"states cannot be moved in {self.folder}: {error}") from error
        return len(unexplained)

    def claim(self, stream: str, owner: str, lease: float) -> Claim | None:
        """Claim a stream; see `StreamStore.claim`."""
        with self._ledger.transaction() as rows:
            now = self._now()
            query = "SELECT owner, generation, expires, deleted FROM streams WHERE stream = ?"
            found = rows.execute(query, (stream,)).fetchone()
            holder, generation, expires, deleted = found or (None, 0, 0.0, 0)
            live = holder is not None and now < expires
            if live and holder != owner:
                return None
            if deleted:  # while the ledger explains what a killed deletion left
                self._sweep_stream(stream)
            adopted = [] if live else self._adoptable(rows, stream)
            generation = max([generation, *(file.order[0] for file in adopted)])
            claim = Claim(stream, owner, generation if live else generation + 1, now + lease)
            rows.execute(
                "INSERT INTO streams VALUES (?, ?, ?, ?, 0) ON CONFLICT (stream) DO UPDATE SET owner = excluded.owner, "
                "generation = excluded.generation, expires = excluded.expires, deleted = 0",
                claim,
            )
            for file in reversed(adopted):
                self._adopt(rows, stream, file)
        if claim.generation > generation > 0:
            self._sweep_stream(stream)
        return claim

    def _adoptable(self, rows: sqlite3.Connection, stream: str) -> list[BlobFile]:
        """Return states that the ledger had lost and that are newer than what it has: at most two, the newest first."""
        waiting = self._blobs.adoptable(store.stream_hash(stream))
        query = "SELECT generation, clock FROM states WHERE stream = ? AND place = ?"
        newest = rows.execute(query, (stream, store.CURRENT)).fetchone() if waiting else None
        return [file for file in waiting if newest is None or file.order > newest][:2]

    def _adopt(self, rows: sqlite3.Connection, stream: str, file: BlobFile) -> None:
        """Make a state that the ledger had lost the current one of its stream."""
        try:
            size = file.path.stat().st_size
            self._blobs.adopt(file)
        except OSError as error:
            raise StoreDown(f"the state of stream {stream!r} cannot be adopted: {file.path}: {error}") from error
        _place(rows, stream, StateRecord(*file.order, "[]", file.name, size, self._now()))

    def _sweep_stream(self, stream: str) -> None:
        """Remove what killed writers of earlier generations left."""
        key = store.stream_hash(stream)
        files = self._blobs.files(key)
        with self._ledger.reading() as rows:
            query = "SELECT generation, deleted FROM streams WHERE stream = ?"
            generation, deleted = rows.execute(query, (stream,)).fetchone()
            query = "SELECT generation, clock FROM states WHERE stream = ? AND place = ?"
            newest = rows.execute(query, (stream, store.CURRENT)).fetchone()
            named = _named(rows, stream)
        self._blobs.sweep(files, {key: KnownStream(generation, newest, bool(deleted))}, named)

    def renew(self, claims: Sequence[Claim], lease: float) -> dict[str, Claim]:
        """Renew claims; see `StreamStore.renew`."""
        with self._ledger.transaction() as rows:
            expires = self._now() + lease
            held = {c.stream: c._replace(expires=expires) for c in claims if self._fence(rows, c) is None}
            rows.executemany("UPDATE streams SET expires = ? WHERE stream = ?", [(expires, stream) for stream in held])
        return held

    def release(self, claim: Claim) -> None:
        """End a claim; see `StreamStore.release`."""
        with self._ledger.transaction() as rows:
            if self._fence(rows, claim) is None:
                rows.execute("UPDATE streams SET owner = NULL, expires = 0 WHERE stream = ?", (claim.stream,))

    def _fence(self, rows: sqlite3.Connection, claim: Claim) -> store.Fenced | None:
        """Return an error if a claim is not the current one."""
        found = rows.execute("SELECT owner, generation FROM streams WHERE stream = ?", (claim.stream,)).fetchone()
        holder = found or (None, None)
        return None if holder == (claim.owner, claim.generation) else store.fenced(claim, *holder)

    def _store_blobs(self, uploads: store.Uploads) -> None:
        files = {self._blobs.new_path(record.blob): write.blob for write, record in uploads.values()}
        try:
            self._blobs.make_folders(record.blob for _, record in uploads.values())
            write_new(files)
        except OSError as error:
            self._remove_unless_named(uploads)
            names = ", ".join(map(repr, list(uploads)[:4]))
            raise StoreDown(f"the states of {len(uploads)} streams ({names}) were not stored: {error}") from error

    def _commit(self, uploads: store.Uploads) -> store.Refusals:
        unnamed, refused = set[str](), store.Refusals()
        try:
            with self._ledger.transaction() as rows:
                for stream, (write, record) in uploads.items():
                    unnamed |= {record.blob} | _named(rows, stream)
                    if (error := self._refusal(rows, write)) is not None:
                        refused[stream] = error
                    else:
                        _place(rows, stream, record._replace(written=self._now()), write.keep)
                    unnamed -= _named(rows, stream)
        except Exception:
            self._remove_unless_named(uploads)
            raise
        self._blobs.publish(record.blob for stream, (_, record) in uploads.items() if stream not in refused)
        self._blobs.remove(unnamed)
        return refused

    def _refusal(self, rows: sqlite3.Connection, write: Write) -> store.Fenced | store.ClockFell | None:
        """Return an error for a write of an old generation, or with a clock that falls."""
        if (error := self._fence(rows, write.claim)) is not None:
            return error
        query = "SELECT clock FROM states WHERE stream = ? AND place = ? AND generation = ?"
        stored = rows.execute(query, (write.claim.stream, store.CURRENT, write.claim.generation)).fetchone()
        return store.clock_fell(write, stored[0]) if stored is not None and write.clock < stored[0] else None

    def _remove_unless_named(self, uploads: store.Uploads) -> None:
        """Remove blobs after an error, except those whose commit reached the disk, or if that cannot be read."""
        with contextlib.suppress(OSError, ValueError), self._ledger.reading() as rows:
            self._blobs.remove(r.blob for stream, (_, r) in uploads.items() if r.blob not in _named(rows, stream))

    def _find(self, stream: str, place: str) -> StateRecord | None:
        with self._ledger.reading() as rows:
            query = f"SELECT {RECORD} FROM states WHERE stream = ? AND place = ?"
            row = rows.execute(query, (stream, place)).fetchone()
        return None if row is None else StateRecord(*row)

    def _fetch(self, stream: str, record: StateRecord) -> bytes:
        path = self._blobs.path(record.blob)
        try:
            return self._blobs.read(record.blob)
        except (FileNotFoundError, IsADirectoryError) as error:
            raise StoreDamaged(f"the state of stream {stream!r} is missing: {path}: {error.strerror}") from error
        except OSError as error:
            raise StoreDown(f"the state of stream {stream!r} cannot be read: {path}: {error.strerror}") from error

    def entry(self, stream: str) -> store.StoreEntry | None:
        """Return the ledger's row of a stream; see `StreamStore.entry`."""
        return next(iter(self._entries("s.stream = ?", stream)), None)

    def list(self, prefix: str = "", limit: int = store.PAGE, after: str = "") -> store.Entries:
        """Return rows of streams; see `StreamStore.list`."""
        where = "s.stream >= ? AND s.stream < ? AND s.stream > ? ORDER BY s.stream LIMIT ?"
        return self._entries(where, prefix, prefix + LAST_CHARACTER, after, limit)

    def count(self, prefix: str = "") -> int:
        """Return how many streams begin so; see `StreamStore.count`."""
        query = "SELECT count(*) FROM streams WHERE stream >= ? AND stream < ? AND NOT deleted"
        with self._ledger.reading() as rows:
            ((count,),) = rows.execute(query, (prefix, prefix + LAST_CHARACTER))
        return int(count)

    def _entries(self, where: str, *values: str | int) -> store.Entries:
        with self._ledger.reading() as rows:
            found, now = rows.execute(ENTRIES + where, values).fetchall(), self._now()
        return [
            store.StoreEntry(stream, owner, generation, expires, owner is not None and now < expires, *state)
            for stream, owner, generation, expires, *state in found
        ]

    def delete(self, claim: Claim) -> None:
        """Delete a stream's states and keep its generation; see `StreamStore.delete`."""
        stream, generation = claim.stream, claim.generation
        with self._ledger.transaction() as rows:
            deleted = "SELECT 1 FROM streams WHERE stream = ? AND generation = ? AND deleted"
            if rows.execute(deleted, (stream, generation)).fetchone():
                return
            if (error := self._fence(rows, claim)) is not None:
                raise error
            unnamed = _named(rows, stream)
            rows.execute("DELETE FROM states WHERE stream = ?", (stream,))
            rows.execute("UPDATE streams SET owner = NULL, expires = 0, deleted = 1 WHERE stream = ?", (stream,))
        self._blobs.remove(unnamed)

    def now(self) -> float:
        """Return the time of the store's clock."""
        return self._now()

    def forget(self, claim: Claim) -> None:
        """Remove the state that is kept beside the last two; see `StreamStore.forget`."""
        with self._ledger.transaction() as rows:
            if self._fence(rows, claim) is not None:
                return
            named = _named(rows, claim.stream)
            _forget(rows, claim.stream)
            unnamed = named - _named(rows, claim.stream)
        self._blobs.remove(unnamed)

    def close(self) -> None:
        """Close the ledger. Claims are not released."""
        self._ledger.close()


def _place(rows: sqlite3.Connection, stream: str, record: StateRecord, keep: str | None = None) -> None:
    """Make a state the current one of a stream, and the current one the one before it; it may also stay elsewhere."""
    row = (stream, store.CURRENT, *record)
    current = "FROM states WHERE stream = ? AND place = ? AND generation < ?"
    earlier = (stream, store.CURRENT, record.generation)  # else it is the same write again
    if keep is not None and rows.execute(f"SELECT 1 {current}", earlier).fetchone():
        _forget(rows, stream)
        kept = "stream, ?, generation, clock, requests, blob, bytes, ?"
        rows.execute(f"INSERT INTO states SELECT {kept} {current}", (keep, record.written, *earlier))
    rows.execute("DELETE FROM states WHERE stream = ? AND place = ?", (stream, store.PREVIOUS))
    now = (store.PREVIOUS, stream, store.CURRENT)
    rows.execute("UPDATE states SET place = ? WHERE stream = ? AND place = ?", now)
    rows.execute(f"INSERT INTO states VALUES ({', '.join('?' * len(row))})", row)


def _forget(rows: sqlite3.Connection, stream: str) -> None:
    """Remove the state that is kept beside the last two."""
    rows.executemany("DELETE FROM states WHERE stream = ? AND place = ?", [(stream, place) for place in store.KEPT])


def _named(rows: sqlite3.Connection, stream: str) -> set[str]:
    """Return the names of a stream's blobs."""
    return {name for (name,) in rows.execute("SELECT blob FROM states WHERE stream = ?", (stream,))}


class Ledger:
    """The SQLite file of a store, which is made if it is missing: its tables, transactions and errors.

    ``check_new`` is called before the tables of a new ledger are made; an error leaves it without tables.
    """

    def __init__(self, path: Path, patience: float, check_new: Callable[[], None]) -> None:
        self.path, self._patience, self._check_new = path, patience, check_new
        self._writing_lock, self._reading_lock = threading.Lock(), threading.Lock()
        self._closed, self._process = False, os.getpid()
        for suffix in ("", "-wal", "-shm", "-journal"):  # SQLite would follow it
            refuse_link(path.with_name(path.name + suffix))
        with self._explained():
            self._writing, self._reading = self._connect(), self._connect()
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self._prepare()
            stack.pop_all()
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
        """Open a transaction that may write: all of it is committed, or nothing if the block raises."""
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
        """Open a transaction that only reads the last commit; it waits for no writer."""
        with self._reading_lock, self._explained():
            self._reading.execute("BEGIN")
            try:
                yield self._reading
            finally:
                with contextlib.suppress(sqlite3.Error):
                    self._reading.execute("ROLLBACK")

    def _connect(self) -> sqlite3.Connection:
        """Return a connection, which one thread at a time uses, with a write-ahead log.

        Of processes that turn on the log at the same time, all but one must try again.
        """
        seconds = OPENING * self._patience
        connection = sqlite3.connect(self.path, timeout=seconds, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA synchronous = FULL")
        until = time.monotonic() + seconds
        while True:
            try:
                ((mode,),) = connection.execute("PRAGMA journal_mode = WAL").fetchall()
                break
            except sqlite3.OperationalError as error:
                if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(0.02)
        if mode != "wal":
            raise StoreDown(f"{self.path} cannot have a write-ahead log (mode {mode}): put it on a local disk")
        return connection

    def _prepare(self) -> None:
        """Make the tables of a new ledger, or check those of an old one."""
        with self.transaction() as rows:
            ((application,),) = rows.execute("PRAGMA application_id")
            ((schema,),) = rows.execute("PRAGMA user_version")
            if not (application or schema or rows.execute("SELECT 1 FROM sqlite_master").fetchall()):
                self._check_new()
                for table in TABLES:
                    rows.execute(table)
                rows.execute(f"PRAGMA application_id = {APPLICATION}")
                rows.execute(f"PRAGMA user_version = {SCHEMA}")
                return
        if (application, schema) != (APPLICATION, SCHEMA):
            raise StoreDamaged(f"{self.path} is an SQLite database, but not a ledger of this version of tribe")
        with self.reading() as rows:
            if (found := rows.execute("PRAGMA quick_check(1)").fetchall()) != [("ok",)]:
                raise StoreDamaged(f"{self.path} is damaged ({found[0][0]}). Restore it from a backup")

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
            if reason := REASONS.get(_code(error)):
                raise StoreDown(f"the ledger {self.path}: {reason} (SQLite: {error})") from error
            raise StoreDamaged(f"{self.path} is damaged ({error}). Restore it from a backup") from error


def _code(error: Exception) -> int:
    """Return the primary code of an error; 255 for an error of Python, such as text that is not UTF-8."""
    return int(getattr(error, "sqlite_errorcode", -1)) & 0xFF
