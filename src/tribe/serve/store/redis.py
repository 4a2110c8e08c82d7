"""A store in a Redis server, for workers on several hosts. It needs the extra ``redis``.

    tribe:stream:NAME       a hash: who owns the stream, and the clocks, requests and digests of its last two states
    tribe:blob:NAME:CHUNK   the states, in parts, because a value of Redis has at most 512 MB
    tribe:streams           the names of all streams, sorted

A write first sends the blob, which expires after an hour, and then runs a script that checks the generation, names the
blob and keeps it. A worker that dies in between leaves a blob that Redis removes by itself. The clock of leases is that
of the server.

What is promised is what one Redis server promises. It must keep its keys (``maxmemory-policy noeviction``) and write
them to its disk (``appendonly yes``; with ``appendfsync everysec`` a power failure loses up to a second). If a replica
takes over, claims and states that it had not received are lost, but still no two owners write to one stream: a claim
that the replica does not know is fenced. Redis Cluster is not supported: a script there reaches one shard only.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from tribe.serve.store import redis_scripts as scripts
from tribe.serve.store.blobs import new_name
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
from tribe.serve.store.records import CURRENT, PREVIOUS, Record, check_blob, new_record, read_state, stored

SCHEMES = ("redis://", "rediss://", "unix://")
SCHEMA = 1  # of the keys and fields
CHUNK = 64 * 2**20  # bytes of a part of a blob
UPLOAD_SECONDS = 3600  # after which a blob is removed that no stream names
TIMEOUT = 10.0  # seconds to wait for the server
CANNOT = {  # the package's name of an error, and what it means
    "OutOfMemoryError": "it has no memory left. Raise its maxmemory or delete streams",
    "ReadOnlyError": "it is a replica. Give the address of the primary server",
    "BusyLoadingError": "it is still loading its data. Try again",
    "AuthenticationError": "it refuses the password, or needs one. Give it as in redis://USER:PASSWORD@HOST:PORT",
    "NoPermissionError": "its access list forbids the command",
    "ConnectionError": "it cannot be reached. Start the server, or check the address and the network",
    "TimeoutError": "it does not answer. Check the server and the network",
    "RedisError": "it refuses a command",
}
DISK = "MISCONF"  # how the answer of a server begins that cannot write to its disk


class RedisStore:
    """A `tribe.serve.store.protocol.Store` in a Redis server.

    Args:
        address: as in ``redis://localhost:6379/0`` or ``unix:///run/redis.sock``.
        prefix: with which all keys begin.
        now: the store's clock in seconds; None: the server's.
        timeout: how many seconds to wait for the server.
    """

    def __init__(
        self,
        address: str,
        *,
        prefix: str = "tribe:",
        now: Callable[[], float] | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self._redis, self._now, self._prefix, self._closed = _library(), now, prefix, False
        self.place = _without_password(address)
        retry = importlib.import_module("redis.retry").Retry(importlib.import_module("redis.backoff").NoBackoff(), 1)
        try:
            self._client = self._redis.Redis.from_url(
                address, socket_timeout=timeout, socket_connect_timeout=timeout, retry=retry
            )
        except ValueError as error:
            raise ValueError(f"{self.place} is not the address of a Redis server: {error}") from error
        names = ("CLAIM", "RENEW", "RELEASE", "COMMIT", "DELETE")
        self._scripts = {name: self._client.register_script(getattr(scripts, name)) for name in names}
        self._all = f"{prefix}streams"
        self._prepare()

    # -- claims --------------------------------------------------------------------------------------------------------

    def claim(self, stream: str, owner: str, lease: float) -> Claim | None:
        """Claim a stream; None if another owner's lease is live. See `tribe.serve.store.protocol.Store.claim`."""
        check_name(stream)
        check_name(owner, "an owner's name")
        values = stream, owner, repr(check_lease(lease)), self._time()
        found = self._run("CLAIM", [self._stream(stream), self._all], *values)
        return None if found is None else Claim(stream, owner, int(found[0]), float(found[1]))

    def renew(self, claims: Sequence[Claim], lease: float) -> dict[str, Claim]:
        """Renew claims, and return those still held. See `tribe.serve.store.protocol.Store.renew`."""
        check_lease(lease)
        holders = (value for claim in claims for value in (claim.owner, claim.generation))
        keys = [self._stream(claim.stream) for claim in claims]
        expires, held = self._run("RENEW", keys, repr(float(lease)), self._time(), *holders)
        return {claims[i - 1].stream: claims[i - 1]._replace(expires=float(expires)) for i in held}

    def release(self, claim: Claim) -> None:
        """End a claim. See `tribe.serve.store.protocol.Store.release`."""
        self._run("RELEASE", [self._stream(claim.stream)], claim.owner, claim.generation)

    # -- states --------------------------------------------------------------------------------------------------------

    def write(self, claim: Claim, blob: bytes, *, clock: int, requests: Sequence[str], meta: Mapping[str, Any]) -> None:
        """Replace the stream's state. See `tribe.serve.store.protocol.Store.write`."""
        self._commit(claim, self._upload(claim, blob, clock=clock, requests=requests, meta=meta))

    def write_many(self, writes: Sequence[Write]) -> dict[str, Fenced | ValueError]:
        """Write the states of several streams. See `tribe.serve.store.protocol.Store.write_many`."""
        check_distinct(writes)
        refused = dict[str, Fenced | ValueError]()
        for claim, blob, clock, requests, meta in writes:
            try:
                self.write(claim, blob, clock=clock, requests=requests, meta=meta)
            except (Fenced, ValueError) as error:
                refused[claim.stream] = error
        return refused

    def _upload(
        self, claim: Claim, blob: bytes, *, clock: int, requests: Sequence[str], meta: Mapping[str, Any]
    ) -> Record:
        """Send the blob, which no stream names yet."""
        check_blob(blob)
        name = new_name(claim.stream, claim.generation, clock)
        record = new_record(claim, blob, clock=clock, requests=requests, meta=meta, name=name, written=0.0)
        fields = ("owner", "generation", "current:generation", "current:clock")
        with self._explained():
            owner, generation, *before = self._client.hmget(self._stream(claim.stream), fields)
        if (owner, generation) != (claim.owner.encode(), b"%d" % claim.generation):
            raise fenced(claim, *_holder(owner, generation))
        check_same_state(claim, (int(before[0]), int(before[1])) if before[0] else None, record.clock)
        view = memoryview(blob)
        try:
            with self._explained():
                for i, key in enumerate(self._chunks(record)):
                    self._client.set(key, view[i * CHUNK : (i + 1) * CHUNK], ex=UPLOAD_SECONDS)
        except StoreDown:
            self._remove(record)
            raise
        return record

    def _commit(self, claim: Claim, record: Record) -> None:
        """Name a blob, if the claim is still current, and remove the blob that is no longer needed."""
        keys = [self._stream(claim.stream), *self._chunks(record)]
        values = claim.owner, claim.generation, record.clock, record.blob, self._time(), self._blob("")
        fields = {**record._asdict(), "chunks": len(keys) - 1}
        found = self._run("COMMIT", keys, *values, *(part for item in fields.items() for part in item))
        if found[0] == b"written":
            return
        self._remove(record)
        if found[0] == b"clock":
            check_same_state(claim, (claim.generation, int(found[1])), record.clock)
        if found[0] == b"gone":
            raise StoreDown(f"the write of stream {claim.stream!r} took over {UPLOAD_SECONDS} s: write again")
        raise fenced(claim, *_holder(*found[1:]))

    def _remove(self, record: Record) -> None:
        """Remove a blob that no stream names. If that fails, the server removes it later."""
        with contextlib.suppress(StoreDown), self._explained():
            self._client.unlink(*self._chunks(record))

    def read(self, stream: str, *, previous: bool = False) -> Stored | None:
        """Read the last state of a stream. See `tribe.serve.store.protocol.Store.read`."""
        check_name(stream)
        return read_state(stream, PREVIOUS if previous else CURRENT, self._record, self._verified)

    def entry(self, stream: str) -> Entry | None:
        """What the server says of a stream. See `tribe.serve.store.protocol.Store.entry`."""
        found = self._entries([check_name(stream)])
        return found[0] if found else None

    def list(self, prefix: str = "", limit: int = PAGE, after: str | None = None) -> Entries:
        """The entries of streams by prefix. See `tribe.serve.store.protocol.Store.list`."""
        check_page(prefix, limit, after)
        least = f"({after}" if after is not None and after >= prefix else f"[{prefix}"
        with self._explained():
            most = b"(" + prefix.encode() + b"\xff"  # a byte after all those of UTF-8
            names = self._client.zrangebylex(self._all, least.encode(), most, start=0, num=int(limit))
        return self._entries([name.decode() for name in names])

    def delete(self, claim: Claim) -> None:
        """Delete a stream's states and keep its generation. See `tribe.serve.store.protocol.Store.delete`."""
        values = claim.owner, claim.generation, claim.stream, self._blob("")
        found = self._run("DELETE", [self._stream(claim.stream), self._all], *values)
        if found[0] != b"deleted":
            raise fenced(claim, *_holder(*found[1:]))

    def close(self) -> None:
        """Close the connections. Claims are not released."""
        self._closed = True
        self._client.close()

    # -- keys and values -----------------------------------------------------------------------------------------------

    def _stream(self, stream: str) -> str:
        return f"{self._prefix}stream:{stream}"

    def _blob(self, name: str) -> str:
        return f"{self._prefix}blob:{name}"

    def _chunks(self, record: Record) -> Sequence[str]:
        """The keys of a blob's parts; an empty blob has one, too."""
        return [f"{self._blob(record.blob)}:{i + 1}" for i in range(max(1, -(-record.bytes // CHUNK)))]

    def _time(self) -> str:
        """The time for a script; an empty one means the server's."""
        return "" if self._now is None else repr(float(self._now()))

    def _record(self, stream: str, place: str) -> Record | None:
        with self._explained():
            found = self._client.hmget(self._stream(stream), [f"{place}:{field}" for field in scripts.FIELDS])
        if found[0] is None:
            return None
        try:
            generation, clock, requests, meta, blob, size, digest, written = (value.decode() for value in found)
            return Record(int(generation), int(clock), requests, meta, blob, int(size), digest, float(written))
        except (AttributeError, ValueError) as error:
            raise self._damaged(stream, error) from error

    def _verified(self, stream: str, record: Record) -> Stored:
        """The state of a record, if its blob is what was written."""
        with self._explained():
            chunks = [self._client.get(key) for key in self._chunks(record)]
        if any(chunk is None for chunk in chunks):
            raise StoreDamaged(f"the state of stream {stream!r} in {self.place} is damaged: a part of it is missing")
        return stored(stream, record, b"".join(chunks), f"the state of stream {stream!r} in {self.place}")

    def _entries(self, streams: Sequence[str]) -> Entries:
        fields = ("owner", "generation", "expires", "current:clock", "current:bytes", "current:written")
        with self._explained():
            pipeline = self._client.pipeline(transaction=False)
            pipeline.time()
            for stream in streams:
                pipeline.hmget(self._stream(stream), fields)
            (seconds, micros), *rows = pipeline.execute()
        now = seconds + micros / 1e6 if self._now is None else self._now()
        found = []
        for stream, (owner, generation, expires, clock, size, written) in zip(streams, rows, strict=True):
            if expires is not None:
                who, number = _holder(owner, generation)
                ends = float(expires) if who is not None else 0.0
                when = None if written is None else float(written)
                state = int(clock or 0), int(size or 0), when
                found.append(Entry(stream, who, number or 0, ends, now < ends, *state))
        return found

    # -- the server ----------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Check that the server answers, that its data is of this version, and that it keeps what it is given."""
        with self._explained():
            self._client.set(f"{self._prefix}schema", SCHEMA, nx=True)
            schema = self._client.get(f"{self._prefix}schema")
        if schema != b"%d" % SCHEMA:
            raise StoreDamaged(
                f"{self.place} has schema {schema[:20]!r}; this version of tribe reads {SCHEMA}: upgrade tribe"
            )
        unsaid = contextlib.suppress(self._redis.exceptions.ResponseError)
        with self._explained(), unsaid:  # a hosted server may not say
            memory = self._client.info("memory")
            if memory.get("maxmemory") and str(memory.get("maxmemory_policy")).startswith("allkeys"):
                raise StoreDown(
                    f"{self.place} removes keys when its memory is full (maxmemory-policy "
                    f"{memory['maxmemory_policy']}), so states would be lost: set maxmemory-policy noeviction"
                )

    def _run(self, name: str, keys: Sequence[str], *values: Any) -> Any:
        with self._explained():
            return self._scripts[name](keys=keys, args=values)

    def _damaged(self, what: str, reason: object) -> StoreDamaged:
        return StoreDamaged(f"{what!r} in {self.place} is damaged ({reason}). Restore the server's data from a backup")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of Redis into errors of a store."""
        if self._closed:
            raise StoreDown(f"the store {self.place} is closed")
        try:
            yield
        except self._redis.exceptions.RedisError as error:
            text, kinds = str(error), (cls.__name__ for cls in type(error).__mro__)
            if "WRONGTYPE" in text:
                raise self._damaged("a key", text) from error
            reason = next(CANNOT[kind] for kind in kinds if kind in CANNOT)
            reason = "it cannot write to its disk. Check the disk of the server" if DISK in text else reason
            raise StoreDown(f"the Redis server {self.place}: {reason} ({type(error).__name__}: {text})") from error


def _holder(owner: bytes | None, generation: bytes | None) -> tuple[str | None, int | None]:
    """The owner and generation of a stream as the server gives them."""
    return None if owner is None else owner.decode(), None if generation is None else int(generation)


def _without_password(address: str) -> str:
    """An address as errors show it."""
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _library() -> Any:
    try:
        return importlib.import_module("redis")
    except ImportError as error:
        raise ImportError(
            f"a store in Redis needs redis, which cannot be imported here ({error}): {INSTALL}"
        ) from error


INSTALL = "pip install 'tribe-tta[redis]'"
