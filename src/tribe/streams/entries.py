"""Entries of named states, immutable and replaced as a whole, with bounded memory on a device."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from tribe.core.state import tree_map
from tribe.health.history import Timeline
from tribe.health.report import Counts
from tribe.health.watch import RECENT
from tribe.methods import Deployed

Residence = Literal["device", "host"]


@dataclass(frozen=True)
class Entry:
    """A named state of one or more streams, and what belongs to it."""

    state: Any
    frozen: bool = False
    bad: Tensor | None = None  # (S, B) bad images of the last batch, on the device; None: there were none
    version: int = 0  # how often the state was replaced
    residence: Residence = "device"
    deployed: Deployed | None = None  # the network of this state, made by the first prediction
    alarms: Counts = None  # how often each alarm had begun when it was last read
    history: Timeline | None = None
    unlearned: tuple[int, ...] | None = None  # images that a deadline left no time to learn from
    shadow: tuple[bool, ...] = ()  # (S), which streams are in shadow: the source answers for them; see `shadow`
    differ: Tensor | None = None  # (S, 2) of streams in shadow, discounted: answers that differ, and all

    def moved(self, state: Any, **fields: Any) -> "Entry":
        """Return the entry with another state, which is on the device."""
        return replace(self, state=state, version=self.version + 1, residence="device", deployed=None, **fields)

    def bad_images(self) -> list[tuple[int, ...]]:
        """Return the positions of bad images in the last batch of each stream."""
        if self.bad is None:
            return [()] * len(self.state.key.seed)
        return [tuple(torch.where(row)[0].tolist()) for row in self.bad]

    def in_shadow(self, shadow: bool, stream: int | None = None) -> "Entry":
        """Return the entry with all streams, or one, in shadow or out of it; what differed is counted anew."""
        modes = tuple(shadow if stream in (None, i) else old for i, old in enumerate(self.shadow))
        changed = [new != old for new, old in zip(modes, self.shadow, strict=True)]
        differ = self.differ
        if differ is not None:
            differ = differ.masked_fill(torch.tensor(changed, device=differ.device).unsqueeze(1), 0)
        return replace(self, shadow=modes, differ=differ)

    def with_difference(self, counts: Tensor) -> "Entry":
        """Return the entry with the answers of a batch counted, (n, 2) of its streams in shadow: that differ, and all.

        About the last `RECENT` count, as in `tribe.health.Health.source_agreement`.
        """
        rows = [i for i, shadow in enumerate(self.shadow) if shadow]
        new = counts.new_zeros(len(self.shadow), 2).float()
        new[rows] = counts.float()
        if self.differ is not None:
            new = torch.addcmul(new, self.differ.to(new.device), torch.exp(new[:, 1:] / -RECENT))
        return replace(self, differ=new)

    @property
    def seed(self) -> int:
        """The seed of its first stream."""
        return int(self.state.key.seed[0])


class Lock(threading.Condition):
    """A reentrant lock. A copy or a pickle gets a new one, so an object that has a lock can be copied."""

    def __reduce__(self) -> Any:
        return type(self), ()


class ReadersLock(Lock):
    """The lock of a table, which is held for a moment, and the states that predictions read at the moment."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[Any] = []

    def forget(self, state: Any) -> None:
        """Count a state as read once less."""
        del self.states[next(i for i, other in enumerate(self.states) if other is state)]
        self.notify_all()

    def wait_for_older(self, state: Any) -> None:
        """Wait until no prediction reads another state than this one."""
        with self:
            self.wait_for(lambda: all(other is state for other in self.states))


class EntryTable:
    """All entries, the least recently used first: at most ``rows`` states on the device, the others on the host."""

    def __init__(self, device: torch.device, rows: int) -> None:
        self.device, self.rows = device, rows
        self.lock = ReadersLock()
        self.entries: OrderedDict[str, Entry] = OrderedDict()

    def put(self, changes: Mapping[str, Entry], keeps_modes: bool = False) -> None:
        """Add or replace entries, all at once, after the least recently used states have moved to the host.

        With ``keeps_modes`` entries stay frozen and in shadow, or not, as they are now: a step may have taken long.
        """
        new = dict(changes) if len(self.entries) + len(changes) <= self.rows else self._make_room(changes)
        with self.lock:
            for name, entry in new.items():
                now = self.entries.get(name)
                if keeps_modes and now is not None and now.frozen != entry.frozen:
                    new[name] = replace(new[name], frozen=now.frozen)
                if keeps_modes and now is not None and now.shadow != entry.shadow:
                    new[name] = replace(new[name], shadow=now.shadow, differ=now.differ)
            self.entries.update(new)
            for name in new:
                self.entries.move_to_end(name)

    @contextmanager
    def reading(self, find: Callable[[], dict[str, Entry]]) -> Iterator[dict[str, Entry]]:
        """Give the entries that ``find`` returns; no step writes into their memory in this context."""
        with self.lock:
            entries = find()
            states = [entry.state for entry in entries.values()]
            self.lock.states += states
        try:
            yield entries
        finally:
            with self.lock:
                for state in states:
                    self.lock.forget(state)

    def change(self, name: str, **fields: Any) -> None:
        """Replace fields of an entry that leave its state as it is; a dropped entry stays dropped."""
        with self.lock:
            if (entry := self.entries.get(name)) is not None:
                self.entries[name] = replace(entry, **fields)

    def swap(self, name: str, old: Entry, new: Entry) -> None:
        """Replace an entry by one with the same state elsewhere, unless it was replaced meanwhile."""
        with self.lock:
            if self.entries.get(name) is old:
                self.entries[name] = new

    def on_device(self, entry: Entry) -> Entry:
        """Return an entry whose state is on the device; the table stays as it is."""
        if entry.residence == "device":
            return entry
        return replace(entry, state=_to(entry.state, self.device), residence="device")

    def use(self, name: str, entry: Entry) -> Entry:
        """Return an entry with its state on the device, where it stays for the next use."""
        with self.lock:
            if name in self.entries:
                self.entries.move_to_end(name)
        if entry.residence == "device":
            return entry
        there = self.on_device(entry)
        self._make_room({name: there})
        self.swap(name, entry, there)
        return there

    def _make_room(self, new: Mapping[str, Entry]) -> dict[str, Entry]:
        """Move the least recently used states to the host, and return the new entries, some of them on the host too."""
        with self.lock:
            others = [(n, e) for n, e in self.entries.items() if e.residence == "device" and n not in new]
        arriving = [name for name, entry in new.items() if entry.residence == "device"]
        excess = max(len(others) + len(arriving) - self.rows, 0)
        for name, entry in others[:excess]:
            self.swap(name, entry, _on_host(entry))
        stay = set(arriving[max(excess - len(others), 0) :])
        return {n: _on_host(e) if e.residence == "device" and n not in stay else e for n, e in new.items()}


def _on_host(entry: Entry) -> Entry:
    return replace(entry, state=_to(entry.state, "cpu"), residence="host", deployed=None)


def _to(state: Any, device: torch.device | str) -> Any:
    return tree_map(lambda t: t.to(device), state)
