"""The record of a state in a ledger, and the digest that ties it to its blob.

The digest covers the blob, the clock, the generation, the requests and the rest. So a blob never passes for the state
of another stream or another time, whatever happens to a file or a row.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tribe.fields import is_number, is_whole, require
from tribe.io import json_files
from tribe.serve.store.protocol import Claim, Stored, StoreDamaged, check_clock

CURRENT, PREVIOUS = "current", "previous"  # the two states of a stream that are kept
MOST_REQUESTS = 10_000  # of a state
LONGEST_REQUEST = 1000  # characters
MOST_META = 2**20  # characters of JSON


class Record(NamedTuple):
    """What a ledger says of one state. Its blob is elsewhere, under a name that is used once."""

    generation: int
    clock: int
    requests: str  # a JSON list
    meta: str  # a JSON object
    blob: str  # the name of the blob
    bytes: int  # of the blob
    digest: str
    written: float


def new_record(
    claim: Claim,
    blob: bytes,
    *,
    clock: int,
    requests: Sequence[str],
    meta: Mapping[str, Any],
    name: str,
    written: float,
) -> Record:
    """The record of a state that is about to be written."""
    texts = _requests_text(requests), _meta_text(meta)
    bare = Record(claim.generation, check_clock(clock), *texts, name, len(blob), "", written)
    return bare._replace(digest=digest(claim.stream, bare, blob))


def check_blob(blob: bytes) -> None:
    """Refuse a state that is not bytes."""
    require(isinstance(blob, bytes), "a blob is bytes", type(blob).__name__)


def _requests_text(requests: Sequence[str]) -> str:
    require(not isinstance(requests, str | bytes), "requests are a list of texts", requests)
    require(len(requests) <= MOST_REQUESTS, f"a state has at most {MOST_REQUESTS:,} requests", len(requests))
    for request in requests:
        expected = f"a request is a text of at most {LONGEST_REQUEST:,} characters"
        require(isinstance(request, str), expected, request)
        require(len(request) <= LONGEST_REQUEST, expected, request[:100])
    return json.dumps(list(requests))


def _meta_text(meta: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(dict(meta), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"meta is a mapping that JSON can hold, with finite numbers: {error}") from error
    require(len(text) <= MOST_META, f"meta has at most {MOST_META:,} characters as JSON", len(text))
    return text


def digest(stream: str, record: Record, blob: bytes) -> str:
    """A hash of a state and all that is said of it, except its name and when it was written."""
    header = json.dumps([stream, record.generation, record.clock, record.requests, record.meta, record.bytes])
    found = hashlib.blake2b(header.encode(), digest_size=32)
    found.update(blob)
    return found.hexdigest()


def check_record(record: Record, place: str) -> Record:
    """The record, if each of its values is of its type; ``place`` is where it was found."""
    counts = record.generation, record.clock, record.bytes
    texts = record.requests, record.meta, record.blob, record.digest
    if all(is_whole(n, 0) for n in counts) and all(isinstance(t, str) for t in texts) and is_number(record.written):
        return record
    raise StoreDamaged(f"{place} is damaged: a value is not of its type. Restore it from a backup")


def stored(stream: str, record: Record, blob: bytes, place: str) -> Stored:
    """The state of a record and its blob; `StoreDamaged` if they are not what was written."""
    if len(blob) != record.bytes or digest(stream, record, blob) != record.digest:
        raise StoreDamaged(f"{place} is damaged: it does not hold what was written")
    try:
        requests = json_files.parse(record.requests, [str], "requests")
        meta = json_files.parse(record.meta, dict, "meta")
    except ValueError as error:
        raise StoreDamaged(f"{place} is damaged: {error}") from error
    return Stored(stream, record.generation, record.clock, tuple(requests), blob, meta)


def read_state(
    stream: str,
    place: str,
    find: Callable[[str, str], Record | None],
    fetch: Callable[[str, Record], Stored],
) -> Stored | None:
    """Read a state while its owner may replace it; None if there is none.

    Args:
        stream: the stream's name.
        place: `CURRENT` or `PREVIOUS`.
        find: the record of a stream and a place.
        fetch: the verified state of a stream and a record; `StoreDamaged` if it is not what was written.
    """
    record = find(stream, place)
    while record is not None:
        try:
            return fetch(stream, record)
        except StoreDamaged as error:
            again = find(stream, place)
            if again == record:
                raise StoreDamaged(f"{error}. {_advice(stream, place, find, fetch)}") from error
            record = again  # it was replaced, and its blob removed, in the meantime
    return None


def _advice(
    stream: str, place: str, find: Callable[[str, str], Record | None], fetch: Callable[[str, Record], Stored]
) -> str:
    """What to do about a damaged state."""
    before = find(stream, PREVIOUS) if place == CURRENT else None
    if before is not None:
        with contextlib.suppress(StoreDamaged):
            fetch(stream, before)
            return (
                f"The previous state, of generation {before.generation} and clock {before.clock}, is intact: "
                f"read(..., previous=True) returns it (blob {before.blob})"
            )
    return "No previous state is intact: delete the stream, or restore the store from a backup"
