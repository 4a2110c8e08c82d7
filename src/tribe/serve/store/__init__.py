"""The store of stream states: who owns a stream, and the last state that its owner wrote.

    store = open_store("data")                    # a folder: one host, any number of processes
    store = open_store("redis://localhost:6379")  # a Redis server: several hosts

A worker *claims* a stream before it learns from the stream's images. A claim is a lease: it ends after some seconds
unless the worker renews it. Each new claim raises the stream's *generation* by 1. A *write* goes through only with the
current generation. So a worker that was paused past its lease cannot overwrite the states of the next owner, however
late it wakes up: its write is refused with `Fenced`, and nothing changes.

Two clocks measure a lease. The store's clock decides whether another worker may claim the stream: that of the Redis
server, or the host's wall clock. The owner cannot read it at every step, so it also measures with its own monotonic
clock: it takes the time before it calls `claim` or `renew`, and from ``lease`` seconds after that time it only
predicts, until a renewal succeeds. A wrong clock makes a lease too short or too long; it never makes two owners write,
because the generation decides, not the time.

An owner's name belongs to one start of one process: else a process would get the live claim of its predecessor.
"""

import hashlib
import json
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import NamedTuple

from tribe.fields import require

REDIS = ("redis://", "rediss://", "unix://")  # how the address of a Redis server begins
ADDRESS = re.compile(r"/.*|(\[[0-9a-fA-F:.]+\]|[\w.-]*)(:[0-9]+)?(/[0-9]*)?")  # of a Redis server, without credentials
PAGE = 1000  # entries that `list` returns by default
CURRENT, PREVIOUS = "current", "previous"  # the last two states of a stream that were written
BEFORE = "before"  # the state before the stream moved to another version of the network
UNDONE = "undone"  # the state that the stream had before it went back
KEPT = (BEFORE, UNDONE)  # at most one of them is stored
PLACES = (CURRENT, PREVIOUS, *KEPT)


class Claim(NamedTuple):
    """The right of an owner to write the states of a stream."""

    stream: str
    owner: str  # the worker that holds the claim
    generation: int  # the number of claims of this stream so far, this one included
    expires: float  # when the lease ends, in seconds of the store's clock


class StoreEntry(NamedTuple):
    """A row of the store's ledger: a stream without its state."""

    stream: str
    owner: str | None  # the last owner; None if it has released the stream
    generation: int  # of the last claim
    expires: float  # when the lease ends or has ended, in seconds of the store's clock
    held: bool  # whether the owner's lease is live, by the store's clock
    clock: int  # of the stored state; 0 if there is none
    bytes: int  # size of the stored state; 0 if there is none
    written: float | None  # when the state was written, in seconds of the store's clock; None if there is none


class Write(NamedTuple):
    """A state to be written."""

    claim: Claim  # of the writer
    blob: bytes  # the bytes of a state file
    clock: int  # of the state; within a generation it never falls
    requests: Sequence[str]  # ids of the last requests that the state has learned from
    keep: str | None = None  # one of `KEPT`: a current state of an earlier generation stays there, instead of the last


class KeptState(NamedTuple):
    """A state that stays after a stream has moved to another version, or has gone back."""

    place: str  # one of `KEPT`
    age: float  # seconds since it was kept, by the store's clock


class Stored(NamedTuple):
    """A state as its owner wrote it."""

    generation: int  # of the claim that it was written with
    clock: int
    requests: tuple[str, ...]
    blob: bytes


class StateRecord(NamedTuple):
    """A row of the ledger for one state."""

    generation: int
    clock: int
    requests: str  # a JSON list
    blob: str  # the name of the blob, which is used once
    bytes: int  # size of the blob
    written: float


Entries = list[StoreEntry]  # in a store `list` is a method
Uploads = Mapping[str, tuple[Write, StateRecord]]  # by stream: writes whose blobs are stored, and not yet named
Refusals = dict[str, "Fenced | ClockFell"]  # by stream: why a write was refused


class Fenced(RuntimeError):
    """A write by a worker that does not own the stream: another one has claimed it, or it was released or deleted."""


class ClockFell(ValueError):
    """A write of an earlier clock than the stored state's, within one generation."""


class StoreDown(OSError):
    """The store cannot be reached or written; states that were stored before are unchanged."""


class StoreDamaged(ValueError):
    """The store does not hold what was written: which part, and what to do."""


class StreamStore(ABC):
    """Claims and states of streams, on disk or on a server. All methods may be called from any thread.

    Every method raises `StoreDown` if the store cannot be reached or written. The caller has checked names.
    """

    unexplained = 0  # states that its ledger did not explain when it was opened, and that were moved

    @abstractmethod
    def claim(self, stream: str, owner: str, lease: float) -> Claim | None:
        """Claim a stream for ``lease`` seconds; return None if another owner's lease is live.

        A stream without a live lease gets a new generation: 1 more than the last one. The owner of a live lease gets
        its claim back with the same generation, renewed.
        """

    @abstractmethod
    def renew(self, claims: Sequence[Claim], lease: float) -> dict[str, Claim]:
        """Renew claims, and return those that are still held, by stream; the missing ones are lost.

        A lease that has ended is also renewed if there was no claim since: no other worker has learned.
        """

    @abstractmethod
    def release(self, claim: Claim) -> None:
        """End a claim, so that another owner need not wait for its lease to end. A lost claim changes nothing."""

    def write(self, writes: Sequence[Write]) -> Refusals:
        """Replace the states of different streams, each with its clock and requests at once or not at all.

        When it returns, the states are on the disk, as far as the store's server promises that. The state before each
        is also kept, in case the new one is damaged. If it raises `StoreDown`, some or none of them are stored.

        Returns:
            The writes that were refused, by stream: `Fenced` if the claim is not the stream's current one (a lease
            that has ended does not suffice), `ClockFell` if the clock falls within the generation.
        """
        return self._commit(self._upload(writes))

    def _upload(self, writes: Sequence[Write]) -> Uploads:
        """Store the blobs, which the ledger does not name yet."""
        uploads: dict[str, tuple[Write, StateRecord]] = {}
        for write in writes:
            claim, blob, clock, requests, _ = write
            require(claim.stream not in uploads, "each write is of another stream", claim.stream)
            name = f"{stream_hash(claim.stream)}-{claim.generation}-{clock}-{secrets.token_hex(8)}.state"
            record = StateRecord(claim.generation, clock, json.dumps(list(requests)), name, len(blob), 0.0)
            uploads[claim.stream] = write, record
        self._store_blobs(uploads)
        return uploads

    @abstractmethod
    def _store_blobs(self, uploads: Uploads) -> None: ...

    @abstractmethod
    def _commit(self, uploads: Uploads) -> Refusals:
        """Name the blobs in the ledger where claim and clock allow it, and remove the blobs that have no name."""

    def read(self, stream: str, *, previous: bool = False, place: str | None = None) -> Stored | None:
        """Read the last state of a stream, the one before it, or that at another place; None: there is none.

        Raises:
            StoreDamaged: the state is not there as it was written. Only its size is checked here: the blob is a state
                file, which holds a digest of its content.
        """
        place = place or (PREVIOUS if previous else CURRENT)
        record = self._find(stream, place)
        while record is not None:
            try:
                blob = self._fetch(stream, record)
                if len(blob) != record.bytes:
                    words = f"the state of stream {stream!r} has {len(blob)} bytes; {record.bytes} were written"
                    raise StoreDamaged(words)
                requests = tuple(json.loads(record.requests))
                return Stored(record.generation, record.clock, requests, blob)
            except (TypeError, json.JSONDecodeError) as error:
                words = f"the ids of requests are damaged ({error}). Restore the store from a backup"
                raise StoreDamaged(words) from error
            except StoreDamaged:
                again = self._find(stream, place)
                if again == record:
                    raise
                record = again  # its owner has replaced it, and removed the blob, in the meantime
        return None

    def kept(self, stream: str) -> KeptState | None:
        """Return which state of a stream is kept beside the last two; None: none."""
        for place in KEPT:
            if (record := self._find(stream, place)) is not None:
                return KeptState(place, self.now() - record.written)
        return None

    @abstractmethod
    def now(self) -> float:
        """Return the time of the store's clock."""

    @abstractmethod
    def forget(self, claim: Claim) -> None:
        """Remove the state that is kept beside the last two. A claim that is not current changes nothing."""

    @abstractmethod
    def _find(self, stream: str, place: str) -> StateRecord | None:
        """Return the ledger's record of a state; ``place`` is one of `PLACES`."""

    @abstractmethod
    def _fetch(self, stream: str, record: StateRecord) -> bytes:
        """Return the blob of a record, or raise `StoreDamaged` if it is gone."""

    @abstractmethod
    def entry(self, stream: str) -> StoreEntry | None:
        """Return the ledger's row of a stream; None for one that was never claimed, or was deleted."""

    @abstractmethod
    def list(self, prefix: str = "", limit: int = PAGE, after: str = "") -> Entries:
        """Return at most ``limit`` rows of streams whose names begin with a prefix and come ``after`` one, by name."""

    @abstractmethod
    def count(self, prefix: str = "") -> int:
        """Return how many streams have names that begin with a prefix, without listing them."""

    @abstractmethod
    def delete(self, claim: Claim) -> None:
        """Delete a stream's states, or raise `Fenced` if the claim is not the stream's current one.

        The generation is kept, so that the next claim raises it and old owners stay fenced. To delete a stream twice
        with the same claim has the effect of once.
        """

    @abstractmethod
    def close(self) -> None:
        """Close files and connections. Claims are not released."""


# -- shared by the stores ----------------------------------------------------------------------------------------------


def stream_hash(stream: str) -> str:
    """Return the part of a blob's name that identifies the stream: 128 bits, so two streams never share one."""
    return hashlib.sha256(stream.encode()).hexdigest()[:32]


def clock_fell(write: Write, clock: int) -> ClockFell:
    """Return the error for a write whose clock is before the stored one, ``clock``."""
    stream, generation = write.claim.stream, write.claim.generation
    return ClockFell(
        f"the clock of stream {stream!r} falls from {clock} to {write.clock} within generation {generation}: "
        "release the stream and claim it again to store an earlier state"
    )


def fenced(claim: Claim, owner: str | None, generation: int | None) -> Fenced:
    """Return the error for a claim that is not current.

    ``owner`` and ``generation`` are the stream's; None: it was released, or the store does not have it.
    """
    who = f"stream {claim.stream!r}: {claim.owner!r} wrote with generation {claim.generation}"
    if generation is None:
        return Fenced(f"{who}, but the store does not have the stream: claim it again")
    if generation != claim.generation:
        return Fenced(f"{who}, but the current one is {generation}: claim the stream again before learning")
    if owner is None:
        return Fenced(f"{who}, which was released: claim the stream again before learning")
    return Fenced(f"{who}, which belongs to {owner!r}: an owner's name is used by one process only")


def shown_place(place: str | PathLike[str]) -> str:
    """Return the place of a store as it may be shown: the address of a Redis server without names and passwords.

    >>> shown_place("redis://user:secret@host:6379/0?password=secret"), shown_place("streams")
    ('redis://host:6379/0', 'streams')
    """
    text = os.fspath(place)
    if not text.startswith(REDIS):
        return text
    scheme, _, rest = text.partition("://")
    rest = rest.partition("?")[0].rpartition("@")[2]  # a password may hold any character
    return f"{scheme}://{rest if ADDRESS.fullmatch(rest) else '...'}"


def open_store(place: str | PathLike[str], lost: str = "refuse") -> StreamStore:
    """Open the store at a place: the address of a Redis server, or else a folder, which is made if it is missing.

    ``lost`` says what to do with states that the ledger of a folder does not explain: see `SqliteStore`.
    """
    from tribe.serve.store.redis import RedisStore
    from tribe.serve.store.sqlite import SqliteStore

    return RedisStore(place) if isinstance(place, str) and place.startswith(REDIS) else SqliteStore(place, lost=lost)
