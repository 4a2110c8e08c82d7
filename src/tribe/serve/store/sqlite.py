"""A store in a folder of one host: a ledger in SQLite, and a file for each state.

    ledger.sqlite   who owns each stream, and the names, clocks, requests and digests of its last two states
    blobs/          the states, see `tribe.serve.store.blobs`

Any number of processes of the host may use the folder at the same time. It must be on a local disk: SQLite's
write-ahead log needs memory that its processes share.

A write first puts the blob on the disk, and then names it in the ledger, in a transaction that checks the generation. A
process that is killed in between leaves a file that nobody names. A new claim of the stream removes it; so does opening
the store. A blob is removed only after the ledger on the disk has ceased to name it, so that not even a power failure
leaves a name without its file.
"""

import contextlib
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from tribe.io.files import NotRegular
from tribe.serve.store.blobs import Blobs, new_name, stream_hash
from tribe.serve.store.ledger import Ledger
from tribe.serve.store.protocol import (
    PAGE,
    Claim,
    Entries,
    Entry,
    Fenced,
    Stored,
    StoreDamaged,
    StoreDown,
    Write,
    check_distinct,
    check_lease,
    check_name,
    check_page,
    check_same_state,
    fenced,
)
from tribe.serve.store.records import (
    CURRENT,
    PREVIOUS,
    Record,
    check_blob,
    check_record,
    new_record,
    read_state,
    stored,
)

LEDGER, BLOBS = "ledger.sqlite", "blobs"
PATIENCE = 5.0  # seconds to wait for the transaction of another process
RECORD = ", ".join(Record._fields)
ENTRIES = (
    "SELECT s.stream, s.owner, s.generation, s.expires, t.clock, t.bytes, t.written FROM streams s "
    f"LEFT JOIN states t ON t.stream = s.stream AND t.place = '{CURRENT}' WHERE NOT s.deleted AND "
)
LAST_CHARACTER = "\U0010ffff"  # after every character that a name may have


class SqliteStore:
    """A `tribe.serve.store.protocol.Store` in a folder, which is made if it is missing.

    Args:
        folder: on a local disk.
        now: the store's clock in seconds, the same for all processes.
        patience: how many seconds to wait for the transaction of another process.
    """

    def __init__(
        self, folder: str | PathLike[str], *, now: Callable[[], float] = time.time, patience: float = PATIENCE
    ) -> None:
        self.folder, self._now = Path(folder), now
        self._blobs = Blobs(self.folder / BLOBS)
        try:
            self._blobs.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreDown(f"the store {self.folder} cannot be made: {error.strerror}") from error
        self._ledger = Ledger(self.folder / LEDGER, patience, self._check_no_blobs)
        self._sweep()

    def _check_no_blobs(self) -> None:
        if self._blobs.any():
            raise StoreDamaged(
                f"{self._blobs.folder} holds states, but {self.folder / LEDGER} is empty: restore the ledger from a "
                f"backup, or move the states away to start anew"
            )

    def _sweep(self) -> None:
        """Remove what killed writers left."""
        with self._ledger.reading() as ledger:
            rows = ledger.execute("SELECT stream, generation FROM streams").fetchall()
            named = {name for (name,) in ledger.execute("SELECT blob FROM states")}
        self._blobs.sweep({stream_hash(stream): generation for stream, generation in rows}, named)

    # -- claims --------------------------------------------------------------------------------------------------------

    def claim(self, stream: str, owner: str, lease: float) -> Claim | None:
        """Claim a stream; None if another owner's lease is live. See `tribe.serve.store.protocol.Store.claim`."""
        check_name(stream)
        check_name(owner, "an owner's name")
        check_lease(lease)
        with self._ledger.transaction() as ledger:
            now = self._now()
            holder, generation, expires = self._holder(ledger, stream) or (None, 0, 0.0)
            live = holder is not None and now < expires
            if live and holder != owner:
                return None
            claim = Claim(stream, owner, generation if live else generation + 1, now + lease)
            ledger.execute(
                "INSERT INTO streams VALUES (?, ?, ?, ?, 0) ON CONFLICT (stream) DO UPDATE SET owner = excluded.owner, "
                "generation = excluded.generation, expires = excluded.expires, deleted = 0",
                claim,
            )
            named = self._named(ledger, stream)
        if not live and generation:
            self._blobs.sweep({stream_hash(stream): claim.generation}, named)
        return claim

    def renew(self, claims: Sequence[Claim], lease: float) -> dict[str, Claim]:
        """Renew claims, and return those still held. See `tribe.serve.store.protocol.Store.renew`."""
        check_lease(lease)
        with self._ledger.transaction() as ledger:
            expires = self._now() + lease
            held = {
                claim.stream: claim._replace(expires=expires) for claim in claims if self._is_current(ledger, claim)
            }
            ledger.executemany(
                "UPDATE streams SET expires = ? WHERE stream = ?", [(expires, stream) for stream in held]
            )
        return held

    def release(self, claim: Claim) -> None:
        """End a claim. See `tribe.serve.store.protocol.Store.release`."""
        with self._ledger.transaction() as ledger:
            if self._is_current(ledger, claim):
                ledger.execute("UPDATE streams SET owner = NULL, expires = 0 WHERE stream = ?", (claim.stream,))

    # -- states --------------------------------------------------------------------------------------------------------

    def write(self, claim: Claim, blob: bytes, *, clock: int, requests: Sequence[str], meta: Mapping[str, Any]) -> None:
        """Replace the stream's state. See `tribe.serve.store.protocol.Store.write`."""
        self._commit(claim, self._upload(claim, blob, clock=clock, requests=requests, meta=meta))

    def write_many(self, writes: Sequence[Write]) -> dict[str, Fenced | ValueError]:
        """Write the states of several streams. See `tribe.serve.store.protocol.Store.write_many`."""
        check_distinct(writes)
        records, refused = dict[str, tuple[Claim, Record]](), dict[str, Fenced | ValueError]()
        for write in writes:
            try:
                records[write.claim.stream] = write.claim, self._new_record(*write)
            except (Fenced, ValueError) as error:
                refused[write.claim.stream] = error
        blobs = {write.claim.stream: write.blob for write in writes}
        try:
            self._blobs.write_many({record.blob: blobs[stream] for stream, (_, record) in records.items()})
            refused |= self._name(records)
        except Exception as error:
            for stream, (_, record) in records.items():
                self._remove_unless_named(stream, record.blob)
            if isinstance(error, OSError) and not isinstance(error, StoreDown):
                raise StoreDown(f"the states of {len(records)} streams were not stored: {error}") from error
            raise
        return refused

    def _new_record(
        self, claim: Claim, blob: bytes, clock: int, requests: Sequence[str], meta: Mapping[str, Any]
    ) -> Record:
        """The record of a state that is about to be written, if it may be."""
        check_blob(blob)
        name = new_name(claim.stream, claim.generation, clock)
        record = new_record(claim, blob, clock=clock, requests=requests, meta=meta, name=name, written=self._now())
        with self._ledger.reading() as ledger:
            self._check_write(ledger, claim, record)
        return record

    def _upload(
        self, claim: Claim, blob: bytes, *, clock: int, requests: Sequence[str], meta: Mapping[str, Any]
    ) -> Record:
        """Write the blob, which the ledger does not name yet."""
        record = self._new_record(claim, blob, clock, requests, meta)
        try:
            self._blobs.write(record.blob, blob)
        except OSError as error:
            with self._ledger.reading() as ledger:
                self._check_write(ledger, claim, record)  # the next owner removes temporary files of this generation
            raise StoreDown(f"the state of stream {claim.stream!r} was not stored: {error}") from error
        return record

    def _commit(self, claim: Claim, record: Record) -> None:
        """Name a blob in the ledger, if the claim is still current, and remove the blob that is no longer needed."""
        try:
            refused = self._name({claim.stream: (claim, record)})
        except Exception:
            self._remove_unless_named(claim.stream, record.blob)
            raise
        for error in refused.values():
            raise error

    def _name(self, records: Mapping[str, tuple[Claim, Record]]) -> dict[str, Fenced | ValueError]:
        """Name blobs in the ledger and remove those that are no longer needed; return what is refused, by stream."""
        unnamed, refused = set[str](), dict[str, Fenced | ValueError]()
        with self._ledger.transaction() as ledger:
            for stream, (claim, record) in records.items():
                try:
                    self._check_write(ledger, claim, record)
                except (Fenced, ValueError) as error:
                    refused[stream] = error
                    unnamed.add(record.blob)
                    continue
                unnamed |= self._named(ledger, stream)
                row = (stream, CURRENT, *record)
                ledger.execute("DELETE FROM states WHERE stream = ? AND place = ?", (stream, PREVIOUS))
                ledger.execute("UPDATE states SET place = ? WHERE stream = ?", (PREVIOUS, stream))
                ledger.execute(f"INSERT INTO states VALUES ({', '.join('?' * len(row))})", row)
                unnamed -= self._named(ledger, stream)
        self._blobs.remove(unnamed)
        return refused

    def _remove_unless_named(self, stream: str, blob: str) -> None:
        """Remove a blob after an error, unless its commit reached the disk all the same, or that cannot be read."""
        with contextlib.suppress(OSError, ValueError), self._ledger.reading() as ledger:
            if blob not in self._named(ledger, stream):
                self._blobs.remove([blob])

    def read(self, stream: str, *, previous: bool = False) -> Stored | None:
        """Read the last state of a stream. See `tribe.serve.store.protocol.Store.read`."""
        check_name(stream)
        return read_state(stream, PREVIOUS if previous else CURRENT, self._record, self._verified)

    def entry(self, stream: str) -> Entry | None:
        """What the ledger says of a stream. See `tribe.serve.store.protocol.Store.entry`."""
        check_name(stream)
        found = self._entries("s.stream = ?", stream)
        return found[0] if found else None

    def list(self, prefix: str = "", limit: int = PAGE, after: str | None = None) -> Entries:
        """The entries of streams by prefix. See `tribe.serve.store.protocol.Store.list`."""
        check_page(prefix, limit, after)
        where = "s.stream >= ? AND s.stream < ? AND s.stream > ? ORDER BY s.stream LIMIT ?"
        return self._entries(where, prefix, prefix + LAST_CHARACTER, after or "", int(limit))

    def delete(self, claim: Claim) -> None:
        """Delete a stream's states and keep its generation. See `tribe.serve.store.protocol.Store.delete`."""
        with self._ledger.transaction() as ledger:
            if self._is_deleted(ledger, claim):
                return
            self._check_current(ledger, claim)
            unnamed = self._named(ledger, claim.stream)
            ledger.execute("DELETE FROM states WHERE stream = ?", (claim.stream,))
            ledger.execute(
                "UPDATE streams SET owner = NULL, expires = 0, deleted = 1 WHERE stream = ?", (claim.stream,)
            )
        self._blobs.remove(unnamed)

    def close(self) -> None:
        """Close the ledger. Claims are not released."""
        self._ledger.close()

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _holder(self, ledger: sqlite3.Connection, stream: str) -> tuple[str | None, int, float] | None:
        """The owner (None: released), generation and end of the lease of a stream; None if it was never claimed."""
        rows = ledger.execute("SELECT owner, generation, expires FROM streams WHERE stream = ?", (stream,)).fetchall()
        return self._checked_holder(*rows[0]) if rows else None

    def _checked_holder(self, owner: Any, generation: Any, expires: Any) -> tuple[str | None, int, float]:
        if (owner is None or isinstance(owner, str)) and type(generation) is int and isinstance(expires, float | int):
            return owner, generation, float(expires)
        raise self._ledger.damaged("a value is not of its type")

    def _is_current(self, ledger: sqlite3.Connection, claim: Claim) -> bool:
        owner, generation, _ = self._holder(ledger, claim.stream) or (None, None, None)
        return (owner, generation) == (claim.owner, claim.generation)

    def _is_deleted(self, ledger: sqlite3.Connection, claim: Claim) -> bool:
        """Whether the stream was deleted with this claim, or its generation."""
        where = "stream = ? AND generation = ? AND deleted"
        return bool(ledger.execute(f"SELECT 1 FROM streams WHERE {where}", (claim.stream, claim.generation)).fetchall())

    def _check_current(self, ledger: sqlite3.Connection, claim: Claim) -> None:
        if not self._is_current(ledger, claim):
            owner, generation, _ = self._holder(ledger, claim.stream) or (None, None, None)
            raise fenced(claim, owner, generation)

    def _check_write(self, ledger: sqlite3.Connection, claim: Claim, record: Record) -> None:
        """Refuse a write of an old generation, or with a clock that falls."""
        self._check_current(ledger, claim)
        rows = ledger.execute(
            "SELECT generation, clock FROM states WHERE stream = ? AND place = ?", (claim.stream, CURRENT)
        ).fetchall()
        check_same_state(claim, rows[0] if rows else None, record.clock)

    def _named(self, ledger: sqlite3.Connection, stream: str) -> set[str]:
        """The names of a stream's blobs."""
        return {name for (name,) in ledger.execute("SELECT blob FROM states WHERE stream = ?", (stream,))}

    def _record(self, stream: str, place: str) -> Record | None:
        with self._ledger.reading() as ledger:
            rows = ledger.execute(
                f"SELECT {RECORD} FROM states WHERE stream = ? AND place = ?", (stream, place)
            ).fetchall()
        return check_record(Record(*rows[0]), str(self._ledger.path)) if rows else None

    def _verified(self, stream: str, record: Record) -> Stored:
        """The state of a record, if its blob is what was written."""
        try:
            path = self._blobs.path(record.blob)
        except ValueError as error:
            raise self._ledger.damaged(error) from error
        try:
            blob = self._blobs.read(record.blob, record.bytes)
        except (FileNotFoundError, NotRegular) as error:
            raise StoreDamaged(f"the state of stream {stream!r} is damaged: {path}: {error.strerror}") from error
        except OSError as error:
            raise StoreDown(f"the state of stream {stream!r} cannot be read: {path}: {error.strerror}") from error
        return stored(stream, record, blob, f"the state of stream {stream!r} in {path}")

    def _entries(self, where: str, *values: str | int) -> Entries:
        with self._ledger.reading() as ledger:
            rows, now = ledger.execute(ENTRIES + where, values).fetchall(), self._now()
        found = []
        for stream, *holder, clock, size, written in rows:
            owner, generation, expires = self._checked_holder(*holder)
            held = owner is not None and now < expires
            found.append(Entry(stream, owner, generation, expires, held, clock or 0, size or 0, written))
        return found
