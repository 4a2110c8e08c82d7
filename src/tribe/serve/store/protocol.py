"""What a store of stream states promises: each stream has one owner at a time, and only the owner's states are kept.

A worker *claims* a stream before it learns from the stream's images. A claim is a lease: it ends after some seconds
unless the worker renews it. Each new claim raises the stream's *generation* by 1. A *write* goes through only with the
current generation. So a worker that was paused past its lease cannot overwrite the states of the next owner, however
late it wakes up: its write raises `Fenced`, and nothing changes.

Two clocks measure a lease. The store's clock decides whether another worker may claim the stream: the clock of the
Redis server, or the host's wall clock for SQLite. The owner cannot read that clock at every step, so it also measures
with its own monotonic clock: it takes the time before it calls `claim` or `renew`, and from ``lease`` seconds after
that time it only predicts, until a renewal succeeds. A wrong or jumping clock makes a lease too short or too long; it
never makes two owners write, because the generation decides, not the time.

An owner's name belongs to one start of one process. A process that starts again under the name of its predecessor would
get the live claim of the predecessor, which may still run.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tribe.fields import document, is_number, is_whole, require

LONGEST_NAME = 200  # characters of a stream or an owner
LONGEST_LEASE = 86_400.0  # seconds
LARGEST_CLOCK = 2**53 - 1  # Lua, in Redis, computes with doubles
PAGE = 1000  # entries that `list` returns by default


class Claim(NamedTuple):
    """The right of an owner to write the states of a stream."""

    stream: str
    owner: str
    generation: int
    expires: float


document(
    Claim,
    stream="The stream's name.",
    owner="The worker that holds the claim.",
    generation="The number of claims of this stream so far, this one included.",
    expires="When the lease ends, in seconds of the store's clock.",
)


class Entry(NamedTuple):
    """What the ledger says of a stream, without its state."""

    stream: str
    owner: str | None
    generation: int
    expires: float
    held: bool
    clock: int
    bytes: int
    written: float | None


document(
    Entry,
    stream="The stream's name.",
    owner="The last owner; None if it has released the stream.",
    generation="That of the last claim.",
    expires="When the lease ends or has ended, in seconds of the store's clock.",
    held="Whether the owner's lease is live, by the store's clock.",
    clock="The clock of the stored state; 0 if there is none.",
    bytes="The size of the stored state; 0 if there is none.",
    written="When the state was written, in seconds of the store's clock; None if there is none.",
)


class Stored(NamedTuple):
    """A state as its owner wrote it."""

    stream: str
    generation: int
    clock: int
    requests: tuple[str, ...]
    blob: bytes
    meta: dict[str, Any]


document(
    Stored,
    stream="The stream's name.",
    generation="The generation that wrote the state.",
    clock="The stream's clock in this state.",
    requests="The last requests that this state has learned from.",
    blob="The state: the bytes of a state file.",
    meta="What the writer said of the state.",
)


class Write(NamedTuple):
    """A state to be written, with the arguments of `Store.write`."""

    claim: Claim
    blob: bytes
    clock: int
    requests: Sequence[str]
    meta: Mapping[str, Any]


document(
    Write,
    claim="The writer's.",
    blob="The state: the bytes of a state file.",
    clock="That of the state.",
    requests="The last requests that the state has learned from.",
    meta="More about the state, as a JSON object.",
)
Entries = list[Entry]  # in a store `list` is a method


class Fenced(RuntimeError):
    """A write by a worker that does not own the stream: another one has claimed it, or it was released or deleted."""


class StoreDown(OSError):
    """The store cannot be reached or written: what failed, and what to do. What was stored before is unchanged."""


class StoreDamaged(ValueError):
    """What the store holds is not what was written: which part, and what to do."""


class Store(Protocol):
    """Claims and states of streams, kept on disk or by a server. All methods may be called from any thread.

    Every method raises `StoreDown` if the store cannot be reached or written, and ValueError for an argument that it
    does not take. A stream's name is any text of 1 to 200 printable characters.
    """

    def claim(self, stream: str, owner: str, lease: float) -> Claim | None:
        """Claim a stream for ``lease`` seconds; None if another owner's lease is live.

        A stream without a live lease gets a new generation: 1 more than the last one. The owner of a live lease gets
        its claim back with the same generation, renewed.
        """

    def renew(self, claims: Sequence[Claim], lease: float) -> dict[str, Claim]:
        """Renew claims, and return those that are still held, by stream; the missing ones are lost.

        A lease that has ended is renewed, too, if nobody has claimed the stream since: no other worker has learned.
        """

    def release(self, claim: Claim) -> None:
        """End a claim, so that another owner need not wait for its lease to end. A claim that is lost stays so."""

    def write(self, claim: Claim, blob: bytes, *, clock: int, requests: Sequence[str], meta: Mapping[str, Any]) -> None:
        """Replace the stream's state, with its clock and its requests, at once or not at all.

        When it returns, the state is on the disk, as far as the store's server promises that. The state before it is
        kept, too, in case this one is damaged.

        Args:
            claim: the writer's.
            blob: the state.
            clock: that of the state; within a generation it never falls.
            requests: the last requests that the state has learned from.
            meta: more about the state, as a JSON object.

        Raises:
            Fenced: the claim is not the stream's current one. A lease that has ended alone is no reason.
            ValueError: the clock falls.
        """

    def write_many(self, writes: Sequence[Write]) -> dict[str, Fenced | ValueError]:
        """Write the states of several streams, and return those that were refused, by stream, with the reason.

        For many small states this is much faster than `write`: SQLite syncs them to the disk together. If it raises
        `StoreDown`, some or none of them are stored.
        """

    def read(self, stream: str, *, previous: bool = False) -> Stored | None:
        """Read the last state of a stream, or the one before it; None if there is none.

        Raises:
            StoreDamaged: the state is not what was written. The message says whether the previous one is intact.
        """

    def entry(self, stream: str) -> Entry | None:
        """What the ledger says of a stream; None for one that was never claimed or was deleted."""

    def list(self, prefix: str = "", limit: int = PAGE, after: str | None = None) -> Entries:
        """The entries of the streams whose names begin with a prefix, in the order of their code points.

        ``after``: the last name of the page before.
        """

    def delete(self, claim: Claim) -> None:
        """Delete a stream's states.

        The generation is kept, so that the next claim raises it and old owners stay fenced. To delete a stream twice
        with the same claim does no more than once.

        Raises:
            Fenced: the claim is not the stream's current one.
        """

    def close(self) -> None:
        """Let go of files and connections. Claims are not released."""


# -- checks that all stores share --------------------------------------------------------------------------------------


def check_name(name: str, noun: str = "a stream's name") -> str:
    """The name of a stream or an owner, or an error that says what a name is.

    >>> check_name("gate 3")
    'gate 3'
    >>> check_name("gate\\n3")
    Traceback (most recent call last):
    ValueError: a stream's name is 1 to 200 printable characters, without line breaks; got 'gate\\n3'
    """
    expected = f"{noun} is 1 to {LONGEST_NAME} printable characters, without line breaks"
    require(isinstance(name, str), expected, name)
    require(0 < len(name) <= LONGEST_NAME and name.isprintable(), expected, name[: LONGEST_NAME + 1])
    return name


def check_lease(lease: float) -> float:
    """The seconds of a lease, or an error that says what a lease is."""
    expected = f"a lease is a number of seconds, more than 0 and at most {LONGEST_LEASE:,.0f}"
    require(is_number(lease) and 0 < lease <= LONGEST_LEASE, expected, lease)
    return float(lease)


def check_clock(clock: int) -> int:
    """The clock of a state, or an error that says what a clock is."""
    require(is_whole(clock, 0) and clock <= LARGEST_CLOCK, "a clock is a whole number, from 0 to 2^53 - 1", clock)
    return int(clock)


def check_page(prefix: str, limit: int, after: str | None) -> None:
    """Check the arguments of `Store.list`."""
    require(isinstance(prefix, str) and (not prefix or prefix.isprintable()), "prefix is printable text", prefix)
    require(is_whole(limit, 1), "limit is a whole number, at least 1", limit)
    if after is not None:
        check_name(after, "after")


def check_distinct(writes: Sequence[Write]) -> None:
    """Refuse two writes of one stream at a time."""
    ((twice, count),) = Counter(write.claim.stream for write in writes).most_common(1) or (("", 0),)
    require(count < 2, "each write is of another stream", twice)


def check_same_state(claim: Claim, before: tuple[int, int] | None, clock: int) -> None:
    """Refuse a clock that falls within a generation; ``before`` is the generation and clock of the stored state."""
    if before is not None and before[0] == claim.generation and clock < before[1]:
        raise ValueError(
            f"the clock of stream {claim.stream!r} falls from {before[1]} to {clock} within generation "
            f"{claim.generation}: release the stream and claim it again to store an earlier state"
        )


def fenced(claim: Claim, owner: str | None, generation: int | None) -> Fenced:
    """The error for a claim that is not current; the current owner and generation, None if the stream is unknown."""
    who = f"stream {claim.stream!r}: {claim.owner!r} wrote with generation {claim.generation}"
    if generation is None:
        return Fenced(f"{who}, but the store does not know the stream: claim it again")
    if generation != claim.generation:
        return Fenced(f"{who}, but the current one is {generation}: claim the stream again before learning")
    if owner is None:
        return Fenced(f"{who}, which was released: claim the stream again before learning")
    return Fenced(f"{who}, which belongs to {owner!r}: an owner's name is used by one process only")
