"""Named states on one frozen network: the core of adapters, fleets and the server.

Pure methods do the computation. `Streams` holds an immutable entry for each name, checks what goes in, and replaces the
entries of a step in one assignment, after the step has succeeded.

Threads: one at a time changes states, and holds `Streams.lock`. Whatever only reads takes the entry of the moment and
never waits for a step. A step of an adapter writes the next state into the memory of an earlier one. It first waits
until the predictions that read an earlier state have ended; those that begin meanwhile read the state of the moment.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from os import PathLike
from typing import Any, Self

import torch
from torch import Tensor, nn

from tribe.core.backbone import Backbone
from tribe.core.kernels import Switch
from tribe.core.state import clone, copy_like, count_bytes, digest, replace_stream
from tribe.core.threads import Lock
from tribe.core.validation import Checks, place_of
from tribe.filters import FilterInfo
from tribe.health.changes import Comparison, compare_states
from tribe.health.events import AlarmLog, Event, Listener
from tribe.health.history import (
    NO_HISTORY,
    History,
    Kept,
    RolledBack,
    Snapshot,
    Timeline,
    check_memory,
    check_snapshot,
    find_snapshot,
    state_after_rollback,
)
from tribe.health.report import Health, StreamInfo, describe_streams
from tribe.io import states
from tribe.methods import AnyMethod, Deployed, Pipeline
from tribe.methods.building import check_network
from tribe.methods.exporting import plain_network
from tribe.registry import nearest
from tribe.streams.batching import Arrived, EntryGroup, gather_deployed, group_entries
from tribe.streams.entries import Entry, EntryTable
from tribe.streams.files import StateFiles, check_state, decode_bytes
from tribe.streams.names import UnknownStream, check_name
from tribe.streams.runner import Runner, predict

EXACT = "exact=True: each stream gets the bits that it gets alone"


class Streams:
    """Named states that adapt on one frozen network.

    Args:
        net: the network.
        method: what adapts.
        streams: the streams of each entry.
        seed: of the first state.
        classes: the number of classes; read from the network if not given.
        rows: the most states on the network's device; None: any number.
        history: the policy of snapshots; None: none are kept.
        on_event: called with every alarm.
        graphs: as for `tribe.adapt`.
        deterministic: as for `tribe.adapt`.
        exact: entries go through the network one by one.
        padded: pad groups of entries to a few shapes, each of which is recorded.
        reuses_memory: a step may write the next state into the memory of an earlier one, for a single entry.
    """

    def __init__(
        self,
        net: Backbone,
        method: AnyMethod,
        *,
        streams: int = 1,
        seed: int = 0,
        classes: int | None = None,
        rows: int | None = None,
        history: History | bool | None = None,
        on_event: Listener | None = None,
        graphs: Switch = "auto",
        deterministic: bool = False,
        exact: bool = False,
        padded: bool = False,
        reuses_memory: bool = False,
    ) -> None:
        found = check_network(net, method, classes)
        self.net, self.method = net, method
        self.classes = found or 0  # 0: not known, of a network whose output may be something else than logits
        self.streams, self.seed = streams, seed
        self._like = method.init(net, streams, seed)
        self._size = count_bytes(self._like)
        self._reuses_memory, self._retired = reuses_memory, None  # the state before the current one
        self._runner = Runner(method, net, graphs, deterministic, padded, copies=not reuses_memory)
        self.unbatched_reason: str | None = None  # why entries go through the network one by one
        if exact:
            self.unbatched_reason = EXACT
        self._checks = Checks(net, found, method.output == "logits")
        self._place = place_of(net)  # device and precision of the states
        self._files = StateFiles(method, net)
        self.table = EntryTable(net.device, rows)
        self.lock = Lock()
        self.alarms = AlarmLog(method, on_event)
        self._policy = History.resolve(history)
        if self._policy is not None:
            check_memory(self._policy, self._like)

    # -- predicting and learning ------------------------------------------------------------------------------------

    def step(self, arrived: Mapping[str, Arrived]) -> dict[str, Tensor]:
        """Predict, then adapt the entries that have images; frozen ones only predict. Unknown names are added.

        Nothing is changed by an error, and nothing raises once the states are replaced.
        """
        with self.lock:
            self.check_place()
            old = {name: self.table.get(name) or self.new_entry(self.seed_of(name)) for name in arrived}
            frozen = {name: entry.frozen for name, entry in old.items()}
            results: dict[str, Tensor] = {}
            new: dict[str, Entry] = {}
            events: list[Event] = []
            for group in group_entries(arrived, frozen, self._size, self._runner.padded, self.unbatched_reason is None):
                bad = self._checks.find_bad(group.x, group.valid)
                before = [self.table.on_device(entry) for entry in map(old.__getitem__, group.names)]
                logits, after = self._step_group(group, [entry.state for entry in before])
                self._checks.check_logits(logits, bad if group.valid is None else group.unused(bad))
                results |= group.split(logits, arrived)
                marked = {} if bad is None else group.split(group.real(bad), arrived)
                for i, name in enumerate(group.names):
                    if after is None:
                        new[name] = replace(old[name], bad=marked.get(name))
                    else:
                        entry = replace(before[i], bad=marked.get(name))
                        new[name] = self._moved(name, entry, after[i], arrived[name], events)
            retired, self._retired = self._retired, None  # the new state may lie in its memory
            self.table.put(new, keeps_frozen=True)
            if self._reuses_memory:
                ((name, entry),) = old.items()
                self._retired = retired if new[name].state is entry.state else entry.state
            self.alarms.publish(events)
            return {name: own[0] if arrived[name].added else own for name, own in results.items()}

    def _step_group(self, group: EntryGroup, states: list[Any]) -> tuple[Tensor, list[Any] | None]:
        """The logits of a group and its next states; None: they stay."""
        if not group.x.shape[1]:
            return group.x.new_zeros(len(group.x), 0, self.classes), None
        if group.frozen:
            return self._runner.advance(group, states)
        if self.table.lock.states and self._reuses_memory:
            self.table.lock.wait_for_older(states[0])
        return self._runner.step(group, states, self._retired)

    def _moved(self, name: str, entry: Entry, state: Any, arrived: Arrived, events: list[Event]) -> Entry:
        """The entry after a step, with its history and what its alarms say."""
        history, counts = entry.history, entry.alarms
        if history is not None and not entry.frozen:
            history = history.before_step(self.method, self.net, entry.state)
            history = history.after_step(arrived.x.shape[1], arrived.valid)
        if self.alarms.watched and not entry.frozen and self.alarms.is_due(state, entry.version + 1):
            began, counts = self.alarms.read(state, counts)
            events += [event._replace(stream=self._stream_of(name, event)) for event in began]
        return entry.moved(state, history=history, alarms=counts)

    def run_prediction(self, arrived: Mapping[str, Arrived]) -> dict[str, Tensor]:
        """Predict without adapting, with the states of the moment: a step in another thread is not waited for."""
        self.check_place()
        results: dict[str, Tensor] = {}
        marked: dict[str, Tensor] = {}
        same = dict.fromkeys(arrived, True)
        with self.reading(*arrived) as known:
            entries = {name: self.table.use(name, entry) for name, entry in known.items()}
            for group in group_entries(arrived, same, self._size, self._runner.padded, self.unbatched_reason is None):
                bad = self._checks.find_bad(group.x, group.valid)
                logits = self._predict_group(group, entries)
                self._checks.check_logits(logits, group.unused(bad))
                results |= group.split(logits, arrived)
                marked |= {} if bad is None else group.split(group.real(bad), arrived)
        for name in arrived:
            self.table.change(name, bad=marked.get(name))
        return {name: own[0] if arrived[name].added else own for name, own in results.items()}

    def _predict_group(self, group: EntryGroup, entries: Mapping[str, Entry]) -> Tensor:
        if not group.x.shape[1]:
            return group.x.new_zeros(len(group.x), 0, self.classes)

        def deployed() -> Deployed:
            networks = [self._deployed(name, entries[name]) for name in group.names]
            return gather_deployed([*networks, *[networks[0]] * (group.entries - len(networks))])

        return predict(self.method, self.net, group, [entries[name].state for name in group.names], deployed)

    def _deployed(self, name: str, entry: Entry) -> Deployed:
        """The network that an entry predicts with, made once for each state."""
        if entry.deployed is not None:
            return entry.deployed
        deployed = self.method.deployed(self.net, entry.state)
        self.table.swap(name, entry, replace(entry, deployed=deployed))
        return deployed

    def reading(self, *names: str) -> AbstractContextManager[dict[str, Entry]]:
        """Return a context with the entries of these names; no step writes into their memory in it."""
        return self.table.reading(lambda: {name: self.entry(name) for name in names})

    @property
    def capture_disabled_reason(self) -> str | None:
        """Why steps are not captured in CUDA graphs; None if they are."""
        return self._runner.capture_disabled_reason

    # -- entries ------------------------------------------------------------------------------------------------------

    def entry(self, name: str) -> Entry:
        """Return the entry of a name."""
        check_name(name)
        if (entry := self.table.get(name)) is None:
            known = nearest(name, sorted(self.table.entries)) if self.table.entries else "there is none"
            raise UnknownStream(f"no stream {name!r}: {known}. add({name!r}) adds it")
        return entry

    def new_entry(self, seed: int) -> Entry:
        """Return an entry that starts at the source model."""
        return self._with_state(None, self.method.init(self.net, self.streams, seed))

    def start(self, name: str) -> None:
        """Add the only entry, with the first state; others have none to be compared with."""
        self.table.put({name: self._with_state(None, self._like)})
        self._like = None

    def move_state(self, name: str, state: Any) -> None:
        """Replace a state by the same one on another device or in another precision."""
        with self.lock:
            self._retired = None
            self.table.put({name: self.entry(name).moved(state, bad=None)})

    def replace_state(
        self, name: str, state: Any, *, frozen: bool | None = None, history: Timeline | None = None
    ) -> None:
        """Replace a state by one that no step made, or add an entry with it."""
        with self.lock:
            self._retired = None
            entry = self._with_state(self.table.get(name), state)
            entry = replace(entry, frozen=entry.frozen if frozen is None else frozen)
            self.table.put({name: entry if history is None else replace(entry, history=history)})

    def _with_state(self, entry: Entry | None, state: Any) -> Entry:
        """The entry with a state that no step made: its alarms have been reported."""
        if entry is not None:
            return entry.moved(state, bad=None, alarms=self.alarms.counts(state))
        history = None if self._policy is None else Timeline(self._policy, self.streams)
        return Entry(state, alarms=self.alarms.counts(state), history=history)

    def seed_of(self, name: str) -> int:
        """Return the seed of a new entry."""
        raise UnknownStream(f"no stream {name!r}")

    def _stream_of(self, name: str, event: Event) -> int | str:
        """The stream of an event: its number."""
        return event.stream

    # -- life cycle ---------------------------------------------------------------------------------------------------

    def freeze(self, name: str) -> Self:
        """Stop adapting: only predict. A time filter goes on."""
        return self._set_frozen(name, True)

    def unfreeze(self, name: str) -> Self:
        """Adapt again."""
        return self._set_frozen(name, False)

    def _set_frozen(self, name: str, frozen: bool) -> Self:
        self.entry(name)
        self.table.change(name, frozen=frozen)
        return self

    @torch.inference_mode(False)
    def reset(self, name: str, stream: int | None = None) -> Self:
        """Return to the source model: all streams of an entry, or one."""
        with self.lock:
            entry = self.entry(name)
            fresh = self.method.init(self.net, self.streams, entry.seed)
            self.replace_state(name, fresh if stream is None else replace_stream(entry.state, stream, fresh))
        return self

    @torch.inference_mode(False)
    def snapshot(self, name: str) -> Snapshot:
        """Return a copy of a state for `restore`."""
        with self.reading(name) as entries:
            return Snapshot(self.method, clone(entries[name].state), self.net, entries[name].frozen)

    @torch.inference_mode(False)
    def restore(self, name: str, snapshot: Snapshot) -> Self:
        """Return to a snapshot, or add an entry with it; frozen if it was."""
        like = self._like_of(name)
        check_snapshot(snapshot, self.method, self.net, self.streams)
        self.replace_state(name, copy_like(snapshot.state, like), frozen=snapshot.frozen)
        return self

    def _like_of(self, name: str) -> Any:
        """A state with the device and precision of those of this entry."""
        check_name(name)
        entry = self.table.get(name)
        return entry.state if entry is not None and entry.residence == "device" else self._like

    @torch.inference_mode(False)
    def state(self, name: str) -> Any:
        """Return a copy of a state, a named tuple of tensors."""
        with self.reading(name) as entries:
            return clone(entries[name].state)

    @torch.inference_mode(False)
    def put(self, name: str, state: Any) -> Self:
        """Replace a state by a copy of this one, or add an entry with it."""
        like = self._like_of(name)
        check_state(state, like, self.method.name)
        self.replace_state(name, copy_like(state, like))
        return self

    def digest(self, name: str) -> str:
        """Return a hash of a state: equal digests, equal states."""
        with self.reading(name) as entries:
            return digest(entries[name].state)

    @torch.inference_mode(False)
    def export(self, name: str, stream: int = 0) -> nn.Module:
        """Return a plain module that predicts for a stream as `predict` does, where there is one."""
        with self.reading(name) as entries:
            return plain_network(self.net, self.method, self.table.on_device(entries[name]).state, stream)

    # -- history ------------------------------------------------------------------------------------------------------

    def history(self, name: str) -> list[Kept] | None:
        """Return the snapshots of an entry, the newest first; None without a history."""
        timeline = self.entry(name).history
        return None if timeline is None else timeline.kept()

    @torch.inference_mode(False)
    def keep(self, name: str, note: Any = None) -> Kept:
        """Take a snapshot into the history now, with a note."""
        with self.lock:
            entry = self.entry(name)
            if entry.history is None:
                raise ValueError(NO_HISTORY)
            history = entry.history.record(self.method, self.net, entry.state, entry.frozen, note)
            self.table.change(name, history=history)
            return history.kept()[0]

    @torch.inference_mode(False)
    def rollback(
        self,
        name: str,
        to: timedelta | Snapshot | Kept | None = None,
        *,
        seconds: float | None = None,
        images: int | None = None,
        stream: int | None = None,
    ) -> RolledBack:
        """Return all streams of an entry, or one, to the newest snapshot that is at least so old.

        Later snapshots leave the history; after a rollback of one stream they stay for the others. A frozen entry
        stays frozen. An error changes nothing.
        """
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
        to: timedelta | Snapshot | Kept | None = None,
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

    # -- reports ------------------------------------------------------------------------------------------------------

    def infos(self, name: str) -> list[StreamInfo]:
        """Return what each stream of an entry has learned from."""
        with self.reading(name) as entries:
            entry = entries[name]
            return describe_streams(entry.state.info, entry.state.key.clock, entry.bad_images(), entry.frozen)

    def healths(self, name: str) -> list[Health] | None:
        """Return how each stream of an entry does; None without ``health`` or ``guard``."""
        if not self.alarms.watched:
            return None
        pipeline = Pipeline.of(self.method)
        with self.reading(name) as entries:
            state = self.table.on_device(entries[name]).state
            return pipeline.guard.health(self.net, pipeline.method, state)  # type: ignore[no-any-return]

    def filters(self, name: str) -> list[FilterInfo] | None:
        """Return what the time filter does for each stream of an entry; None without one."""
        with self.reading(name) as entries:
            pipeline = Pipeline.of(self.method)
            return None if pipeline.filter is None else pipeline.filter.info(entries[name].state.filter)

    def look(self, names: Iterable[str]) -> None:
        """Read the alarms of these entries now. On a CPU every step does; on a GPU, which waits for it, every 50th."""
        if not self.alarms.watched:
            return
        with self.lock:
            for name in names:
                entry = self.entry(name)
                began, counts = self.alarms.read(entry.state, entry.alarms)
                self.table.change(name, alarms=counts)
                self.alarms.publish([event._replace(stream=self._stream_of(name, event)) for event in began])

    @property
    def events(self) -> list[Event]:
        """The last alarms, the newest last; empty without ``health`` or ``guard``."""
        self.look(list(self.table.entries))
        return list(self.alarms.events)

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, name: str, path: str | PathLike[str]) -> None:
        """Write a state, its method and a fingerprint of the source model to a state file, atomically.

        A state that is not finite is refused, and an existing file stays as it is.
        """
        with self.reading(name) as entries:
            states.write(path, self._files.saved(entries[name]))

    @torch.inference_mode(False)
    def load(self, name: str, path: str | PathLike[str]) -> Self:
        """Replace a state, or add an entry, by the content of a state file."""
        like = self._like_of(name)
        saved = states.read(path)
        self.replace_state(name, self._files.state(path, saved, like), frozen=saved.frozen)
        return self

    def to_bytes(self, name: str) -> bytes:
        """Return the bytes of a state file."""
        with self.reading(name) as entries:
            return states.encode(self._files.saved(entries[name]), f"the bytes of stream {name!r}")

    @torch.inference_mode(False)
    def from_bytes(self, name: str, data: bytes) -> Self:
        """Replace a state, or add an entry, by the content of the bytes of a state file."""
        like = self._like_of(name)
        source, saved = decode_bytes(name, data)
        self.replace_state(name, self._files.state(source, saved, like), frozen=saved.frozen)
        return self

    @torch.inference_mode(False)
    def check_bytes(self, name: str, data: bytes) -> None:
        """Raise what `from_bytes` raises; change nothing."""
        like = self._like_of(name)
        self._files.state(*decode_bytes(name, data), like)

    # -- the network --------------------------------------------------------------------------------------------------

    def check_place(self) -> None:
        """Raise if the network was moved or cast without these states."""
        if (place := place_of(self.net)) != self._place:
            of_network, of_states = (f"on {device} in {dtype}" for device, dtype in (place, self._place))
            raise RuntimeError(
                f"the network is {of_network}, these states are {of_states}: the network, or an adapter that shares "
                "it, was moved or cast. Call .to() on this adapter, too; move a network before tribe.fleet(network)"
            )

    def use(self, net: Backbone) -> None:
        """Go on with this network, which may have moved, or may be another."""
        if net is not self.net:
            for name, entry in list(self.table.entries.items()):
                if entry.history is not None:  # its snapshots belong to the other network
                    self.table.change(name, history=replace(entry.history, records=()))
        self.net, self._retired, self._place = net, None, place_of(net)
        self._runner.use(net)
        self._files.use(net)
        self.table.device = net.device
