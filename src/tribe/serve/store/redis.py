"""A store in a Redis server, for workers on several hosts. It needs the extra ``redis``.

    tribe:stream:NAME       a hash: who owns the stream, and the clocks and requests of its last two states
    tribe:blob:NAME:CHUNK   the states, in parts, because a value of Redis has at most 512 MB
    tribe:streams           the names of all streams, sorted

A write first sends the blob, which expires after an hour, and then runs a script that checks the generation, names the
blob and makes it permanent. A worker that dies in between leaves a blob that Redis removes by itself. The clock of
leases is that of the server.

The store promises what one Redis server promises. It must not remove keys (``maxmemory-policy noeviction``) and must
write them to its disk (``appendonly yes``; with ``appendfsync everysec`` a power failure loses up to a second). If a
replica takes over, claims and states that it had not received are lost, but still no two owners write to one stream.
Redis Cluster is not supported: a script there reaches one shard only.
"""

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tribe.serve import store
from tribe.serve.store import Claim, StateRecord, StoreDamaged, StoreDown, StreamStore

SCHEMA = 1  # of the keys and fields
CHUNK = 64 * 2**20  # bytes of a part of a blob
UPLOAD_SECONDS = 3600  # after which a blob is removed that no stream names
TIMEOUT = 10.0  # seconds to wait for the server
REASONS = {  # the package's name of an error, and what it means
    "OutOfMemoryError": "it has no memory left. Raise its maxmemory or delete streams",
    "ReadOnlyError": "it is a replica. Give the address of the primary server",
    "BusyLoadingError": "it is still loading its data. Try again",
    "AuthenticationError": "it refuses the password, or needs one. Give it as in redis://USER:PASSWORD@HOST:PORT",
    "NoPermissionError": "its access list forbids the command",
    "ConnectionError": "it cannot be reached. Start the server, or check the address and the network",
    "TimeoutError": "it does not answer. Check the server and the network",
    "RedisError": "it refuses a command",
}
log = logging.getLogger("tribe.serve")
DISK = "MISCONF"  # the first word of an error of a server that cannot write to its disk

# -- scripts -----------------------------------------------------------------------------------------------------------
# The server runs a script as a whole, with no other command in between. A stream is a hash with the fields `owner`
# (missing: released), `generation`, `expires` (missing: deleted), and those of its states, such as `current:clock`.
#
# All scripts may run twice with the same effect as once: a client sends a script again if the connection breaks before
# the answer. A server without memory refuses a script at its first write, if that one needs memory; it does not stop a
# script that has begun to write. So scripts that store something set a field first, and change nothing when memory is
# short. Those that release or delete set none: they work then, too.

FUNCTIONS = """
local function time(given)
  if given ~= '' then return tonumber(given) end
  local now = redis.call('TIME')
  return now[1] + now[2] / 1000000
end

local function is_current(key, owner, generation)
  local held = redis.call('HMGET', key, 'owner', 'generation')
  return held[1] == owner and held[2] == generation
end

local function fenced(key)
  local held = redis.call('HMGET', key, 'owner', 'generation')
  return {'fenced', held[1], held[2]}
end

local function chunks(key, place, blobs)
  local found = redis.call('HMGET', key, place .. ':blob', place .. ':chunks')
  local keys = {}
  for i = 1, tonumber(found[2] or '0') do keys[i] = blobs .. found[1] .. ':' .. i end
  return keys
end

local function named(key, blobs)
  local found = {}
  for _, place in ipairs({'current', 'previous', 'before', 'undone'}) do
    for _, chunk in ipairs(chunks(key, place, blobs)) do found[chunk] = true end
  end
  return found
end

local function remove(old, new)
  for key in pairs(old) do
    if not new[key] then redis.call('UNLINK', key) end
  end
end

local function forget(key)
  for _, field in ipairs(redis.call('HKEYS', key)) do
    if field:sub(1, 7) == 'before:' or field:sub(1, 7) == 'undone:' then redis.call('HDEL', key, field) end
  end
end
"""
SCRIPTS = {
    # KEYS: the stream, all streams. ARGV: name, owner, lease, now
    "claim": """
local now = time(ARGV[4])
local held = redis.call('HMGET', KEYS[1], 'owner', 'generation', 'expires')
local generation = tonumber(held[2] or '0')
if not (held[1] and now < tonumber(held[3])) then
  generation = generation + 1
elseif held[1] ~= ARGV[2] then
  return false
end
local expires = string.format('%.6f', now + tonumber(ARGV[3]))
generation = string.format('%.0f', generation)
redis.call('HSET', KEYS[1], 'owner', ARGV[2], 'generation', generation, 'expires', expires)
redis.call('ZADD', KEYS[2], 0, ARGV[1])
return {generation, expires}
""",
    # KEYS: streams. ARGV: lease, now, and for each stream its owner and generation
    "renew": """
local expires = string.format('%.6f', time(ARGV[2]) + tonumber(ARGV[1]))
local held = {}
for i, key in ipairs(KEYS) do
  if is_current(key, ARGV[2 * i + 1], ARGV[2 * i + 2]) then
    redis.call('HSET', key, 'expires', expires)
    held[#held + 1] = i
  end
end
return {expires, held}
""",
    # KEYS: the stream. ARGV: owner, generation
    "release": """
if is_current(KEYS[1], ARGV[1], ARGV[2]) then
  redis.call('HDEL', KEYS[1], 'owner')
end
""",
    # KEYS: the stream, chunks of the blob. ARGV: owner, generation, clock, blob, now, prefix of blobs,
    # where the current state stays (empty: nowhere), fields
    "commit": """
if redis.call('HGET', KEYS[1], 'current:blob') == ARGV[4] then return {'written'} end
if not is_current(KEYS[1], ARGV[1], ARGV[2]) then return fenced(KEYS[1]) end
local before = redis.call('HMGET', KEYS[1], 'current:generation', 'current:clock')
if before[1] == ARGV[2] and tonumber(ARGV[3]) < tonumber(before[2]) then return {'clock', before[2]} end
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then return {'gone'} end
end
local old_chunks, written = named(KEYS[1], ARGV[6]), string.format('%.6f', time(ARGV[5]))
local keeps = ARGV[7] ~= '' and before[1] and before[1] ~= ARGV[2]
if keeps then
  redis.call('HSET', KEYS[1], 'current:written', written)
  forget(KEYS[1])
  redis.call('HSET', KEYS[1], ARGV[7] .. ':written', written)
end
for i = 8, #ARGV, 2 do
  local old = redis.call('HGET', KEYS[1], 'current:' .. ARGV[i])
  if old then
    redis.call('HSET', KEYS[1], 'previous:' .. ARGV[i], old)
    if keeps and ARGV[i] ~= 'written' then redis.call('HSET', KEYS[1], ARGV[7] .. ':' .. ARGV[i], old) end
  end
  redis.call('HSET', KEYS[1], 'current:' .. ARGV[i], ARGV[i + 1])
end
redis.call('HSET', KEYS[1], 'current:written', written)
for i = 2, #KEYS do redis.call('PERSIST', KEYS[i]) end
remove(old_chunks, named(KEYS[1], ARGV[6]))
return {'written'}
""",
    # KEYS: the stream, all streams. ARGV: owner, generation, name, prefix of blobs
    "delete": """
if not is_current(KEYS[1], ARGV[1], ARGV[2]) then
  local left = redis.call('HMGET', KEYS[1], 'expires', 'generation')
  if not left[1] and left[2] == ARGV[2] then return {'deleted'} end
  return fenced(KEYS[1])
end
remove(named(KEYS[1], ARGV[4]), {})
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  if field ~= 'generation' then redis.call('HDEL', KEYS[1], field) end
end
redis.call('ZREM', KEYS[2], ARGV[3])
return {'deleted'}
""",
    # KEYS: the stream. ARGV: owner, generation, prefix of blobs
    "forget": """
if is_current(KEYS[1], ARGV[1], ARGV[2]) then
  local old_chunks = named(KEYS[1], ARGV[3])
  forget(KEYS[1])
  remove(old_chunks, named(KEYS[1], ARGV[3]))
end
""",
}


class RedisStore(StreamStore):
    """A store in a Redis server, as in ``redis://localhost:6379/0``; ``now`` is its clock, by default the server's."""

    def __init__(
        self, address: str, *, prefix: str = "tribe:", now: Callable[[], float] | None = None, timeout: float = TIMEOUT
    ) -> None:
        try:
            self._redis = importlib.import_module("redis")
        except ImportError as error:
            raise ImportError(f"a store in Redis needs redis ({error}): pip install 'tribe-tta[redis]'") from error
        self._now, self._prefix, self._closed = now, prefix, False
        self.place = store.shown_place(address)  # for errors
        retry = importlib.import_module("redis.retry").Retry(importlib.import_module("redis.backoff").NoBackoff(), 1)
        try:
            self._client = self._redis.Redis.from_url(
                address, socket_timeout=timeout, socket_connect_timeout=timeout, retry=retry
            )
        except ValueError:  # its text may hold a part of the password
            words = "is not the address of a Redis server: expected redis://USER:PASSWORD@HOST:PORT/NUMBER"
            raise ValueError(f"{self.place} {words}. In a password, / is %2F and @ is %40") from None
        self._scripts = {name: self._client.register_script(FUNCTIONS + text) for name, text in SCRIPTS.items()}
        self._all = f"{prefix}streams"
        self._prepare()

    def claim(self, stream: str, owner: str, lease: float) -> Claim | None:
        """Claim a stream; see `StreamStore.claim`."""
        found = self._run("claim", [self._stream(stream), self._all], stream, owner, repr(float(lease)), self._time())
        return None if found is None else Claim(stream, owner, int(found[0]), float(found[1]))

    def renew(self, claims: Sequence[Claim], lease: float) -> dict[str, Claim]:
        """Renew claims; see `StreamStore.renew`."""
        holders = (value for claim in claims for value in (claim.owner, claim.generation))
        keys = [self._stream(claim.stream) for claim in claims]
        expires, held = self._run("renew", keys, repr(float(lease)), self._time(), *holders)
        return {claims[i - 1].stream: claims[i - 1]._replace(expires=float(expires)) for i in held}

    def release(self, claim: Claim) -> None:
        """End a claim; see `StreamStore.release`."""
        self._run("release", [self._stream(claim.stream)], claim.owner, claim.generation)

    def _store_blobs(self, uploads: store.Uploads) -> None:
        try:
            for write, record in uploads.values():
                view = memoryview(write.blob)
                with self._explained():
                    for i, key in enumerate(self._chunks(record)):
                        self._client.set(key, view[i * CHUNK : (i + 1) * CHUNK], ex=UPLOAD_SECONDS)
        except StoreDown:
            self._remove(*(record for _, record in uploads.values()))
            raise

    def _commit(self, uploads: store.Uploads) -> store.Refusals:
        refused = store.Refusals()
        for stream, (write, record) in uploads.items():
            claim, keys = write.claim, [self._stream(stream), *self._chunks(record)]
            values = (
                claim.owner,
                claim.generation,
                record.clock,
                record.blob,
                self._time(),
                self._blob(""),
                write.keep or "",
            )
            fields = record._asdict() | {"chunks": len(keys) - 1}
            answer, *found = self._run("commit", keys, *values, *(part for item in fields.items() for part in item))
            if answer == b"written":
                continue
            self._remove(record)
            if answer == b"gone":
                raise StoreDown(f"the write of stream {stream!r} took over {UPLOAD_SECONDS} s: write again")
            refused[stream] = (
                store.clock_fell(write, int(found[0])) if answer == b"clock" else store.fenced(claim, *_holder(*found))
            )
        return refused

    def _remove(self, *records: StateRecord) -> None:
        """Remove blobs that no stream names. If that fails, the server removes them later."""
        with contextlib.suppress(StoreDown), self._explained():
            self._client.unlink(*(key for record in records for key in self._chunks(record)))

    def _find(self, stream: str, place: str) -> StateRecord | None:
        with self._explained():
            found = self._client.hmget(self._stream(stream), [f"{place}:{field}" for field in StateRecord._fields])
        if found[0] is None:
            return None
        try:
            generation, clock, requests, blob, size, written = (value.decode() for value in found)
            return StateRecord(int(generation), int(clock), requests, blob, int(size), float(written))
        except (AttributeError, ValueError) as error:
            raise self._damaged(stream, error) from error

    def _fetch(self, stream: str, record: StateRecord) -> bytes:
        with self._explained():
            chunks = [self._client.get(key) for key in self._chunks(record)]
        if any(chunk is None for chunk in chunks):
            raise StoreDamaged(f"the state of stream {stream!r} in {self.place} is damaged: a part of it is missing")
        return b"".join(chunks)

    def entry(self, stream: str) -> store.StoreEntry | None:
        """Return the server's row of a stream; see `StreamStore.entry`."""
        return next(iter(self._entries([stream])), None)

    def list(self, prefix: str = "", limit: int = store.PAGE, after: str = "") -> store.Entries:
        """Return rows of streams; see `StreamStore.list`."""
        least, most = _range(prefix)
        least = b"(" + after.encode() if after >= prefix and after else least
        with self._explained():
            names = self._client.zrangebylex(self._all, least, most, start=0, num=limit)
        return self._entries([name.decode() for name in names])

    def count(self, prefix: str = "") -> int:
        """Return how many streams begin so; see `StreamStore.count`."""
        with self._explained():
            return int(self._client.zlexcount(self._all, *_range(prefix)))

    def _entries(self, streams: Sequence[str]) -> store.Entries:
        fields = ["owner", "generation", "expires", *(f"{store.CURRENT}:{e}" for e in ("clock", "bytes", "written"))]
        with self._explained():
            pipeline = self._client.pipeline(transaction=False)
            pipeline.time()
            for stream in streams:
                pipeline.hmget(self._stream(stream), fields)
            (seconds, micros), *rows = pipeline.execute()
        now = seconds + micros / 1e6 if self._now is None else self._now()
        entries = []
        for stream, (owner, generation, expires, clock, size, written) in zip(streams, rows, strict=True):
            if expires is not None:
                who, number = _holder(owner, generation)
                ends = float(expires) if who is not None else 0.0
                state = int(clock or 0), int(size or 0), None if written is None else float(written)
                entries.append(store.StoreEntry(stream, who, number or 0, ends, now < ends, *state))
        return entries

    def delete(self, claim: Claim) -> None:
        """Delete a stream's states and keep its generation; see `StreamStore.delete`."""
        values = claim.owner, claim.generation, claim.stream, self._blob("")
        found = self._run("delete", [self._stream(claim.stream), self._all], *values)
        if found[0] != b"deleted":
            raise store.fenced(claim, *_holder(*found[1:]))

    def now(self) -> float:
        """Return the time of the server."""
        if self._now is not None:
            return self._now()
        with self._explained():
            seconds, micros = self._client.time()
        return float(seconds + micros / 1e6)

    def forget(self, claim: Claim) -> None:
        """Remove the state that is kept beside the last two; see `StreamStore.forget`."""
        self._run("forget", [self._stream(claim.stream)], claim.owner, claim.generation, self._blob(""))

    def close(self) -> None:
        """Close the connections. Claims are not released."""
        self._closed = True
        self._client.close()

    def _stream(self, stream: str) -> str:
        return f"{self._prefix}stream:{stream}"

    def _blob(self, name: str) -> str:
        return f"{self._prefix}blob:{name}"

    def _chunks(self, record: StateRecord) -> Sequence[str]:
        """Return the keys of a blob's parts; an empty blob also has one."""
        return [f"{self._blob(record.blob)}:{i + 1}" for i in range(max(1, -(-record.bytes // CHUNK)))]

    def _time(self) -> str:
        """Return the time for a script; an empty text means the server's."""
        return "" if self._now is None else repr(float(self._now()))

    def _prepare(self) -> None:
        """Check that the server answers, that its data is of this version, and that it does not remove or lose keys."""
        with self._explained():
            self._client.set(f"{self._prefix}schema", SCHEMA, nx=True)
            schema = self._client.get(f"{self._prefix}schema")
        if schema != b"%d" % SCHEMA:
            raise StoreDamaged(f"{self.place} has schema {schema[:20]!r}; this version of tribe reads {SCHEMA}")
        not_allowed = contextlib.suppress(self._redis.exceptions.ResponseError)  # on some hosted servers
        with self._explained(), not_allowed:
            memory = self._client.info("memory")
            if memory.get("maxmemory") and str(memory.get("maxmemory_policy")).startswith("allkeys"):
                raise StoreDown(
                    f"{self.place} removes keys when its memory is full (maxmemory-policy "
                    f"{memory['maxmemory_policy']}), so states would be lost: set maxmemory-policy noeviction"
                )

        with self._explained(), not_allowed:
            kept = self._client.config_get("save", "appendonly")
            if not kept.get("save") and kept.get("appendonly") == "no":
                words = (
                    "%s keeps nothing on a disk (save is empty, appendonly is no): when it restarts it is empty, and"
                )
                log.warning(f"{words} all streams begin anew. Set appendonly yes, see docs/serving.md", self.place)

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
            reason = next(REASONS[kind] for kind in kinds if kind in REASONS)
            reason = "it cannot write to its disk. Check the disk of the server" if DISK in text else reason
            said = f": {text}" if isinstance(error, self._redis.exceptions.ResponseError) else ""  # by the server
            raise StoreDown(f"the Redis server {self.place}: {reason} ({type(error).__name__}{said})") from error


def _range(prefix: str) -> tuple[bytes, bytes]:
    """Return the ends of the names that begin with a prefix, in a sorted set."""
    return b"[" + prefix.encode(), b"(" + prefix.encode() + b"\xff"  # a byte after all those of UTF-8


def _holder(owner: bytes | None, generation: bytes | None) -> tuple[str | None, int | None]:
    """Return the owner and generation of a stream from the server's answer."""
    return None if owner is None else owner.decode(), None if generation is None else int(generation)
