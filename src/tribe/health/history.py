"""Snapshots of streams: when they are taken, which of them stay, and the way back to one."""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Annotated, Any, NamedTuple

from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.state import copy_like, count_bytes, replace_stream, tree_map
from tribe.fields import Count, Positive, Range, check_fields, is_number, is_whole, require
from tribe.methods import AnyMethod

NO_HISTORY = (
    "no history to go back in: tribe.adapt(net, history=True) takes snapshots while it learns. "
    "Without one, give what snapshot() returned, or reset() to the source model"
)


@dataclass(frozen=True)
class History:
    """When snapshots of a stream are taken, and how many stay.

    A snapshot is taken before a batch is learned from, the first one before the first batch. The oldest stays; those
    between it and the newest are spaced so that their ages grow by about the same factor. With 32 snapshots, taken once
    a minute for ten weeks, every age finds a snapshot that is at most twice as old (with 16: five times).

    Memory is bounded: ``keep`` copies of the state in the host's memory, refused at the start if they exceed
    ``megabytes``.
    """

    every: Count | None = 1000  # images of a stream between two snapshots, padding included; None: by time alone
    seconds: Positive | None = 60.0  # time between two snapshots, for cameras with few images; None: by images alone
    keep: Annotated[int, Range(low=2)] = 32  # snapshots of a stream
    megabytes: Positive = 1024  # the most memory that the snapshots of a stream may take, in 2**20 bytes
    clock: Callable[[], float] = field(default=time.monotonic, compare=False, repr=False)  # seconds; never goes back

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.every is not None or self.seconds is not None, "a history needs every= or seconds=", self)
        require(callable(self.clock), "clock is a function that returns seconds", self.clock)

    @classmethod
    def resolve(cls, history: "History | bool | None") -> "History | None":
        """Return the policy of an argument ``history``: True is the default one, None and False are none."""
        if history is None or history is False:
            return None
        if history is True:
            return cls()
        if not isinstance(history, cls):
            raise TypeError(f"history is None, True or a tribe.History; got {type(history).__name__}")
        return history

    @classmethod
    def that_fits(cls, state: Any) -> "History | None":
        """Return the default policy, with fewer snapshots where states are large; None: not even two fit."""
        usual = cls()
        most = int(usual.megabytes * 2**20 // max(count_bytes(state), 1))
        return replace(usual, keep=min(usual.keep, most)) if most >= 2 else None

    def check_memory(self, state: Any) -> None:
        """Raise if the snapshots of this state would take more memory than allowed."""
        each = count_bytes(state) / 2**20
        if (needed := each * self.keep) > self.megabytes:
            advice = [f"megabytes={math.ceil(needed)}"]
            if (fitting := int(self.megabytes / each)) >= 2:
                advice.insert(0, f"keep={fitting}")
            raise ValueError(
                f"a history of {self.keep} snapshots of {each:,.1f} MB each would take {needed:,.1f} MB; the limit is "
                f"{self.megabytes:,.0f} MB. Choose tribe.History({') or tribe.History('.join(advice)})"
            )


class Snapshot(NamedTuple):
    """A copy of a state, with the method and the network that it belongs to."""

    method: AnyMethod  # the method that ran
    state: Any  # a copy of its state, a named tuple of tensors
    net: Backbone  # the network itself: hashing its weights costs more than copying the state
    frozen: bool  # whether the stream was frozen


class Kept(NamedTuple):
    """A snapshot in a history; its ages are those at the time when the history was read."""

    snapshot: Snapshot
    seconds: float  # its age
    images: tuple[int, ...]  # its age in images: how many came to each stream since, while it learned
    learned: tuple[int, ...]  # how many images each stream had learned from

    @property
    def age(self) -> str:
        """Its age in words."""
        return f"{timedelta(seconds=round(self.seconds))} and {_shown(self.images)} images ago"

    def __repr__(self) -> str:
        return f"Kept({self.age}, learned from {_shown(self.learned)})"


Past = timedelta | Snapshot | Kept | None  # where to go back to: an age or a snapshot; None: seconds or images say it


class RolledBack(NamedTuple):
    """The snapshot that a rollback returned to."""

    streams: tuple[int, ...]  # the streams that went back
    seconds: float | None  # the age of the snapshot; None for one that is not in the history
    images: tuple[int, ...] | None  # its age in images, for each of these streams; None as for seconds
    learned: tuple[int, ...]  # how many images each of these streams has learned from now
    before: tuple[int, ...]  # how many it had learned from before it went back


def _shown(counts: tuple[int, ...]) -> str:
    """One number a stream, or one if all are equal."""
    return ", ".join(f"{n:,}" for n in (counts[:1] if len(set(counts)) == 1 else counts))


class TimedSnapshot(NamedTuple):
    """A snapshot, and the clock and the counts of images when it was taken."""

    snapshot: Snapshot
    taken: float
    came: tuple[int, ...]


@dataclass(frozen=True)
class Timeline:
    """The history of one state, immutable as the state. A pickle of it is empty: clocks of two machines differ."""

    policy: History
    streams: int
    records: tuple[TimedSnapshot, ...] = ()  # the oldest first
    came: int = 0  # images of each stream in batches without padding
    padded: Tensor | None = None  # (S,), on the device of the masks: images in batches with padding
    places: int = 0  # places in batches since the newest snapshot

    def __reduce__(self) -> Any:
        return type(self), (self.policy, self.streams)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Timeline":
        # The copy shares the policy: its clock may be bound to an object.
        return replace(
            self, records=copy.deepcopy(self.records, memo), padded=None if self.padded is None else self.padded.clone()
        )

    def before_step(self, method: AnyMethod, net: Backbone, state: Any) -> "Timeline":
        """Return the history before a batch is learned from: with a snapshot if one is due."""
        every, seconds, now = self.policy.every, self.policy.seconds, self.policy.clock()
        due = not self.records or (every is not None and self.places >= every)
        if not due and (seconds is None or now - self.records[-1].taken < seconds):
            return self
        copied = tree_map(lambda t: t.detach().to("cpu", copy=True), state)
        new = TimedSnapshot(Snapshot(method, copied, net, frozen=False), now, self.counts())
        return replace(self, records=thin((*self.records, new), self.policy), places=0)

    def after_step(self, places: int, valid: Tensor | None) -> "Timeline":
        """Return the history with the images of a batch counted; ``valid`` (S, B) marks those that are not padding."""
        if valid is None:
            return replace(self, places=self.places + places, came=self.came + places)
        more = valid.sum(1)  # read when a snapshot is taken: reading waits for the device
        padded = more if self.padded is None else self.padded.to(more.device) + more
        return replace(self, places=self.places + places, padded=padded)

    def counts(self) -> tuple[int, ...]:
        """Return how many images came to each stream."""
        padded = [0] * self.streams if self.padded is None else self.padded.tolist()
        return tuple(self.came + n for n in padded)

    def kept(self) -> list[Kept]:
        """Return the snapshots with their ages, the newest first."""
        now, came = self.policy.clock(), self.counts()
        return [
            Kept(
                snapshot,
                max(now - taken, 0.0),
                tuple(map(int.__sub__, came, then)),
                tuple(snapshot.state.info.images.tolist()),
            )
            for snapshot, taken, then in reversed(self.records)
        ]

    def back_to(self, snapshot: Snapshot, stream: int | None) -> "Timeline":
        """Return the history after a rollback: later snapshots leave, or hold the older state of one ``stream``."""
        last = next(i for i, record in enumerate(self.records) if record.snapshot is snapshot)
        records, later = self.records[: last + 1], self.records[last + 1 :]
        if stream is not None:
            for record in later:
                state = replace_stream(record.snapshot.state, stream, snapshot.state)
                records += (record._replace(snapshot=record.snapshot._replace(state=state)),)
        return replace(self, records=records)


def thin(records: tuple[TimedSnapshot, ...], policy: History) -> tuple[TimedSnapshot, ...]:
    """Drop snapshots until they fit the policy, each time the one whose neighbours' ages have the smallest ratio.

    So for every age a snapshot stays that is not much older. The larger of the ratios in seconds and in images counts.
    The newest and the oldest stay.
    """
    sizes = [count_bytes(record.snapshot.state) for record in records]
    while len(records) > policy.keep or (len(records) > 1 and sum(sizes) > policy.megabytes * 2**20):
        newest = records[-1]
        ages = [
            (
                max(newest.taken - record.taken, 0.0) + (policy.seconds or 1.0),
                max(map(int.__sub__, newest.came, record.came)) + (policy.every or 1),
            )
            for record in records
        ]
        ratios = [
            max(older / newer for older, newer in zip(ages[i - 1], ages[i + 1], strict=True))
            for i in range(1, len(records) - 1)
        ]
        least = 0 if not ratios else 1 + ratios.index(min(ratios))
        records, sizes = records[:least] + records[least + 1 :], sizes[:least] + sizes[least + 1 :]
    return records


def find_snapshot(
    timeline: Timeline | None, to: Past, *, seconds: float | None, images: int | None, stream: int | None
) -> tuple[Snapshot, Kept | None]:
    """Return the snapshot that arguments of `tribe.Adapter.rollback` name, and its place in the history if it has one.

    Without a ``stream``, ``images`` is the age of the stream with most images.
    """
    given = sum(value is not None for value in (to, seconds, images))
    if given != 1:
        raise TypeError(f"give one of: a snapshot, a timedelta, seconds=30 or images=500; got {given} of them")
    snapshot = to.snapshot if isinstance(to, Kept) else to
    if isinstance(snapshot, Snapshot):
        kept = [] if timeline is None else timeline.kept()
        return snapshot, next((entry for entry in kept if entry.snapshot is snapshot), None)
    if isinstance(to, timedelta):
        seconds = to.total_seconds()
    elif to is not None:
        raise TypeError(f"give a snapshot, a timedelta, seconds=30 or images=500; got {type(to).__name__}")
    if timeline is None:
        raise ValueError(NO_HISTORY)
    require(images is None or is_whole(images, least=0), "images is a whole number, at least 0", images)
    require(seconds is None or (is_number(seconds) and seconds >= 0), "seconds is a number, at least 0", seconds)
    kept = timeline.kept()
    if not kept:
        raise ValueError("the history is empty: the first snapshot is taken before the first batch is learned from")
    if images is None:
        least, unit, ages = seconds, "seconds", [entry.seconds for entry in kept]
    else:
        least, unit = images, "images"
        ages = [max(entry.images) if stream is None else entry.images[stream] for entry in kept]
    for entry, age in zip(kept, ages, strict=True):
        if age >= (least or 0):
            return entry.snapshot, entry
    shown = ", ".join(f"{age:,.6g}" for age in ages)
    raise ValueError(
        f"no snapshot is {least:,} {unit} old; there are snapshots from {shown} {unit} ago. reset() returns to the "
        "source model"
    )


def state_after_rollback(snapshot: Snapshot, kept: Kept | None, now: Any, stream: int | None) -> tuple[Any, RolledBack]:
    """Return the state after a rollback of all streams, or of one, and the report; nothing is changed yet."""
    past = copy_like(snapshot.state, now)
    chosen = list(range(len(now.key.seed)))
    if stream is not None:
        past, chosen = replace_stream(now, stream, past), [stream]
    learned, before = (tuple(state.info.images[chosen].tolist()) for state in (past, now))
    seconds, images = (None, None) if kept is None else (kept.seconds, tuple(kept.images[i] for i in chosen))
    return past, RolledBack(tuple(chosen), seconds, images, learned, before)


def check_snapshot(snapshot: Any, method: AnyMethod, net: Backbone, streams: int) -> None:
    """Raise if this is not a snapshot of this method, this network and this number of streams."""
    if not isinstance(snapshot, Snapshot):
        raise TypeError(f"restore takes what snapshot() returned; got {type(snapshot).__name__}")
    if snapshot.method != method:
        raise ValueError(f"the snapshot was taken with {snapshot.method}; here {method} runs")
    if (count := len(snapshot.state.key.seed)) != streams:
        raise ValueError(f"the snapshot is of another number of streams: {count}; expected {streams}")
    if snapshot.net is not net and snapshot.net.fingerprint() != net.fingerprint():
        raise ValueError(
            "the snapshot was taken on another network: its weights differ from this one's. Restore it where it was "
            "taken, with the same weights and precision"
        )
