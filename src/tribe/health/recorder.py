"""The history of one adapter: snapshots dense in the recent past and ever sparser before it.

When there are too many, the one goes that is missed least: for each age that a person may ask for, from one interval
to the whole life of the adapter, a snapshot stays that is not much older.
"""

import copy
import math
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.state import leaves, select, tree_map
from tribe.health.ages import Age, as_age, show_seconds
from tribe.health.history import History, Kept, RolledBack
from tribe.health.snapshots import Snapshot, copy_like
from tribe.methods import AnyMethod

NO_HISTORY = (
    "this adapter keeps no history to go back in: tribe.adapt(net, history=True) takes snapshots while it learns. "
    "Without one, give what snapshot() returned, or reset() to the source model"
)


class Entry(NamedTuple):
    """A snapshot, and the clock and the counts of images when it was taken."""

    snapshot: Snapshot
    taken: float
    came: tuple[int, ...]


class Recorder:
    """The history of one adapter. Its owner's lock protects it.

    A pickle of it is empty, because clocks of two machines do not agree; a copy in the same process is whole.
    """

    def __init__(self, policy: History | None, streams: int) -> None:
        self.policy, self.streams = policy, streams
        self.entries: tuple[Entry, ...] = ()  # the oldest first; always replaced as a whole
        self._came = 0  # images of each stream in batches without padding
        self._unpadded: Tensor | None = None  # (S,), on the device of the masks: images in batches with padding
        self._places = 0  # places in batches since the newest snapshot

    def __reduce__(self) -> Any:
        return type(self), (self.policy, self.streams)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recorder":
        new = object.__new__(type(self))
        vars(new).update(copy.deepcopy({**vars(self), "policy": None}, memo))
        new.policy = self.policy  # its clock may be bound to an object that the copy shares
        return new

    def check_memory(self, state: Any) -> None:
        """Refuse a policy whose snapshots of this state would take more memory than it allows, or than there is."""
        if (policy := self.policy) is None:
            return
        size, limit = count_bytes(state), policy.megabytes * 2**20
        there = _memory_of(state.key.seed.device, policy.on_host)
        if size * policy.keep <= min(limit, there):
            return
        needed = math.ceil(size * policy.keep / 2**20)
        advice = []
        if (fits := int(min(limit, there) // size)) >= 2:
            advice.append(f"keep={fits}")
        if needed * 2**20 <= there:
            advice.append(f"megabytes={needed}")
        elif limit < there and (fits := int(there / 2 // size)) >= 2:  # half: the other half is for the rest
            advice.append(f"keep={fits}, megabytes={math.ceil(size * fits / 2**20)}")
        reason = f"its limit is {policy.megabytes:,g} MB" if limit <= there else f"there are {there / 2**20:,.0f} MB"
        raise ValueError(
            f"a history of {policy.keep} snapshots of {size / 2**20:,.1f} MB each would take {needed:,} MB; {reason}. "
            + (f"Choose tribe.History({') or tribe.History('.join(advice)})" if advice else "Adapt without a history")
        )

    def before_step(self, method: AnyMethod, net: Backbone, state: Any) -> None:
        """Take a snapshot if one is due."""
        if (policy := self.policy) is None:
            return
        now = policy.clock()
        if self.entries:
            by_images = policy.every is not None and self._places >= policy.every
            by_time = policy.seconds is not None and now - self.entries[-1].taken >= policy.seconds
            if not (by_images or by_time):
                return
        copied = tree_map(lambda t: t.detach().to("cpu" if policy.on_host else t.device, copy=True), state)
        new = Entry(Snapshot(method, copied, net, False), now, self.counts())
        self.entries = thin((*self.entries, new), policy)
        self._places = 0

    def after_step(self, batch: int, valid: Tensor | None) -> None:
        """Count the images of a batch; ``valid`` (S, B) marks those that are not padding."""
        if self.policy is None:
            return
        self._places += batch
        if valid is None:
            self._came += batch
        else:
            more = valid.sum(1)  # read when a snapshot is taken: reading waits for the device
            self._unpadded = more if self._unpadded is None else self._unpadded.to(more.device) + more

    def clear(self) -> None:
        """Forget all snapshots: they belong to another network."""
        self.entries = ()

    def counts(self) -> tuple[int, ...]:
        """How many images came to each stream."""
        padded = [0] * self.streams if self._unpadded is None else self._unpadded.tolist()
        return tuple(self._came + n for n in padded)

    def kept(self) -> list[Kept]:
        """The snapshots, the newest first, with their ages."""
        if self.policy is None:
            return []
        now, came = self.policy.clock(), self.counts()
        return [_aged(entry, now, came) for entry in reversed(self.entries)]

    def look_up(
        self, to: Any, stream: int | None, images: int | None = None, seconds: float | None = None
    ) -> tuple[Snapshot, Kept | None]:
        """The snapshot that a person means, and its place in this history, if it has one.

        That is a snapshot, or the newest that is at least so old; in images of this stream, or of the one with most.
        """
        given = to.snapshot if isinstance(to, Kept) else to
        if isinstance(given, Snapshot) and images is None and seconds is None:
            return given, next((kept for kept in self.kept() if kept.snapshot is given), None)
        age = as_age(to, images, seconds)
        if self.policy is None:
            raise ValueError(NO_HISTORY)
        found = self.kept()
        ages = [_age(kept, age, stream) for kept in found]
        for kept, passed in zip(found, ages, strict=True):
            if passed >= (age.seconds if age.images is None else age.images):  # type: ignore[operator]
                return kept.snapshot, kept
        if not found:
            raise ValueError("the history is empty: the first snapshot is taken before the first batch is learned from")
        shown = ", ".join(show_seconds(n) if age.images is None else f"{n:,} images" for n in ages)
        raise ValueError(
            f"no snapshot is {age} old; there are snapshots from {shown} ago. reset() returns to the source model"
        )

    def go_back(
        self, snapshot: Snapshot, kept: Kept | None, now: Any, stream: int | None
    ) -> tuple[Any, tuple[Entry, ...], RolledBack]:
        """The state, the entries and the report after a return to a snapshot; nothing is changed yet.

        Without a stream, later entries are dropped. With one, later entries stay for the other streams, and hold this
        stream's older state.
        """
        past = copy_like(snapshot.state, now)
        chosen = list(range(self.streams))
        if stream is not None:
            past, chosen = put_stream(past, now, stream), [stream]
        learned, before = (tuple(state.info.images[chosen].tolist()) for state in (past, now))
        seconds, images = (None, None) if kept is None else (kept.seconds, tuple(kept.images[i] for i in chosen))
        report = RolledBack(tuple(chosen), seconds, images, learned, before)
        if kept is None:
            return past, self.entries, report
        last = next(i for i, entry in enumerate(self.entries) if entry.snapshot is snapshot)
        entries, later = self.entries[: last + 1], self.entries[last + 1 :]
        if stream is None:
            return past, entries, report
        return past, entries + tuple(_overwritten(entry, snapshot.state, stream) for entry in later), report


def thin(entries: tuple[Entry, ...], policy: History) -> tuple[Entry, ...]:
    """Drop entries until they fit the policy, each time the one whose neighbours' ages have the smallest ratio.

    The larger of the ratios in seconds and in images counts, so both kinds of ages stay covered. The newest and the
    oldest stay.
    """
    sizes = [count_bytes(entry.snapshot.state) for entry in entries]
    while len(entries) > policy.keep or (len(entries) > 1 and sum(sizes) > policy.megabytes * 2**20):
        newest = entries[-1]
        ages = [
            (
                max(newest.taken - entry.taken, 0.0) + (policy.seconds or 1.0),
                max(map(int.__sub__, newest.came, entry.came)) + (policy.every or 1),
            )
            for entry in entries
        ]
        ratios = [
            max(older / newer for older, newer in zip(ages[i - 1], ages[i + 1], strict=True))
            for i in range(1, len(entries) - 1)
        ]
        least = 1 + ratios.index(min(ratios)) if ratios else 0
        entries, sizes = entries[:least] + entries[least + 1 :], sizes[:least] + sizes[least + 1 :]
    return entries


def put_stream(new: Any, old: Any, stream: int) -> Any:
    """The state ``old`` with one stream of ``new``; neither is changed."""
    seeds = old.key.seed
    return select(torch.arange(len(seeds), device=seeds.device) == stream, new, old)


def count_bytes(state: Any) -> int:
    """The memory of a state's tensors."""
    return sum(t.numel() * t.element_size() for t in leaves(state).values())


def _aged(entry: Entry, now: float, came: tuple[int, ...]) -> Kept:
    images = tuple(map(int.__sub__, came, entry.came))
    return Kept(entry.snapshot, max(now - entry.taken, 0.0), images, tuple(entry.snapshot.state.info.images.tolist()))


def _age(kept: Kept, like: Age, stream: int | None) -> float:
    """The age of a snapshot in the unit of another age."""
    if like.images is None:
        return kept.seconds
    return max(kept.images) if stream is None else kept.images[stream]


def _overwritten(entry: Entry, older: Any, stream: int) -> Entry:
    state = put_stream(older, entry.snapshot.state, stream)
    return entry._replace(snapshot=entry.snapshot._replace(state=state))


def _memory_of(device: torch.device, on_host: bool) -> float:
    """The bytes of memory that the machine, or a GPU, has; infinity if it cannot be known."""
    if device.type == "cuda" and not on_host:
        return float(torch.cuda.get_device_properties(device).total_memory)
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):  # not every system says
        return math.inf
