"""The states of streams by name, with bounded memory: on the network's device, in host memory, or in files.

A state is a named tuple of tensors that nobody changes: a step makes a new one. So an entry of the pool is replaced as
a whole, under a lock that is held for a moment only, and a reader that has an entry needs no lock to use it.
"""

import hashlib
import logging
import os
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from tribe.core.backbone import Backbone
from tribe.core.checks import Place, place_of
from tribe.core.rng import Key
from tribe.core.state import Info, tree_map
from tribe.core.threads import Lock
from tribe.health.snapshots import StreamInfo, describe_streams
from tribe.io.states import StateFileError
from tribe.methods import Deployed

Residence = Literal["device", "host", "file"]
log = logging.getLogger("tribe.fleet")


@dataclass(frozen=True)
class Entry:
    """One stream. Where the state is in a file, ``info`` and ``seed`` hold what it says of the stream."""

    state: Any  # a state of one stream; None: it is in the file
    frozen: bool = False
    bad: Tensor | None = None  # (B,) bad images of the last batch, on the device; None: there were none
    version: int = 0  # how often the state was replaced
    place: Residence = "device"
    file: Path | None = None
    info: StreamInfo | None = None
    seed: int | None = None
    deployed: Deployed | None = None  # what `Method.deployed` made of this state
    seen: Any = None  # how often each alarm had begun when it was last read

    def describe(self) -> StreamInfo:
        """What the stream does, in plain numbers."""
        info = self.info or describe_streams(self.state, None, self.frozen)[0]
        places = () if self.bad is None else tuple(torch.where(self.bad)[0].tolist())
        return info._replace(frozen=self.frozen, poisoned=places)

    def moved(self, state: Any) -> "Entry":
        """The stream with another state, which is on the device."""
        new = replace(self, state=state, version=self.version + 1, place="device")
        return replace(new, file=None, info=None, seed=None, deployed=None)

    def find_seed(self) -> int:
        """The seed of the stream."""
        return int(self.state.key.seed[0]) if self.seed is None else self.seed


class _Report(NamedTuple):
    """The parts of a state that `describe_streams` reads."""

    info: Info
    key: Key


def describe_entries(entries: Mapping[str, Entry]) -> dict[str, StreamInfo]:
    """What several streams do: the numbers of those on one device are read together, as each reading waits for it."""
    infos = {name: entry.info for name, entry in entries.items() if entry.info is not None}
    for place in ("device", "host"):
        there = [name for name, entry in entries.items() if name not in infos and entry.place == place]
        if there:
            parts = [_Report(entries[name].state.info, entries[name].state.key) for name in there]
            together = tree_map(lambda *rows: torch.cat(rows), *parts)
            infos |= dict(zip(there, describe_streams(together, None, False), strict=True))
    return {name: replace(entry, info=infos[name]).describe() for name, entry in entries.items()}


class Files(Protocol):
    """How states go to files and come back."""

    def write(self, path: Path, entry: Entry) -> None:
        """Write the state of an entry."""

    def read(self, path: Path) -> Any:
        """The state in a file."""


class Pool:
    """The entries of all streams, the least recently used first.

    Args:
        device: where states are when they are used.
        rows: the most states there.
        size: the bytes of one state.
        limit: the most bytes of states in host memory, beside those ``rows``, if there is a folder.
        folder: where the others go; None: they stay in host memory.
        files: how states go to files and come back.
    """

    def __init__(
        self,
        device: torch.device,
        rows: int,
        size: int,
        limit: float,
        folder: str | PathLike[str] | None,
        files: Files,
    ) -> None:
        self.device, self.rows, self.size, self.limit = device, rows, size, limit
        self.lock = Lock()  # held for a moment, never while anything is computed, read or written
        self.entries: OrderedDict[str, Entry] = OrderedDict()
        self._paging = Lock()  # one thread at a time moves states out
        self._files = files
        self._folder: Path | None = None
        self._warned = False
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix="fleet-", dir=folder))
            self._finalizer = weakref.finalize(self, _remove_folder, self._folder, os.getpid())

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
            files = {old.file for name in new if (old := self.entries.get(name)) is not None}
            self.entries.update(new)
            for name in new:
                self.entries.move_to_end(name)
        _remove(files - {entry.file for entry in new.values()})

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
            entry = self.entries.pop(name)
        _remove([entry.file])

    def fetch(self, name: str) -> Entry | None:
        """The entry of a stream, its state on the device, where it stays; None: there is no such stream."""
        while (entry := self.get(name)) is not None:
            if entry.place == "device":
                with self.lock:
                    if name in self.entries:
                        self.entries.move_to_end(name)
                return entry
            if (state := self._read(name, entry)) is not None:
                here = self._to(state, self.device)
                back = replace(entry, state=here, place="device", file=None, info=None, seed=None)
                if self._swap(name, entry, back):
                    _remove([entry.file])
                    self.page_out(keep=name)
                    return back
        return None

    def peek(self, name: str) -> Entry | None:
        """As `fetch`, but the state stays where it is, and may come on the host."""
        while (entry := self.get(name)) is not None:
            if (state := self._read(name, entry)) is not None:
                return replace(entry, state=state)
        return None

    def remember(self, name: str, entry: Entry, deployed: Deployed) -> None:
        """Keep what `Method.deployed` made of an entry's state, unless the entry was replaced."""
        self._swap(name, entry, replace(entry, deployed=deployed))

    def page_out(self, keep: str | None = None) -> None:
        """Move the least recently used states to host memory, and from there to files, until they fit."""
        with self._paging:
            for name, entry in self._too_many("device", self.rows, keep):
                self._swap(name, entry, replace(entry, state=self._to(entry.state, "cpu"), place="host", deployed=None))
            if self._folder is None:
                return
            for name, entry in self._too_many("host", int(self.limit // self.size), keep):
                digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
                file = self._folder / f"{digest}-{entry.version}.safetensors"
                try:
                    self._files.write(file, entry)
                except StateFileError:  # a state that no file can hold stays where it is
                    continue
                except OSError as error:  # as does one for which there is no room: nothing is lost but memory
                    self._warn(error)
                    return
                info, seed = entry.describe(), entry.find_seed()
                away = replace(entry, state=None, place="file", file=file, info=info, seed=seed)
                if not self._swap(name, entry, away):
                    _remove([file])

    def _warn(self, error: OSError) -> None:
        """Say once that states cannot be written."""
        if not self._warned:
            self._warned = True
            log.warning(
                "states stay in host memory, above the limit: %s cannot be written (%s). Free space there, or give "
                "another folder",
                self._folder,
                error,
            )

    def _too_many(self, place: Residence, most: int, keep: str | None) -> list[tuple[str, Entry]]:
        with self.lock:
            there = [(name, entry) for name, entry in self.entries.items() if entry.place == place]
        return [(name, entry) for name, entry in there[: max(len(there) - most, 0)] if name != keep]

    def _read(self, name: str, entry: Entry) -> Any:
        """The state of an entry; None: its file was removed meanwhile, because the entry was replaced."""
        if entry.file is None:
            return entry.state
        try:
            return self._files.read(entry.file)
        except FileNotFoundError:
            if self.get(name) is not entry:
                return None
            raise StateFileError(
                f"{entry.file}, which the fleet wrote, is gone, and with it what stream {name!r} has learned: "
                f"something else removed it. reset({name!r}) starts it at the source model, drop({name!r}) forgets it"
            ) from None

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


def _remove_folder(folder: Path, process: int) -> None:
    """Remove the folder of a pool that is gone; a forked child must not, because its parent still uses it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _remove(files: Iterable[Path | None]) -> None:
    for file in files:
        if file is not None:
            file.unlink(missing_ok=True)
