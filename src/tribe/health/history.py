"""When an adapter takes snapshots of itself, how many it keeps, and what a person sees of them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tribe.fields import document, is_number, is_whole, plain_numbers, require
from tribe.health.ages import show_seconds
from tribe.health.snapshots import Snapshot


@dataclass(frozen=True)
class History:
    """When an adapter takes snapshots of itself, and how many it keeps.

    Snapshots are taken before a batch is learned from, the first one before the first batch. The oldest stays; those
    between it and the newest are spaced so that their ages grow by about the same factor. With 32 snapshots, taken once
    a minute for ten weeks, every age finds a snapshot that is at most twice as old (with 16: five times).

    Memory is bounded: ``keep`` copies of the state, refused at the start if they exceed ``megabytes``. Between two
    snapshots a step costs two additions and a look at the clock. Files that `Adapter.save` writes hold no history.

    Args:
        every: images of a stream between two snapshots, padding included; None: by time alone. Learning from 1000
            images takes TRIBE a third of a second on an H200 and seconds on a CPU; a copy of the state, milliseconds.
        seconds: time between two snapshots, for cameras with few images; None: by images alone.
        keep: how many snapshots, at least 2.
        megabytes: the most memory that they may take, in 2**20 bytes.
        on_host: keep them in the host's memory, also those of a GPU's states; False: where the state is.
        clock: seconds that never go back; tests give another one.
    """

    every: int | None = 1000
    seconds: float | None = 60.0
    keep: int = 32
    megabytes: float = 1024
    on_host: bool = True
    clock: Callable[[], float] = field(default=time.monotonic, compare=False, repr=False)

    def __post_init__(self) -> None:
        plain_numbers(self)
        require(self.every is None or is_whole(self.every, 1), "every is a number of images, at least 1", self.every)
        positive = self.seconds is None or (is_number(self.seconds) and self.seconds > 0)
        require(positive, "seconds is a number above 0", self.seconds)
        if self.every is None and self.seconds is None:
            raise ValueError("a history needs every= (images) or seconds=: with neither, no snapshot is ever due")
        require(is_whole(self.keep, 2), "keep is a number of snapshots, at least 2", self.keep)
        require(is_number(self.megabytes) and self.megabytes > 0, "megabytes is a number above 0", self.megabytes)
        require(isinstance(self.on_host, bool), "on_host is True or False", self.on_host)
        require(callable(self.clock), "clock is a function that returns seconds", self.clock)


def as_history(given: Any) -> History | None:
    """The policy that ``history=`` names; True is the default one, None and False are none."""
    if given is None or given is False:
        return None
    if given is True:
        return History()
    if not isinstance(given, History):
        raise TypeError(f"history is None, True or a tribe.History; got {type(given).__name__}")
    return given


class Kept(NamedTuple):
    """A snapshot in an adapter's history; its ages are those at the time when the history was asked."""

    snapshot: Snapshot
    seconds: float
    images: tuple[int, ...]
    learned: tuple[int, ...]

    @property
    def age(self) -> str:
        """Its age in words."""
        return f"{show_seconds(self.seconds)} and {_show(self.images)} images ago"

    def __repr__(self) -> str:
        return f"Kept({self.age}, learned from {_show(self.learned)})"


def _show(counts: tuple[int, ...]) -> str:
    """One number a stream, or one if all are equal."""
    return ", ".join(f"{n:,}" for n in (counts[:1] if len(set(counts)) == 1 else counts))


document(
    Kept,
    snapshot="The snapshot, for `Adapter.rollback`, `Adapter.restore` or `Adapter.compare`.",
    seconds="Its age in seconds.",
    images="Its age in images: how many came to each stream since, while it learned.",
    learned="How many images each stream had learned from.",
)


class RolledBack(NamedTuple):
    """What `Adapter.rollback` went back to."""

    streams: tuple[int, ...]
    seconds: float | None
    images: tuple[int, ...] | None
    learned: tuple[int, ...]
    before: tuple[int, ...]


document(
    RolledBack,
    streams="The streams that went back.",
    seconds="The age of the snapshot in seconds; None for a snapshot that is not in the history.",
    images="Its age in images, one number for each of these streams; None as for seconds.",
    learned="How many images each of these streams has learned from now.",
    before="How many it had learned from before it went back.",
)
