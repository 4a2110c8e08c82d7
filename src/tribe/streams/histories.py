"""The history of named states: their snapshots, the way back to one, and what changed since."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch

from tribe.core.backbone import Backbone
from tribe.core.state import copy_like
from tribe.health.changes import Comparison, compare_states
from tribe.health.history import (
    Kept,
    Past,
    RolledBack,
    Timeline,
    check_snapshot,
    find_snapshot,
    state_after_rollback,
)
from tribe.methods import AnyMethod
from tribe.streams.entries import Entry, EntryTable, Lock


class Histories(ABC):
    """Entries with a history: a part of `tribe.streams.core.Streams`."""

    net: Backbone
    method: AnyMethod
    streams: int
    table: EntryTable
    lock: Lock

    @abstractmethod
    def entry(self, name: str) -> Entry:
        """Return the entry of a name."""

    @abstractmethod
    def reading(self, *names: str) -> AbstractContextManager[dict[str, Entry]]:
        """Return a context with the entries of these names; no step writes into their memory in it."""

    @abstractmethod
    def replace_state(
        self,
        name: str,
        state: Any,
        *,
        frozen: bool | None = None,
        history: Timeline | None = None,
        shadow: tuple[bool, ...] | None = None,
    ) -> None:
        """Replace a state by one that no step made, or add an entry with it."""

    def history(self, name: str) -> list[Kept] | None:
        """Return the snapshots of an entry, the newest first; None without a history."""
        timeline = self.entry(name).history
        return None if timeline is None else timeline.kept()

    @torch.inference_mode(False)
    def rollback(
        self,
        name: str,
        to: Past = None,
        *,
        seconds: float | None = None,
        images: int | None = None,
        stream: int | None = None,
    ) -> RolledBack:
        """Return all streams of an entry, or one, to a snapshot: see `tribe.Adapter.rollback`."""
        with self.lock:
            entry = self.entry(name)
            snapshot, kept = find_snapshot(entry.history, to, seconds=seconds, images=images, stream=stream)
            check_snapshot(snapshot, self.method, self.net, self.streams)
            state, report = state_after_rollback(snapshot, kept, entry.state, stream)
            history = entry.history
            if kept is not None and history is not None:
                history = history.back_to(snapshot, stream)
            self.replace_state(name, state, history=history)
            return report

    @torch.inference_mode(False)
    def compare(
        self,
        name: str,
        to: Past = None,
        *,
        seconds: float | None = None,
        images: int | None = None,
        stream: int | None = None,
    ) -> Comparison:
        """Return which layers and classes moved since a snapshot, and by how much; without one since the source."""
        with self.reading(name) as entries:
            entry = self.table.on_device(entries[name])
            if to is None and seconds is None and images is None:
                since, old = "the source", self.method.init(self.net, self.streams, entry.seed)
            else:
                snapshot, kept = find_snapshot(entry.history, to, seconds=seconds, images=images, stream=stream)
                check_snapshot(snapshot, self.method, self.net, self.streams)
                since, old = "a snapshot" if kept is None else kept.age, copy_like(snapshot.state, entry.state)
            chosen = None if stream is None else [stream]
            return compare_states(self.net, self.method, old, entry.state, since, chosen)
