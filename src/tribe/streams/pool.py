"""The states of streams by name, with bounded memory on the network's device; the others are in host memory.

A state is a named tuple of tensors that nobody changes: a step makes a new one. So an entry of the pool is replaced as
a whole, under a lock that is held for a moment only, and a reader that has an entry needs no lock to use it.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.rng import Key
from tribe.core.state import Info, tree_map
from tribe.core.threads import Lock
from tribe.core.validation import Place, place_of
from tribe.health.snapshots import StreamInfo, describe_streams
from tribe.methods import Deployed

Residence = Literal["device", "host"]


@dataclass(frozen=True)
class Entry:
    """One stream."""

    state: Any  # a state of one stream
    frozen: bool = False
    bad: Tensor | None = None  # (B,) bad images of the last batch, on the device; None: there were none
    version: int = 0  # how often the state was replaced
    place: Residence = "device"
    deployed: Deployed | None = None  # what `Method.deployed` made of this state
    seen: Any = None  # how often each alarm had begun when it was last read

    def describe(self) -> StreamInfo:
        """What the stream does, in plain numbers."""
        return describe_streams(self.state, None, self.frozen)[0]._replace(poisoned=self.bad_places())

    def bad_places(self) -> tuple[int, ...]:
        """The places of the bad images in the last batch."""
        return () if self.bad is None else tuple(torch.where(self.bad)[0].tolist())

    def moved(self, state: Any) -> "Entry":
        """The stream with another state, which is on the device."""
        return replace(self, state=state, version=self.version + 1, place="device", deployed=None)

    def find_seed(self) -> int:
        """The seed of the stream."""
        return int(self.state.key.seed[0])


class _Report(NamedTuple):
    """The parts of a state that `describe_streams` reads."""

    info: Info
    key: Key


def describe_entries(entries: Mapping[str, Entry]) -> dict[str, StreamInfo]:
    """What several streams do: the numbers of those on one device are read together, as each reading waits for it."""
    infos: dict[str, StreamInfo] = {}
    for place in ("device", "host"):
        there = [name for name, entry in entries.items() if entry.place == place]
        if there:
            parts = [_Report(entries[name].state.info, entries[name].state.key) for name in there]
            together = tree_map(lambda *rows: torch.cat(rows), *parts)
            infos |= dict(zip(there, describe_streams(together, None, False), strict=True))
    return {
        name: infos[name]._replace(frozen=entry.frozen, poisoned=entry.bad_places()) for name, entry in entries.items()
    }


class Pool:
    """The entries of all streams, the least recently used first.

    Args:
        device: where states are when they are used.
        rows: the most states there.
    """

    def __init__(self, device: torch.device, rows: int) -> None:
        self.device, self.rows = device, rows
        self.lock = Lock()  # held for a moment, never while anything is computed
        self.entries: OrderedDict[str, Entry] = OrderedDict()
        self._paging = Lock()  # one thread at a time moves states out

    def get(self, name: str) -> Entry | None:
        """The entry of a stream; None: there is none."""
        with self.lock:
            return self.entries.get(name)

    def put(self, new: Mapping[str, Entry]) -> None:
        """Add or replace entries, all at once; then page out what is too much."""
        self.put_entries(new)
        self.page_out()

    def put_entries(self, new: Mapping[str, Entry]) -> None:
        """Add or replace entries, all at once."""
        with self.lock:
            self.entries.update(new)
            for name in new:
                self.entries.move_to_end(name)

    def change(self, name: str, **fields: Any) -> bool:
        """Replace fields of an entry that leave its state as it is; False: there is no such stream."""
        with self.lock:
            if (entry := self.entries.get(name)) is None:
                return False
            self.entries[name] = replace(entry, **fields)
            return True

    def drop(self, name: str) -> None:
        """Forget a stream."""
        with self.lock:
            del self.entries[name]

    def fetch(self, name: str) -> Entry | None:
        """The entry of a stream, its state on the device, where it stays; None: there is no such stream."""
        while (entry := self.get(name)) is not None:
            if entry.place == "device":
                with self.lock:
                    if name in self.entries:
                        self.entries.move_to_end(name)
                return entry
            back = replace(entry, state=self._to(entry.state, self.device), place="device")
            if self._swap(name, entry, back):
                self.page_out(keep=name)
                return back
        return None

    def remember(self, name: str, entry: Entry, deployed: Deployed) -> None:
        """Keep what `Method.deployed` made of an entry's state, unless the entry was replaced."""
        self._swap(name, entry, replace(entry, deployed=deployed))

    def page_out(self, keep: str | None = None) -> None:
        """Move the least recently used states to host memory, until the others fit on the device."""
        with self._paging:
            for name, entry in self._too_many(keep):
                self._swap(name, entry, replace(entry, state=self._to(entry.state, "cpu"), place="host", deployed=None))

    def _too_many(self, keep: str | None) -> list[tuple[str, Entry]]:
        with self.lock:
            there = [(name, entry) for name, entry in self.entries.items() if entry.place == "device"]
        return [(name, entry) for name, entry in there[: max(len(there) - self.rows, 0)] if name != keep]

    def _swap(self, name: str, old: Entry, new: Entry) -> bool:
        with self.lock:
            if self.entries.get(name) is not old:
                return False
            self.entries[name] = new
            if new.place == "device" != old.place:
                self.entries.move_to_end(name)
            return True

    @staticmethod
    def _to(state: Any, device: torch.device | str) -> Any:
        return tree_map(lambda t: t.to(device), state)


def check_place(net: Backbone, place: Place) -> None:
    """Refuse to run on a network that was moved or cast: the states of a fleet do not follow."""
    if (now := place_of(net)) != place:
        of_network, of_states = (f"on {device} in {dtype}" for device, dtype in (now, place))
        raise RuntimeError(
            f"the network is {of_network}, the states of this fleet {of_states}: the network was moved or cast "
            "after the fleet was made. Move it first, then call tribe.fleet"
        )
